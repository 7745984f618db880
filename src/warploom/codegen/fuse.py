"""Which tiles exist: temporaries of elementwise chains are computed where they are used.

An op is *inlined* when its value is cheap to compute again (a coordinate, a constant, a condition)
or has one reader of the same shape that works element by element. What is left are the ops that a
schedule places. The emitter expands inlined ops into its reader's expression.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from warploom.errors import InputError
from warploom.tile import BOOL, Loop, Op, Program, Var
from warploom.tile.ops import OPS

ELEMENTWISE = ("unary", "binary", "compare", "select")
FREE = ("fill", "coordinate")


@dataclass(frozen=True)
class Fusion:
    """The ops that are inlined, by the variable each defines, and the ops that remain."""

    inlined: dict[str, Op]
    kept: frozenset[int]

    def sources(self, op: Op) -> tuple[Var, ...]:
        """The variables `op` reads once inlined sources are expanded, each once."""
        found: dict[str, Var] = {}
        for src in op.srcs:
            inner = self.inlined.get(src.name)
            for var in (src,) if inner is None else self.sources(inner):
                found[var.name] = var
        return tuple(found.values())


def fuse(program: Program) -> Fusion:
    """Decide what is inlined (rules above); raises when a condition cannot be."""
    writers: dict[str, list[Op]] = defaultdict(list)
    readers: dict[str, list[Op]] = defaultdict(list)
    body_of: dict[int, int] = {}
    _index(program.body, body_of)
    for op in program.ops():
        if op.dst is not None:
            writers[op.dst.name].append(op)
        for src in op.srcs:
            readers[src.name].append(op)
    inlined: dict[str, Op] = {}
    for op in program.ops():
        if op.dst is None or len(writers[op.dst.name]) != 1:
            continue
        uses = readers[op.dst.name]
        if _inlinable(op, uses, body_of) and _stable(op, uses, writers, inlined):
            inlined[op.dst.name] = op
        elif op.dst.type.dtype is BOOL:
            raise InputError(
                f"{op.where}: condition {op.dst.name} is used after its operands changed or by an "
                f"op that needs it in registers ({', '.join(u.kind for u in uses)}); compute it "
                "where it is used"
            )
    dropped = {op.id for op in inlined.values()}
    kept = frozenset(op.id for op in program.ops() if op.id not in dropped)
    return Fusion(inlined, kept)


def _index(body: tuple[Op | Loop, ...], body_of: dict[int, int]) -> None:
    for item in body:
        if isinstance(item, Loop):
            _index(item.body, body_of)
        else:
            body_of[item.id] = id(body)


def _inlinable(op: Op, uses: list[Op], body_of: dict[int, int]) -> bool:
    assert op.dst is not None
    if any(not _elementwise_reader(use) for use in uses):
        return False
    if op.kind in FREE:
        return True
    if OPS[op.kind].group not in ELEMENTWISE and op.kind != "cast":
        return False
    if any(body_of[use.id] != body_of[op.id] for use in uses):
        return False
    if op.dst.type.dtype is BOOL:
        return True
    return len(uses) == 1 and _shape_of(uses[0]) == set(op.dst.type.names)


def _shape_of(op: Op) -> set[str]:
    widest: set[str] = set()
    for var in (*op.srcs, *((op.dst,) if op.dst is not None else ())):
        widest |= set(var.type.names)
    return widest


def _elementwise_reader(op: Op) -> bool:
    return OPS[op.kind].group in (*ELEMENTWISE, "reduce") or op.kind in ("cast", "copy")


def _stable(op: Op, uses: list[Op], writers: dict[str, list[Op]], inlined: dict[str, Op]) -> bool:
    # Nothing writes what the inlined expression reads between its place and the last use of it.
    last = max((use.id for use in uses), default=op.id)
    leaves = [op]
    while leaves:
        node = leaves.pop()
        for src in node.srcs:
            if any(op.id < writer.id < last for writer in writers[src.name]):
                return False
            if src.name in inlined:
                leaves.append(inlined[src.name])
    return True
