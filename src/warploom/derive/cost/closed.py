"""Closed forms: H*(M) = constant + α·M^(-β), piece by piece, exactly.

As the stream slices go to zero each column leaves a few terms in the group sizes. For every choice
of which groups sit at their limits (g = axis or g = 1) the rest is a small geometric program; when
it has one term more than variables its dual has a single point, which gives α and β in closed form
(no fitting). The law is the least of the feasible pieces, so it saturates where tiles do
(a power law holds only while 1 <= g <= a).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from itertools import product as cartesian
from typing import Any

import numpy as np

from warploom.derive.cost.cost import PAPER, Accounting, memory, traffic
from warploom.derive.cost.posynomial import Exponents, Posynomial, total, variable
from warploom.derive.formula.external import sympy
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError


@dataclass(frozen=True)
class Piece:
    """One active set: `pinned` tiles, exponent `beta`, symbolic `alpha` and `constant`."""

    pinned: tuple[tuple[str, str], ...]
    beta: Fraction
    alpha: Any
    constant: Posynomial
    weights: tuple[tuple[Exponents, float], ...]
    sizes: tuple[tuple[str, float], ...]
    coefficients: tuple[tuple[Exponents, float], ...] = ()

    def value(self, capacity: float) -> float:
        """H* at a capacity in values (whether or not the piece is feasible there)."""
        numbers = {sympy().Symbol(n, positive=True): v for n, v in self.sizes}
        scale = float(self.alpha.subs(numbers)) if self.alpha != 0 else 0.0
        return self.constant.value(dict(self.sizes)) + scale * capacity ** -float(self.beta)

    def __str__(self) -> str:
        """`2 d q + (4 d² q x)·M^-1`, with what is pinned."""
        law = str(self.constant)
        if self.alpha != 0:
            law += f" + ({self.alpha})·M^-{self.beta}"
        held = ", ".join(f"{name} = {limit}" for name, limit in self.pinned)
        return f"{law}  [{held}]" if held else law


@dataclass(frozen=True)
class Law:
    """The pieces that are optimal somewhere, with the capacities between which they are."""

    pieces: tuple[tuple[Piece, float, float], ...]

    def at(self, capacity: float) -> Piece:
        """The piece that holds at a capacity; raises `InputError` outside the law's range."""
        for piece, low, high in self.pieces:
            if low <= capacity <= high:
                return piece
        least = self.pieces[0][1] if self.pieces else math.inf
        raise InputError(
            f"no closed form at M = {capacity:.0f} values: it needs at least {least:.0f}"
        )

    def value(self, capacity: float) -> float:
        """H* at a capacity in values."""
        return self.at(capacity).value(capacity)

    def __str__(self) -> str:
        """One line a piece."""
        return "\n".join(
            f"{low:.4g} <= M <= {high:.4g}: {piece}" for piece, low, high in self.pieces
        )


def law(kernel: Kernel, accounting: Accounting = PAPER) -> Law:
    """The piecewise power law of a kernel as its stream slices go to zero."""
    candidates = list(_pieces(kernel, accounting))
    if not candidates:
        raise InputError(f"kernel {kernel.name} has no closed form: solve it numerically")
    found: list[tuple[Piece, float, float]] = []
    grid = np.logspace(0, 12, 1200 + 1)
    for capacity in grid:
        best = _best(candidates, float(capacity))
        if best is None:
            continue
        if found and found[-1][0] == best:
            found[-1] = (best, found[-1][1], float(capacity))
        else:
            found.append((best, float(capacity), float(capacity)))
    joined: list[tuple[Piece, float, float]] = []
    for index, (piece, low, high) in enumerate(found):
        last = index == len(found) - 1
        joined.append((piece, low, math.inf if last else found[index + 1][1] if high else high))
    return Law(tuple(joined))


def _best(candidates: list[tuple[Piece, Any]], capacity: float) -> Piece | None:
    """The cheapest piece whose tiles are inside their limits at a capacity."""
    best: tuple[float, Piece] | None = None
    for piece, feasible in candidates:
        if feasible(capacity):
            value = piece.value(capacity)
            if best is None or value < best[0] * (1 - 1e-12):
                best = (value, piece)
    return best[1] if best else None


def _pieces(kernel: Kernel, accounting: Accounting) -> Iterator[tuple[Piece, Any]]:
    """Every active set with a closed form, and the test of where it is feasible."""
    groups = [loop for loop in kernel.loops if loop.kind == "group"]
    streams = frozenset(loop.symbol for loop in kernel.loops if loop.kind == "stream")
    sizes = {axis: float(size) for axis, size in kernel.body.size.items()}
    objective = traffic(kernel)
    if objective.variables() & streams:
        return
    columns = [
        Posynomial(tuple(t for t in c.terms if not t.variables() & streams))
        for c in memory(kernel, accounting)
    ]
    columns = [c for c in dict.fromkeys(columns) if c.terms]
    for column in columns or [Posynomial(())]:
        for choice in cartesian(("free", "all", "one"), repeat=len(groups)):
            pinned = {
                g.symbol: (g.axis if c == "all" else "1")
                for g, c in zip(groups, choice, strict=True)
                if c != "free"
            }
            free = tuple(g.symbol for g, c in zip(groups, choice, strict=True) if c == "free")
            piece = _piece(objective, column, pinned, free, sizes)
            if piece is not None:
                upper = {g.symbol: sizes[g.axis] for g in groups}
                yield piece, _feasibility(piece, columns, pinned, free, upper, sizes, column)


