"""What one tile depends on, and what an op makes of it.

A fact covers a tile at each position by itself: `sources` are the elements of arrays that its
value there is made of, `numbers` the sizes, counters, scalars and numbers read from arrays that it
depends on other than by addresses. Where a mask makes the tile a constant from some place of an
axis on, `tails` says so; a sum over that axis then depends on what lies before that place only.

Assumed, and stated with every certificate: numbers are finite, so that 0 times x is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from warploom.codegen.invariance.forms import EVERY, over
from warploom.tile import Index, Op, TileType
from warploom.tile.index import const
from warploom.tile.ops import OPS

NEUTRAL = {"reduce_sum": 0.0, "reduce_prod": 1.0, "reduce_max": -math.inf, "reduce_min": math.inf}
LESS, GREATER = {"lt": 0, "le": 1}, {"gt": 0, "ge": 1}


@dataclass(frozen=True)
class Place:
    """Where in a dimension a tile's elements come from: at `start`, or of `span` elements from it.

    `axis`: those follow a tile's axis; `exact`: the element at position i is number start + i.
    """

    start: Index
    span: int | None = None
    axis: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Limit:
    """The positions i of an axis for which start + i < stop."""

    axis: str
    start: Index
    stop: Index


@dataclass(frozen=True)
class Source:
    """Elements of an array that a tile depends on; `below`: those within these limits alone.

    Without an array: the place itself, which the tile's value tells.
    """

    array: str
    at: tuple[Place, ...]
    below: frozenset[Limit] = frozenset()


@dataclass(frozen=True)
class Fact:
    """What a tile depends on (see above).

    value    the number that all elements are
    tails    the number that all elements outside of a limit are
    counts   (axis, start): the element at position i of the axis is start + i
    at_most  what no element exceeds
    """

    sources: frozenset[Source] = frozenset()
    numbers: frozenset[str] = frozenset()
    value: float | None = None
    tails: frozenset[tuple[Limit, float]] = frozenset()
    counts: tuple[str, Index] | None = None
    at_most: frozenset[Index] = frozenset()

    def tail(self, limit: Limit) -> float | None:
        """The number that elements outside of a limit are."""
        return dict(self.tails).get(limit, self.value)

    def joined(self, other: Fact) -> Fact:
        """What holds of a tile that is one or the other."""
        return Fact(
            self.sources | other.sources,
            self.numbers | other.numbers,
            self.value if self.value == other.value else None,
            frozenset(
                (limit, value)
                for limit, value in self.tails | other.tails
                if self.tail(limit) == other.tail(limit) == value
            ),
            self.counts if self.counts == other.counts else None,
            self.at_most & other.at_most,
        )

    def mapped(self, names: Iterable[str]) -> Fact:
        """The fact with these symbols free to be those of any iteration, in places and numbers."""
        free = {name: EVERY + name for name in names}

        def change(index: Index) -> Index:
            return over(index, free)

        def source(one: Source) -> Source:
            at = tuple(replace(place, start=change(place.start)) for place in one.at)
            below = (Limit(b.axis, change(b.start), change(b.stop)) for b in one.below)
            return Source(one.array, at, frozenset(below))

        numbers = frozenset(free.get(name, name) for name in self.numbers)
        return Fact(frozenset(map(source, self.sources)), numbers, self.value)

    def depending(self, *numbers: Iterable[str]) -> Fact:
        """The fact with more numbers."""
        return replace(self, numbers=self.numbers.union(*numbers))


Extents = Callable[[Source, Limit | None, str], frozenset[str]]


def combined(facts: Iterable[Fact]) -> Fact:
    """A tile that depends on all of these and of which nothing else is known."""
    given = list(facts)
    return Fact(
        frozenset[Source]().union(*(one.sources for one in given)),
        frozenset[str]().union(*(one.numbers for one in given)),
    )


def elementwise(op: Op, facts: Sequence[Fact]) -> Fact:
    """An op that works element by element, and comparisons that masks are made of."""
    found = combined(facts)
    limits = {limit for one in facts for limit, _ in one.tails}
    tails = {(limit, folded(op.kind, [one.tail(limit) for one in facts])) for limit in limits}
    known = frozenset((limit, value) for limit, value in tails if value is not None)
    value = folded(op.kind, [one.value for one in facts])
    if op.kind in LESS | GREATER:
        return replace(found, tails=known | _masked(op, facts), value=value)
    bounds = frozenset[Index]()
    if op.kind == "min":
        bounds = facts[0].at_most | facts[1].at_most
    return replace(found, tails=known, value=value, at_most=bounds)


def _masked(op: Op, facts: Sequence[Fact]) -> frozenset[tuple[Limit, float]]:
    """Comparisons of a place with a bound, which fail from the bound on."""
    place, bound = facts if op.kind in LESS else reversed(facts)
    if place.counts is None:
        return frozenset()
    more, (axis, start) = (LESS | GREATER)[op.kind], place.counts
    return frozenset((Limit(axis, start, stop + more), 0.0) for stop in bound.at_most)


def folded(kind: str, values: Sequence[float | None]) -> float | None:
    """The result of an op on numbers of which some are unknown but finite; None where unknown."""
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        result = _computed(kind, known)
    elif kind in ("mul", "and") and 0.0 in known:
        result = 0.0
    elif (kind == "add" and -math.inf in known) or (kind == "sub" and values[0] == -math.inf):
        result = -math.inf
    elif kind == "where" and values[0] is not None:
        result = values[1] if values[0] else values[2]
    elif kind == "where" and values[1] == values[2]:
        result = values[1]
    else:
        result = None
    return None if result is None or math.isnan(result) else result


def _computed(kind: str, values: Sequence[float]) -> float | None:
    meaning = OPS[kind].meaning
    if kind == "where":
        return values[1] if values[0] else values[2]
    if kind in ("cast", "copy"):
        return values[0] if values[0] == 0.0 or math.isinf(values[0]) else None
    if meaning is None:
        return None
    with np.errstate(all="ignore"):
        return float(meaning(*(np.float32(value) for value in values)))


def reduced(fact: Fact, axis: str, neutral: float | None, extents: Extents) -> Fact:
    """A sum or maximum over an axis: of what lies within a limit where the rest is `neutral`."""
    limits = [limit for limit, value in fact.tails if limit.axis == axis and value == neutral]
    return within(fact, axis, min(limits, key=str) if limits else None, extents)


def within(fact: Fact, axis: str, limit: Limit | None, extents: Extents) -> Fact:
    """The fact of a tile whose positions along an axis are all used, within a limit if there is
    one. Sizes of dimensions count where positions may lie beyond them."""
    sources, numbers = set[Source](), set(fact.numbers)
    for one in fact.sources:
        if all(place.axis != axis for place in one.at):
            sources.add(one)
            continue
        numbers |= extents(one, limit, axis)
        if not one.array:
            continue  # all places of the axis are the same ones every time
        at = tuple(replace(p, axis="", exact=False) if p.axis == axis else p for p in one.at)
        below = one.below | ({limit} if limit else set[Limit]())
        sources.add(Source(one.array, at, frozenset(below)))
    rest = frozenset((limit, v) for limit, v in fact.tails if limit.axis != axis)
    return Fact(frozenset(sources), frozenset(numbers), tails=rest)


def matmul(op: Op, facts: Sequence[Fact], extents: Extents) -> Fact:
    """The contracted axis is limited for both operands where one of them is 0 beyond a limit."""
    left, right = op.srcs[0].type.names, op.srcs[1].type.names
    (axis,) = set(left) & set(right)
    zeros = [(lim, v) for one in facts[:2] for lim, v in one.tails if lim.axis == axis and v == 0]
    limit = min((lim for lim, _ in zeros), key=str) if zeros else None
    return combined([*(within(one, axis, limit, extents) for one in facts[:2]), *facts[2:]])


def reshaped(op: Op, fact: Fact) -> Fact:
    """Casts, copies, transposes, slices and axes of another name."""
    if op.kind in ("cast", "copy"):
        found = elementwise(op, [fact])
        keeps = op.kind == "copy"
        return replace(found, counts=fact.counts, at_most=fact.at_most) if keeps else found
    if op.kind == "transpose":
        return fact
    assert op.dst is not None
    if op.kind == "quad_order":
        return _in_groups(fact, op.axis)
    if op.kind == "slice":
        shift, name = const(int(op.value or 0)), op.axis
    else:
        shift, name = const(0), _renamed(op.srcs[0].type, op.dst.type, op.axis)

    def place(one: Place) -> Place:
        if one.axis != op.axis:
            return one
        span = op.dst.type.size(name) if op.dst is not None else one.span
        return replace(
            one,
            axis=name,
            start=one.start + shift if one.exact else one.start,
            span=span if one.exact else one.span,
        )

    sources = frozenset(Source(s.array, tuple(map(place, s.at)), s.below) for s in fact.sources)
    tails = frozenset(
        (Limit(name, one.start + shift, one.stop) if one.axis == op.axis else one, value)
        for one, value in fact.tails
    )
    return Fact(sources, fact.numbers, fact.value, tails)


def _in_groups(fact: Fact, axis: str) -> Fact:
    """The fact where each place along an axis has an element of others near it."""

    def place(one: Place) -> Place:
        return replace(one, exact=False) if one.axis == axis else one

    sources = frozenset(Source(s.array, tuple(map(place, s.at)), s.below) for s in fact.sources)
    tails = frozenset((limit, value) for limit, value in fact.tails if limit.axis != axis)
    return Fact(sources, fact.numbers, fact.value, tails)


def _renamed(before: TileType, after: TileType, axis: str) -> str:
    return after.names[before.names.index(axis)]
