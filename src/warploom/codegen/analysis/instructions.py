"""What an elementwise op costs in instructions: which pipe it keeps busy and how often.

A thread of a warp group holds some elements of a tile (`cuda.values`); an op is issued once for
each of them. The counts are those of the code `cuda.values` writes, as ptxas 13.5 translates it
for sm_90a (read off with `warploom sass show`); the rates of the pipes come from the machine.

    fma     fp32 lanes: FADD FMUL FFMA
    alu     half-rate lanes: FMNMX FSETP FSEL ISETP LOP3 PRMT F2FP
    mufu    special functions: MUFU.EX2 LG2 RCP RSQ TANH, conversions to and from integers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.codegen.ir.fuse import Fusion
from warploom.errors import InputError
from warploom.tile import BOOL, Op
from warploom.tile.dtypes import FP8, HALVES
from warploom.tile.ops import OPS

PIPES: tuple[str, ...] = ("fma", "alu", "mufu")
# kind -> instructions an element on (fma, alu, mufu)
INSTRUCTIONS: dict[str, tuple[float, float, float]] = {
    "fill": (0, 0, 0),
    "coordinate": (0, 1, 0),
    "load": (0, 4, 0),  # address, bounds, the load itself
    "copy": (0, 0, 0),  # a register gets another name
    "transpose": (0, 0, 0),  # the axes do
    "quad_order": (0, 0, 0),  # threads give what they hold
    "rename": (0.5, 1, 0),  # a vector from rows to columns; others cost nothing
    "abs": (0, 0, 0),  # operand modifiers
    "neg": (0, 0, 0),
    "low_nibble": (0, 2, 0),
    "high_nibble": (0, 1, 0),
    "philox": (20, 20, 0),
    "add": (1, 0, 0),
    "sub": (1, 0, 0),
    "mul": (1, 0, 0),
    "div": (1, 0, 1),
    "floordiv": (0, 1, 0),
    "max": (0, 1, 0),
    "min": (0, 1, 0),
    "relu": (0, 2, 0),
    "lt": (0, 1, 0),
    "le": (0, 1, 0),
    "gt": (0, 1, 0),
    "ge": (0, 1, 0),
    "eq": (0, 1, 0),
    "ne": (0, 1, 0),
    "and": (0, 0, 0),  # the second comparison takes the first one's predicate
    "or": (0, 0, 0),
    "not": (0, 0, 0),
    "where": (0, 1, 0),
    "exp2": (0, 0, 1),
    "exp": (1, 0, 1),
    "log2": (0, 0, 1),
    "log": (1, 0, 1),
    "reciprocal": (0, 0, 1),
    "rsqrt": (0, 0, 1),
    "tanh": (0, 0, 1),
    "sqrt": (7, 1, 1),
    "erf": (9, 2, 2),
    "gelu": (7, 2, 1),
    "gelu_tanh": (5, 0, 1),
    "sin": (12, 6, 0),
    "cos": (12, 6, 0),
    "reduce_sum": (1, 0, 0),
    "reduce_prod": (1, 0, 0),
    "reduce_max": (0, 1, 0),
    "reduce_min": (0, 1, 0),
    # Shuffles and accesses of shared and global memory are counted among the half-rate ones.
    "cumsum": (3.4, 3.6, 0),
    "argmax": (2, 12.8, 0),
    "lower_inverse": (2, 4.5, 0),
    "gather": (3.2, 4.8, 0),
    "slice": (0, 4, 0),  # a part that is no whole group of columns; others cost nothing
    "store": (0.5, 4, 0),
    "store_add": (0.5, 4, 0),
}
# The same along the rows of a tile: what 4 warps and 8 quads find out together.
ALONG_ROWS: dict[str, tuple[float, float, float]] = {
    "cumsum": (10, 8.3, 0),
    "argmax": (2, 70, 0.5),
    **dict.fromkeys(("reduce_sum", "reduce_prod"), (5, 6, 0)),
    **dict.fromkeys(("reduce_max", "reduce_min"), (0, 11, 0)),
}
FUSES = ("add", "sub")  # with a product that only they read: one FFMA


@dataclass(frozen=True)
class Work:
    """Element operations of one op by pipe, and whether it reads global memory."""

    pipes: Mapping[str, float] = field(default_factory=dict[str, float])
    reads_global: bool = False

    @property
    def issued(self) -> float:
        """Element operations in all: what the schedulers must issue."""
        return sum(self.pipes.values())


def work(
    fusion: Fusion, op: Op, elements: Mapping[str, float], rows: frozenset[str] = frozenset()
) -> Work:
    """What `op` does with the ops inlined into it.

    `elements` gives, by variable, how many elements the threads of one group work on; `rows` the
    axes that lie over warps.
    """
    totals: dict[str, float] = dict.fromkeys(PIPES, 0.0)
    reads: list[bool] = []
    for inner, fused in _expression(fusion, op):
        of = inner.dst if inner.dst is not None else inner.srcs[0]
        if OPS[inner.kind].group == "reduce":
            of = inner.srcs[0]
        count = elements[of.name]
        reads.append(inner.kind == "load")
        for pipe, number in zip(PIPES, _instructions(inner, rows), strict=True):
            totals[pipe] += 0.0 if fused else number * count
    return Work(totals, any(reads))


def _instructions(op: Op, rows: frozenset[str]) -> tuple[float, float, float]:
    if op.kind == "cast":
        assert op.dst is not None
        return _cast(op.srcs[0].type.dtype.name, op.dst.type.dtype.name)
    if op.kind in ALONG_ROWS and op.axis in rows:
        return ALONG_ROWS[op.kind]
    if op.kind not in INSTRUCTIONS:
        raise InputError(f"{op.where}: {op.kind} has no instruction count, so it cannot be timed")
    return INSTRUCTIONS[op.kind]


def _cast(source: str, target: str) -> tuple[float, float, float]:
    if source == target:
        return (0, 0, 0)
    if {"int32", "int8"} & {source, target}:
        return (0, 0, 1)
    if target in HALVES:
        return (0, 0.5, 0)  # F2FP packs two
    if target in FP8:
        return (0, 0.75, 0)  # F2FP packs two, PRMT joins pairs
    return (0, 1, 0)


def _expression(fusion: Fusion, op: Op) -> list[tuple[Op, bool]]:
    """The op and what is inlined into it; True where a multiplication becomes part of an FFMA."""
    found: dict[int, tuple[Op, bool]] = {op.id: (op, False)}
    for src in op.srcs:
        inner = fusion.inlined.get(src.name)
        if inner is None or inner.dst is None:
            continue
        for one, fused in _expression(fusion, inner):
            joins = (
                one is inner
                and one.kind == "mul"
                and op.kind in FUSES
                and op.dst is not None
                and inner.dst.type.names == op.dst.type.names
                and op.dst.type.dtype is not BOOL
                and not any(f for _, (o, f) in found.items() if o.kind == "mul" and o is not op)
            )
            found.setdefault(one.id, (one, fused or joins))
    return list(found.values())
