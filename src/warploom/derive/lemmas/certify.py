"""Independent checks of a streaming lemma: exact identity, fold and merge laws, float32 stability.

Nothing here knows how a lemma was found. The identity is evaluated in 60-digit arithmetic at random
points; the laws are tested by actually folding and merging random streams cut at random places; the
stability test compares float32 streaming with float32 two-pass evaluation of the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from warploom.derive.formula.external import mpmath, sympy
from warploom.derive.formula.ops import MAPS, MONOIDS
from warploom.derive.lemmas.cascade import Scalar
from warploom.derive.lemmas.lemma import Lemma, Term

DIGITS = 60
EXACT = 1e-40
"""Largest relative residual of an identity in arithmetic of so many digits."""
SLACK = 50.0
"""A stable stream loses at most this factor against two-pass evaluation, in the same precision."""


def identity_error(lemma: Lemma, samples: int = 4, seed: int = 7) -> float:
    """Largest relative residual of F = Σ h·f_1 and of f(r') = C(r, r') f(r), 60 digits."""
    mp = mpmath()
    rng = np.random.default_rng(seed)
    worst = 0.0
    with mp.workdps(DIGITS):
        for _ in range(samples):
            point = _random_point(lemma.scalar, rng)
            whole = _exact(lemma.scalar.formula, point)
            parts = [_exact(t.factor, point) * _exact(t.basis[0], point) for t in lemma.terms]
            worst = max(worst, _relative(whole, sum(parts)))
    return max(worst, motion_error(lemma.scalar, lemma.terms, samples, seed))


def motion_error(scalar: Scalar, terms: tuple[Term, ...], samples: int = 4, seed: int = 7) -> float:
    """Largest relative residual of f(r') = C(r, r') f(r) alone, 60 digits."""
    mp = mpmath()
    rng = np.random.default_rng(seed)
    worst = 0.0
    with mp.workdps(DIGITS):
        for _ in range(samples):
            point = _random_point(scalar, rng)
            moved = dict(point)
            for name in scalar.bases:
                moved[name] = _number(rng)
                point[f"old_{name}"], point[f"new_{name}"] = point[name], moved[name]
            worst = max([worst, *(_motion(term, point, moved) for term in terms)])
    return worst


def _motion(term: Term, point: dict[str, Any], moved: dict[str, Any]) -> float:
    """One term's functional equation at one pair of base values."""
    before = [_exact(item, point) for item in term.basis]
    after = [_exact(item, moved) for item in term.basis]
    if not term.matrix:
        return max(_relative(a, b) for a, b in zip(after, before, strict=True))
    errors: list[float] = []
    for row, want in zip(term.matrix, after, strict=True):
        entries = [_exact(entry, point) for entry in row]
        if term.join == "add":
            got = entries[0] + before[0]
        else:
            got = sum(c * f for c, f in zip(entries, before, strict=True))
        errors.append(_relative(want, got))
    return max(errors)


def _relative(want: Any, got: Any) -> float:
    """Relative difference of two high-precision numbers."""
    return float(abs(want - got) / (abs(want) + abs(got) + mpmath().mpf(10) ** -50))


def _number(rng: np.random.Generator) -> Any:
    """A positive random rational, so that roots and logarithms are defined."""
    return mpmath().mpf(int(rng.integers(3, 997))) / 331


def _random_point(scalar: Scalar, rng: np.random.Generator) -> dict[str, Any]:
    """Random values for every symbol of a formula."""
    return {name: _number(rng) for name in (*scalar.bases, *scalar.leaves, *scalar.parameters)}


def _exact(expression: Any, point: Mapping[str, Any]) -> Any:
    """A sympy expression at a point in the current mpmath precision."""
    function, names = _compiled(expression, "mpmath")
    return function(*[point[name] for name in names])


