"""What every store of a program depends on: facts from the first op to the last, loops to a fixed
point.

A value that an iteration hands to the next depends on the places of *any* iteration, on the counter
(how often it was added to) and on where the loop begins; what a loop leaves behind depends on both
its bounds. A sum therefore says how it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from warploom.codegen.invariance.facts import (
    NEUTRAL,
    Fact,
    Limit,
    Place,
    Source,
    combined,
    elementwise,
    matmul,
    reduced,
    reshaped,
    within,
)
from warploom.codegen.invariance.forms import EVERY, form, landing, rises, same
from warploom.tile import Index, Loop, Op, Program, Read, Var
from warploom.tile.index import const, substituted, symbol
from warploom.tile.ops import OPS

Facts = dict[str, Fact]


class NoProofError(Exception):
    """An op that nothing can be proved of; the message names it."""


@dataclass(frozen=True)
class Stored:
    """A store, what its tile depends on, the loops around it, and where its elements go."""

    op: Op
    fact: Fact
    loops: tuple[Loop, ...]
    at: tuple[Place, ...]


@dataclass
class Trace:
    """The stores of a program, by op, and what had to be assumed of numbers read from arrays."""

    program: Program
    reads: Mapping[str, Read] = field(default_factory=dict[str, Read])
    stores: dict[int, Stored] = field(default_factory=dict[int, Stored])
    assumed: dict[str, Index] = field(default_factory=dict[str, Index])
    loops: list[Loop] = field(default_factory=list[Loop])
    causes: dict[str, str] = field(default_factory=dict[str, str])
    present: str = ""

    def numbers(self, index: Index) -> frozenset[str]:
        """The symbols whose values an expression depends on.

        The smaller of a number read from an array and a size is the number: that it is no larger is
        what callers promise (`assumed`).
        """
        if index.op == "min":
            for one, most in (index.args, reversed(index.args)):
                if one.name in self.reads and most.symbols() <= set(self.program.dims):
                    self.assumed[one.name] = most
                    return self._noted(frozenset((one.name,)))
        if index.op == "symbol":
            return self._noted(frozenset((index.name,)))
        return frozenset[str]().union(*map(self.numbers, index.args))

    def within_size(self, stop: Index, dim: str) -> bool:
        """Whether a bound is at most a dimension's size, by what is assumed."""
        if same(stop, symbol(dim)):
            return True
        if stop.op == "min":
            return any(self.within_size(one, dim) for one in stop.args)
        if not all(rises(stop, name) for name in self.assumed):
            return False
        return same(_clamped(substituted(stop, self.assumed)), symbol(dim))

    def extents(self, source: Source, limit: Limit | None, axis: str) -> frozenset[str]:
        """The sizes that what lies along an axis of a source depends on: those of dimensions that
        end before the elements that count."""
        found = frozenset(
            dim
            for dim, place in zip(self.dims(source), source.at, strict=True)
            if dim
            and place.axis == axis
            and not (
                limit is not None
                and place.exact
                and same(place.start, limit.start)
                and self.within_size(limit.stop, dim)
            )
        )
        return self._noted(found)

    def dims(self, source: Source) -> tuple[str, ...]:
        """The dimensions of a source's array; of a place that is none, none that has a size."""
        return self.program.array(source.array).dims if source.array else ("",) * len(source.at)

    def _noted(self, names: frozenset[str]) -> frozenset[str]:
        """Names that the present op or loop is the first to depend on."""
        for name in names:
            self.causes.setdefault(name, self.present)
        return names

    # ---- programs

    def run(self) -> None:
        """Follow the whole program; raises `NoProofError`."""
        facts = {var.name: Fact(numbers=frozenset((var.name,))) for var in self.program.scalars}
        self._body(self.program.body, facts)

    def _body(self, body: Sequence[Op | Loop], facts: Facts) -> None:
        for item in body:
            if isinstance(item, Loop):
                self._loop(item, facts)
            elif item.dst is None:
                self._store(item, facts)
            else:
                facts[item.dst.name] = self._fact(item, facts)

    def _loop(self, loop: Loop, facts: Facts) -> None:
        """Facts at the loop's head grow until an iteration adds nothing."""
        self.present = f"loop {loop.index}"
        carried, begin = set(_carried(loop.body)), self.numbers(loop.start)
        own = (loop.index, *(read.name for read in loop.reads))
        self.loops.append(loop)
        while True:
            inside, head = dict(facts), dict(facts)
            self._body(loop.body, inside)
            for name in carried & set(facts):
                handed = _free(inside[name], own, loop).depending(
                    begin, self._noted(frozenset((loop.index,)))
                )
                head[name] = facts[name].joined(handed)
            if head == facts:
                break
            facts.update(head)
        self.loops.pop()
        self.present = f"loop {loop.index}"
        bounds = begin | self.numbers(loop.stop)
        if loop.until is not None:
            bounds |= {name for name in self.numbers(loop.until) if "." not in name}
        for name in carried:
            left = inside[name].joined(facts[name]) if name in facts else inside[name]
            facts[name] = _free(left, own, loop).depending(bounds)

    def _store(self, op: Op, facts: Facts) -> None:
        assert op.array is not None
        self.present, fact = op.label, facts[op.srcs[0].name]
        axes = [span.axis for span in op.spans if span.size is not None]
        if len(axes) != len(op.srcs[0].type.names) or any(span.others for span in op.spans):
            raise NoProofError(f"{op.label}: a store of another form than its ranges")
        at = tuple(Place(s.start, s.size, s.axis if s.size is not None else "") for s in op.spans)
        for dim, place in zip(op.array.dims, at, strict=True):
            for source in fact.sources if place.axis else ():
                fact = fact.depending(self._along(source, dim, place))
        self.stores[op.id] = Stored(op, fact, tuple(self.loops), at)

    def _along(self, source: Source, dim: str, target: Place) -> frozenset[str]:
        """What a stored axis adds: nothing where source and result are at one place of equal
        dimensions; else where the store begins, and the sizes of dimensions that may end before."""
        places = [
            (own, place)
            for own, place in zip(self.dims(source), source.at, strict=True)
            if place.axis == target.axis
        ]
        start = landing(target.start, dim)[0]
        if all(own in ("", dim) and p.exact and form(p.start) == start for own, p in places):
            return frozenset()
        return self.numbers(target.start) | self.extents(source, None, target.axis)

    # ---- ops

    def _fact(self, op: Op, facts: Facts) -> Fact:
        assert op.dst is not None
        self.present = op.label
        group, given = OPS[op.kind].group, [facts[src.name] for src in op.srcs]
        if op.kind == "load":
            return self._load(op)
        if op.kind == "fill":
            return Fact(value=float(op.value or 0))
        if op.kind == "coordinate":
            assert op.start is not None
            numbers = self.numbers(op.start)
            if not op.axis:
                return Fact(numbers=numbers, at_most=frozenset((op.start,)))
            place = Place(op.start, op.dst.type.size(op.axis), op.axis)
            here = frozenset((Source("", (place,)),))
            return Fact(here, numbers, counts=(op.axis, op.start))
        if group in ("unary", "binary", "compare", "select"):
            return elementwise(op, given)
        if group == "reduce":
            return reduced(given[0], op.axis, NEUTRAL.get(op.kind), self.extents)
        if group == "matmul":
            return matmul(op, given, self.extents)
        if group in ("scan", "blocks"):
            axes = (op.axis,) if group == "scan" else op.dst.type.names
            whole = given[0]
            for axis in axes:
                whole = within(whole, axis, None, self.extents)
            return combined([whole, *(_position(op.dst, axis) for axis in axes)])
        if op.kind == "gather":
            return combined([within(given[0], op.axis, None, self.extents), given[1]])
        if op.kind == "reduce_scatter":
            return self._cluster(op, given[0])
        if group == "shape":
            return reshaped(op, given[0])
        raise NoProofError(f"{op.label}: no rule says what {op.kind} depends on")

    def _load(self, op: Op) -> Fact:
        """A source for each of the parts that a load stacks: they follow the tile's first axis."""
        assert op.array is not None and op.dst is not None
        count = max(len(span.starts) for span in op.spans)
        first = op.dst.type.names[0] if op.dst.type.names else ""
        sources: list[Source] = []
        for number in range(count):
            at: list[Place] = []
            for span in op.spans:
                start = span.starts[number] if span.others else span.start
                axis = span.axis if span.size is not None else ""
                at.append(Place(start, span.size, axis, count == 1 or axis != first))
            sources.append(Source(op.array.name, tuple(at)))
        fact = Fact(frozenset(sources), frozenset(self._ends(sources[0])))
        return fact if count == 1 else combined([fact, _position(op.dst, first)])

    def _ends(self, source: Source) -> Iterator[str]:
        """The dimensions whose sizes say whether the one element taken of them is there."""
        extents = dict(self.program.grid)
        for dim, place in zip(self.program.array(source.array).dims, source.at, strict=True):
            inside = extents.get(place.start.name)
            known = inside is not None and same(inside, symbol(dim))
            if place.span is None and not known and place.start.name not in self.reads:
                yield from self._noted(frozenset((dim,)))

    def _cluster(self, op: Op, fact: Fact) -> Fact:
        """Tasks along a grid axis add up their tiles, in its order, and get a part each."""
        assert op.dst is not None and op.start is not None
        task, width = op.start.name, op.dst.type.size(op.axis)
        if any(task in at.symbols() for read in self.program.reads for at in read.at):
            raise NoProofError(f"{op.label}: its tasks read numbers, each its own")
        every = fact.mapped((task,))
        moved: set[Source] = set()
        for one in every.sources:
            at = (
                Place(p.start + symbol(task) * width, width, p.axis, p.exact)
                if p.axis == op.axis and p.exact else p
                for p in one.at
            )  # fmt: skip
            moved.add(Source(one.array, tuple(at), one.below))
        numbers = every.numbers - {EVERY + task}
        placed = any(not one.array and one.at[0].axis == op.axis for one in moved)
        return Fact(frozenset(moved), numbers | ({task} if placed else set[str]()))


def _position(tile: Var, axis: str) -> Fact:
    """Of a tile whose elements tell how far along an axis they are."""
    return Fact(frozenset((Source("", (Place(const(0), tile.type.size(axis), axis),)),)))


def _free(fact: Fact, names: Sequence[str], loop: Loop) -> Fact:
    """A fact beyond its iteration; how often a loop runs is said by its bounds."""
    found = fact.mapped(names)
    return replace(found, numbers=found.numbers - {EVERY + loop.index})


def _clamped(index: Index) -> Index:
    """The expression with the smaller of two equal ones in place of both."""
    if not index.args:
        return index
    left, right = map(_clamped, index.args)
    if index.op == "min" and same(left, right):
        return left
    return Index(index.op, args=(left, right))


def _carried(body: Sequence[Op | Loop]) -> Iterator[str]:
    """The tiles that a body writes."""
    for item in body:
        if isinstance(item, Loop):
            yield from _carried(item.body)
        elif item.dst is not None:
            yield item.dst.name