def _collect(part: Posynomial, free: tuple[str, ...]) -> dict[Exponents, Posynomial]:
    """Terms grouped by their exponents in the free variables; coefficients stay symbolic."""
    grouped: dict[Exponents, list[Posynomial]] = {}
    for term in part.terms:
        mine = tuple((n, p) for n, p in term.powers if n in free)
        rest = tuple((n, p) for n, p in term.powers if n not in free)
        grouped.setdefault(mine, []).append(Posynomial.build([(rest, term.coefficient)]))
    return {key: total(parts) for key, parts in grouped.items()}


def _piece(
    objective: Posynomial,
    column: Posynomial,
    pinned: Mapping[str, str],
    free: tuple[str, ...],
    sizes: Mapping[str, float],
) -> Piece | None:
    """The closed form of one active set, or None when its dual is not a single point."""
    values = {n: (1.0 if v == "1" else variable(v)) for n, v in pinned.items()}
    goal = _collect(objective.substitute(values), free)
    limit = _collect(column.substitute(values), free)
    constant_part = goal.pop((), Posynomial(()))
    frozen = tuple(sizes.items())
    held = tuple(pinned.items())
    if not goal:
        return (
            Piece(held, Fraction(0), sympy().Integer(0), constant_part, (), frozen)
            if not free
            else None
        )
    if () in limit or len(goal) + len(limit) != len(free) + 1:
        return None
    keys = [*goal, *limit]
    matrix = np.zeros((len(free) + 1, len(keys)))
    for index, key in enumerate(keys):
        powers = dict(key)
        matrix[: len(free), index] = [float(powers.get(name, 0)) for name in free]
        matrix[len(free), index] = 1.0 if index < len(goal) else 0.0
    right = np.zeros(len(free) + 1)
    right[-1] = 1.0
    if abs(np.linalg.det(matrix)) < 1e-12:
        return None
    weights = np.linalg.solve(matrix, right)
    if (weights <= 1e-9).any():
        return None
    beta = Fraction(float(weights[len(goal) :].sum())).limit_denominator(64)
    alpha = _alpha(goal, limit, weights)
    numbers = tuple((key, coefficient.value(dict(sizes))) for key, coefficient in goal.items())
    shares = tuple(zip(keys, weights.tolist(), strict=True))
    return Piece(held, beta, alpha, constant_part, shares, frozen, numbers)


def _alpha(
    goal: Mapping[Exponents, Posynomial], limit: Mapping[Exponents, Posynomial], weights: Any
) -> Any:
    """Π (c/δ)^δ over all terms times λ^λ of the limit: the dual optimum of a geometric program."""
    sp = sympy()
    alpha = sp.Integer(1)
    spent = Fraction(0)
    for coefficient, weight in zip([*goal.values(), *limit.values()], weights, strict=True):
        share = Fraction(float(weight)).limit_denominator(64)
        exponent = sp.Rational(share.numerator, share.denominator)
        alpha *= (coefficient.symbolic() / exponent) ** exponent
    for weight in weights[len(goal) :]:
        spent += Fraction(float(weight)).limit_denominator(64)
    power = sp.Rational(spent.numerator, spent.denominator)
    return sp.simplify(alpha * power**power)


def _feasibility(
    piece: Piece,
    columns: list[Posynomial],
    pinned: Mapping[str, str],
    free: tuple[str, ...],
    upper: Mapping[str, float],
    sizes: Mapping[str, float],
    binding: Posynomial,
) -> Any:
    """A test of a capacity: are the piece's tiles within their limits and all columns within M?"""
    fixed = {n: (1.0 if v == "1" else sizes[v]) for n, v in pinned.items()}

    def test(capacity: float) -> bool:
        tiles = {**fixed, **_tiles(piece, free, binding, sizes, fixed, capacity)}
        if any(not 1 - 1e-9 <= tiles[n] <= upper[n] * (1 + 1e-9) for n in free):
            return False
        point = {**sizes, **tiles}
        return all(column.value(point) <= capacity * (1 + 1e-9) for column in columns)

    return test


def _tiles(
    piece: Piece,
    free: tuple[str, ...],
    binding: Posynomial,
    sizes: Mapping[str, float],
    fixed: Mapping[str, float],
    capacity: float,
) -> dict[str, float]:
    """The free tiles at a capacity: each term of the limit takes its dual share of M."""
    if not free:
        return {}
    limit = _collect(binding.substitute(dict(fixed)), free)
    shares = dict(piece.weights)
    spent = sum(shares[key] for key in limit)
    rows: list[list[float]] = []
    right: list[float] = []
    for key, coefficient in limit.items():
        powers = dict(key)
        rows.append([float(powers.get(name, 0)) for name in free])
        right.append(math.log(capacity * shares[key] / spent / coefficient.value(dict(sizes))))
    goal = [(k, w) for k, w in piece.weights if k not in limit]
    table = dict(piece.coefficients)
    for (first, a), (second, b) in pairwise(goal):
        rows.append([float(dict(first).get(n, 0) - dict(second).get(n, 0)) for n in free])
        right.append(math.log(a / b * table[second] / table[first]))
    solution = np.linalg.lstsq(np.array(rows), np.array(right), rcond=None)[0]
    return dict(zip(free, np.exp(solution).tolist(), strict=True))