@cache
def _compiled(expression: Any, backend: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """(function, argument names) of an expression for mpmath or numpy."""
    symbols = sorted(expression.free_symbols, key=str)
    if backend == "mpmath":
        opaque = {name: _smooth(index) for index, name in enumerate(_OPAQUE)}
        modules: list[Any] = [opaque, "mpmath"]
    else:
        modules = [{spec.name: spec.apply for spec in MAPS if spec.name in _OPAQUE}, "numpy"]
    function = sympy().lambdify(symbols, expression, modules=modules)
    return function, tuple(str(symbol) for symbol in symbols)


_OPAQUE = ("maximum", "abs", "relu", "sigmoid", "silu", "gelu", "tanh")


def _smooth(index: int) -> Callable[..., Any]:
    """A stand-in for an uninterpreted function: an identity must hold for any function."""
    return lambda *args: mpmath().sin(sum(args) * (index + 2)) + index + 3


def numeric(expression: Any, values: Mapping[str, Any]) -> Any:
    """A sympy expression on numpy arrays (broadcast), in their precision."""
    function, names = _compiled(expression, "numpy")
    return function(*[values[name] for name in names])


Stream = Mapping[str, Any]
"""Leaf symbol to its one-dimensional samples."""


def direct(lemma: Lemma, sources: Mapping[str, str], stream: Stream, fixed: Stream) -> Any:
    """The reduction by definition: bases over the whole stream first, then F summed."""
    values = {**stream, **fixed, **_bases(lemma, sources, stream)}
    return _monoid(lemma).reduce(numeric(lemma.scalar.formula, values), 0)


def fold(
    lemma: Lemma, sources: Mapping[str, str], stream: Stream, fixed: Stream, cuts: list[int]
) -> Any:
    """The same result slice by slice, the state corrected whenever a base moves."""
    length = len(next(iter(stream.values())))
    edges = [0, *cuts, length]
    state: State | None = None
    for low, high in pairwise(edges):
        part = {name: values[low:high] for name, values in stream.items()}
        fresh = lift(lemma, sources, part, fixed)
        if state is None:
            state = fresh
            continue
        # The slice is evaluated at the joined base, as a kernel does.
        joined = _join_bases(lemma, sources, state, fresh)
        state = _accumulate(
            lemma, state, _states_at(lemma, part, fixed, joined, high - low), joined, fixed
        )
    assert state is not None
    return finish(lemma, state, fixed)


class State:
    """Bases, one accumulator list a term, and how many elements are behind them."""

    def __init__(self, bases: dict[str, Any], sums: list[list[Any]], count: float) -> None:
        self.bases = bases
        self.sums = sums
        self.count = count


def lift(lemma: Lemma, sources: Mapping[str, str], stream: Stream, fixed: Stream) -> State:
    """The state of one slice on its own."""
    bases = _bases(lemma, sources, stream)
    return _states_at(lemma, stream, fixed, bases, len(next(iter(stream.values()))))


def merge(
    lemma: Lemma, sources: Mapping[str, str], left: State, right: State, fixed: Stream
) -> State:
    """Two partial states into one: both are moved to the joined base, then combined."""
    joined = _join_bases(lemma, sources, left, right)
    moved = State(joined, _moved(lemma, right, joined, fixed), right.count)
    return _accumulate(lemma, left, moved, joined, fixed)


def finish(lemma: Lemma, state: State, fixed: Stream) -> Any:
    """The reduction's value: Σ h(bases)·first(state)."""
    values = {**fixed, **state.bases}
    if lemma.terms[0].join == "add":
        return state.sums[0][0]
    return sum(
        numeric(term.factor, values) * sums[0]
        for term, sums in zip(lemma.terms, state.sums, strict=True)
    )


def is_stable(lemma: Lemma, sources: Mapping[str, str]) -> bool:
    """Float32 streaming is about as exact as float32 two-pass evaluation on hard data.

    The data are large (scores of hundreds) and shifted (mean ≫ spread); the reference is two-pass
    float64. A stream fails when it overflows or loses more than `SLACK` times what two-pass loses.
    """
    rng = np.random.default_rng(11)
    for hard, scale, shift in _hard_cases(tuple(lemma.scalar.leaves)):
        exact = {n: rng.standard_normal(96) for n in lemma.scalar.leaves}
        exact[hard] = scale * exact[hard] + shift
        constant = {n: np.float64(0.75) for n in lemma.scalar.parameters}
        single = {n: v.astype(np.float32) for n, v in exact.items()}
        rounded = {n: v.astype(np.float64) for n, v in single.items()}
        fixed = {n: np.float32(v) for n, v in constant.items()}
        with np.errstate(all="ignore"):
            want = float(direct(lemma, sources, rounded, constant))
            two_pass = float(direct(lemma, sources, single, fixed))
            streamed = float(fold(lemma, sources, single, fixed, [7, 33, 70]))
        if not np.isfinite(want) or not np.isfinite(two_pass):
            continue
        allowed = SLACK * (abs(two_pass - want) + 2e-7 * abs(want) + 1e-30)
        if not abs(streamed - want) <= allowed:
            return False
    return True


_HARD = (
    (1.0, 0.0),
    (300.0, 0.0),
    (1.0, 1000.0),
)


def _hard_cases(leaves: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """(leaf, scale, shift): one leaf at a time is plain, large, or far from zero."""
    return [(n, a, b) for n in leaves for a, b in _HARD]


def _bases(lemma: Lemma, sources: Mapping[str, str], stream: Stream) -> dict[str, Any]:
    """Every base over a slice. A base is modelled as its monoid over a leaf that it is made of.

    What a base reduces does not matter to the lemma, which must hold for any base values, but to
    the stability test: the maximum of another leaf lets two-pass evaluation overflow, too. Where no
    leaf is known it is the first one (positive for sums).
    """
    first = next(iter(stream))
    result: dict[str, Any] = {}
    for name, value in lemma.scalar.bases.items():
        kind = sources[value]
        leaf = stream[lemma.scalar.carriers.get(name, first)]
        body = leaf if kind in ("max", "min", "mean") else np.abs(leaf) + leaf.dtype.type(0.5)
        result[name] = MONOIDS[kind].reduce(body, 0)
    return result


def _join_bases(
    lemma: Lemma, sources: Mapping[str, str], left: State, right: State
) -> dict[str, Any]:
    """The bases of two slices together."""
    return {
        name: MONOIDS[sources[value]].combine(
            left.bases[name], left.count, right.bases[name], right.count
        )
        for name, value in lemma.scalar.bases.items()
    }


def _states_at(
    lemma: Lemma, stream: Stream, fixed: Stream, bases: Mapping[str, Any], count: float
) -> State:
    """Every accumulator of a slice, evaluated at given bases."""
    values = {**stream, **fixed, **bases}
    length = len(next(iter(stream.values())))
    sums = [
        [
            _monoid(lemma).reduce(np.broadcast_to(numeric(item, values), (length,)), 0)
            for item in term.basis
        ]
        for term in lemma.terms
    ]
    return State(dict(bases), sums, count)


def _moved(lemma: Lemma, state: State, bases: Mapping[str, Any], fixed: Stream) -> list[list[Any]]:
    """The accumulators of a state moved to other bases."""
    values = dict(fixed)
    for name in lemma.scalar.bases:
        values[f"old_{name}"], values[f"new_{name}"] = state.bases[name], bases[name]
    return [_apply(term, sums, values) for term, sums in zip(lemma.terms, state.sums, strict=True)]


def _apply(term: Term, sums: list[Any], values: Mapping[str, Any]) -> list[Any]:
    """C times the accumulators (or C plus, for max and min)."""
    if not term.matrix:
        return sums
    if term.join == "add":
        return [numeric(term.matrix[0][0], values) + sums[0]]
    return [
        sum(numeric(entry, values) * value for entry, value in zip(row, sums, strict=True))
        for row in term.matrix
    ]


def _accumulate(
    lemma: Lemma, state: State, fresh: State, bases: Mapping[str, Any], fixed: Stream
) -> State:
    """Move `state` to the new bases and combine it with a slice evaluated there."""
    monoid = _monoid(lemma)
    moved = _moved(lemma, state, bases, fixed)
    sums = [
        [monoid.combine(a, state.count, b, fresh.count) for a, b in zip(old, new, strict=True)]
        for old, new in zip(moved, fresh.sums, strict=True)
    ]
    return State(dict(bases), sums, state.count + fresh.count)


def _monoid(lemma: Lemma) -> Any:
    """The reduction's monoid; a contraction sums."""
    node = lemma.scalar.node
    return MONOIDS[node.op if node.kind == "reduce" else "sum"]
