"""How far rounding alone may take a run of a program from its meaning in float64.

The program runs in float64 again and again, every result moved at random by as much as its rounding
on a GPU may move it (Monte Carlo arithmetic: Parker, Pierce and Eggert, "Monte Carlo arithmetic:
how to gamble with floating point and win", 2000). What comes out varies as the results of correct
executions do, whatever the program does to its errors: sums average them, differences of near
numbers enlarge them, a shared factor moves a whole row.

* A result in a type moves by up to half the distance of two numbers of the type, unless it is one.
* A sum of n terms moves by `unit * sqrt(n)` of the root of its squared terms and of the total: the
  probabilistic bound of Higham and Mary (SIAM J. Sci. Comput. 41, 2019) for every order.
* A function that the GPU approximates moves by the error its manual gives, see `APPROXIMATED`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warploom.tile.dtypes import FP32, DType, spacing
from warploom.tile.evaluate import Value
from warploom.tile.interpret import bind, companies, interpret, points, sizes
from warploom.tile.ir import Loop, Op, Program
from warploom.tile.widen import widened

HALF_ULP = 2.0**-24  # of fp32, relative
TINY = 2.0**-126  # the special functions of the GPU may give 0 for what is smaller
# Largest error of the code that `codegen` emits for a function: (relative, absolute). PTX ISA 9.0:
# ex2, lg2, rcp, rsqrt, tanh .approx; CUDA C programming guide, intrinsics: __fdividef 2 ulp;
# `cuda/device/values.cuh` for erf, gelu, sin and cos.
APPROXIMATED: dict[str, tuple[float, float]] = {
    "exp": (2.0**-22, 0.0),
    "exp2": (2.0**-22, 0.0),
    "log": (2.0**-22, 2.0**-22),
    "log2": (2.0**-22, 2.0**-22),
    "rsqrt": (2.0**-22.9, 0.0),
    "reciprocal": (2.0**-23, 0.0),
    "div": (2.0**-22, 0.0),
    "tanh": (2.0**-11, 0.0),
    "erf": (HALF_ULP, 2e-7),
    "gelu": (HALF_ULP, 3e-7),
    "gelu_tanh": (2.0**-11, 1e-3),
    "sin": (HALF_ULP, 1e-7),
    "cos": (HALF_ULP, 1e-7),
}
EXACT = frozenset(
    "load copy transpose rename slice gather quad_order where max min abs neg relu reduce_max "
    "reduce_min".split()
)
SUMS = ("reduce_sum", "cumsum", "reduce_prod", "mma")
# A tensor core cuts what it adds up: to fp32 for 16-bit operands, to 13 fraction bits for 8-bit
# ones (Hopper; "Dissecting the NVIDIA Hopper architecture", and DeepSeek-V3, section 3.5.2).
SUM_UNITS = {8: 2.0**-13, 16: 2.0**-23}
WORK = 20_000_000  # elements computed at most, where fewer tasks can stand for all: half a second
SAMPLES = 8  # of two, a few elements of thousands barely move in either


@dataclass(frozen=True)
class Spread:
    """An array's exact values in float64, and the standard deviation that rounding gives them.

    `known` says where both are: elsewhere no task ran, or a number is not finite.
    """

    kind: DType
    exact: NDArray[np.float64]
    deviation: NDArray[np.float64]
    known: NDArray[np.bool_]

    @property
    def relative(self) -> float:
        """The deviation over the array itself, both in norm; 0 where nothing is known."""
        size = np.linalg.norm(self.exact[self.known])
        return float(np.linalg.norm(self.deviation[self.known]) / (size or 1.0))


def spreads(
    program: Program,
    arrays: Mapping[str, Value],
    scalars: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, Spread]:
    """The spread of every array that `program` stores to; `arrays` has them in their types.

    Where all tasks would take long some of them run, evenly spread over the grid. NaN in what is
    stored, or integers that are no result, then mark what no task wrote.
    """
    stored = {op.array.name for op in program.ops() if op.array and op.kind == "store"}
    added = {op.array.name for op in program.ops() if op.array and op.kind == "store_add"}
    loaded = {op.array.name for op in program.ops() if op.array and op.kind == "load"}
    wide, values = widened(program), {k: v.astype(float) for k, v in bind(program, arrays).items()}
    values |= {a.name: arrays[a.name] for a in program.arrays if not a.dtype.is_float}
    # All tasks, where others find what they left, or nothing marks what no task wrote.
    floats = [name for name in stored if program.array(name).dtype.is_float]
    kept = any(not np.isnan(values[name]).all() for name in floats)
    whole = bool(added or stored & loaded or kept)
    tasks = _chosen(program, values, whole)
    exact = interpret(wide, values, scalars, tasks)
    squares = {name: np.zeros(exact[name].shape) for name in stored | added}
    with np.errstate(all="ignore"):
        for sample in range(SAMPLES):
            noise = _Noise(program, np.random.default_rng((seed, sample)))
            moved = interpret(wide, values, noise.scalars(scalars or {}), tasks, noise)
            for name in squares:
                squares[name] += (moved[name].astype(float) - exact[name]) ** 2
    found: dict[str, Spread] = {}
    for name, total in squares.items():
        known = np.isfinite(total) & np.isfinite(exact[name])
        kind = program.array(name).dtype
        if not (whole or kind.is_float):
            known &= exact[name] != values[name]
        deviation = np.where(known, np.sqrt(total / SAMPLES), 0.0)
        found[name] = Spread(kind, exact[name].astype(float), deviation, known)
    return found


def _chosen(program: Program, values: Mapping[str, Value], whole: bool) -> list[dict[str, int]]:
    """The tasks to run: all, or as many as `WORK` allows, evenly spread over the grid."""
    symbols = sizes(program, values)
    groups = list(companies(program, points(program, symbols)))
    if not groups or whole:
        return [task for group in groups for task in group]
    first = {**symbols, **{read.name: 0 for read in program.every_read()}}
    heaviest = max(_work(program.body, {**first, **group[0]}) for group in (groups[0], groups[-1]))
    count = WORK // max(1, heaviest * len(groups[0]) * (1 + SAMPLES))
    count = min(len(groups), max(2, count))
    places = sorted({int(at) for at in np.linspace(0, len(groups) - 1, count)})
    return [task for place in places for task in groups[place]]


def _work(body: Sequence[Op | Loop], symbols: dict[str, int]) -> int:
    """About how many elements a task computes."""
    total = 0
    for item in body:
        if isinstance(item, Op):
            total += math.prod(item.dst.type.shape) if item.dst else 0
            continue
        start, stop = item.start.evaluate(symbols), item.stop.evaluate(symbols)
        total += max(0, stop - start) * _work(item.body, {**symbols, item.index: start})
    return total


class _Noise:
    """Moves what the ops of `program`, made fp64, compute: `evaluate.Disturbance`."""

    def __init__(self, program: Program, random: np.random.Generator) -> None:
        self.program, self.random = program, random
        self.ops = {op.id: op for op in program.ops()}

    def scalars(self, values: Mapping[str, float]) -> dict[str, float]:
        """Scalars as they are passed: rounded to their types."""
        types = {var.name: var.type.dtype for var in self.program.scalars}
        return {
            name: float(self._rounded(types[name], np.asarray(value, float)))
            if name in types and types[name].is_float
            else value
            for name, value in values.items()
        }

    def operands(self, op: Op, values: Sequence[Value]) -> Sequence[Value]:
        if op.kind == "exp":  # 2 to the power of a rounded product
            return [self._moved(values[0], 2 * HALF_ULP)]
        unit = self._sum_unit(op)
        return [self._moved(values[0], unit), *values[1:]] if unit else values

    def result(self, op: Op, value: Value) -> Value:
        own = self.ops[op.id]
        kind = own.dst.type.dtype if own.dst else own.array.dtype if own.array else FP32
        if op.kind in EXACT or not kind.is_float:
            return value
        unit = self._sum_unit(op)
        if op.kind in APPROXIMATED:
            relative, absolute = APPROXIMATED[op.kind]
            size = np.abs(value)
            value = value + np.where(size < TINY, size, relative * size + absolute) * (
                self._uniform(value)
            )
        elif unit:
            value = self._moved(value, unit)
        # What a sum in fp32 is off by has its last rounding in it.
        return value if unit and kind is FP32 else self._rounded(kind, value)

    def _sum_unit(self, op: Op) -> float:
        """What a sum of so many terms may be off by, relative to its terms."""
        own = self.ops[op.id]
        if op.kind not in SUMS or own.dst is None or not own.dst.type.dtype.is_float:
            return 0.0
        terms = own.srcs[0].type
        if op.kind != "mma":
            return HALF_ULP * math.sqrt(terms.size(op.axis))
        (axis,) = (name for name in terms.names if name in own.srcs[1].type.names)
        return SUM_UNITS[terms.dtype.bits] * math.sqrt(terms.size(axis))

    def _moved(self, value: Value, relative: float) -> Value:
        return value * (1.0 + relative * self._uniform(value))

    def _uniform(self, value: Value) -> NDArray[np.float32]:
        return 2.0 * self.random.random(value.shape, np.float32) - 1.0

    def _rounded(self, kind: DType, value: Value) -> Value:
        """Moved by up to half the distance of two numbers of `kind`, unless it is one."""
        step = spacing(kind, np.where(np.isfinite(value), value, 0.0))
        inexact = np.rint(value / step) * step != value
        if not inexact.any():
            return value
        return value + (0.5 * inexact) * step * self._uniform(value)


def limits(spread: Spread, deviations: float) -> NDArray[np.float64]:
    """How far each element may be from its meaning: so many standard deviations.

    Few samples say little of one element, so it has at least the deviation of the elements beside
    it along the last axis, in the mean, and in proportion where it is larger than they are, and
    that of one rounding to its type where anything is rounded. Infinite where nothing is known.
    """
    known = spread.known
    own = np.where(known, spread.deviation, 0.0)
    size = np.where(known, np.abs(spread.exact), 0.0)
    counts = np.maximum(np.sum(known, -1, keepdims=True), 1)
    beside, usual = (np.sqrt(np.sum(x**2, -1, keepdims=True) / counts) for x in (own, size))
    larger = np.maximum(size / np.where(usual > 0, usual, 1.0), 1.0)
    own = np.maximum(own, beside * larger)
    if spread.kind.is_float and own.any():
        own = np.maximum(own, spacing(spread.kind, size) / math.sqrt(12.0))
    return np.where(known, deviations * own, np.inf)
