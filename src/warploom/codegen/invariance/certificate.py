"""The certificate of a kernel: what the bits of its results depend on, and in which order it sums.

    o[batch, heads, rows, d]
        elements  q[batch, heads, rows, d below 128],
                  k[batch, heads // 4, keys below lengths[batch], d below 128], ...
        place     rows        the result's own place counts, not its neighbours'
        numbers   d, rows, lengths[batch]
        order     fixed

`independent` has, for every dimension, why it counts; "" where it is proved that it does not. For
a dimension of the results that means: an element is the same bits in every call that has the same
elements and numbers above, whatever the other indices of the dimension hold, how many there are and
which of them it is. For a dimension that a result has not: how many there are does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from warploom.codegen.invariance.facts import Place, Source
from warploom.codegen.invariance.forms import EVERY, form, landing, text
from warploom.codegen.invariance.trace import NoProofError, Stored, Trace
from warploom.codegen.invariance.writers import Writers
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.spec import RULES, verify
from warploom.errors import CheckFailed, InputError
from warploom.tile import Index, Loop, Op, Program
from warploom.tile.index import substituted, symbol
from warploom.tile.ir import Turn
from warploom.tile.ops import OPS

FIXED = "fixed"
LISTS = ("elements", "place", "numbers")
FINITE = "numbers are finite, and those read as places name elements that exist"


@dataclass(frozen=True)
class Result:
    """What an element of an array depends on, as the module says; `order` is why it is free."""

    array: str
    elements: tuple[str, ...]
    place: tuple[str, ...]
    numbers: tuple[str, ...]
    order: str = FIXED


@dataclass(frozen=True)
class Certificate:
    """The statement about one kernel; `fault` is why there is none.

    sums     every sum and how its terms follow each other
    assumed  what callers promise
    """

    results: tuple[Result, ...] = ()
    sums: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    independent: Mapping[str, str] | None = None
    fault: str = ""

    def to_json(self) -> dict[str, Any]:
        """The section of a manifest."""
        if self.fault:
            return {"fault": self.fault}
        return {
            "results": [
                {k: list(v) if k in LISTS else v for k, v in asdict(one).items()}
                for one in self.results
            ],
            "sums": list(self.sums),
            "assumed": list(self.assumed),
            "independent": dict(self.independent or {}),
        }

    def require(self, dim: str) -> None:
        """Raise `InputError` unless results along a dimension are proved independent."""
        known = self.independent or {}
        if not self.fault and dim not in known:
            names = ", ".join(known)
            raise InputError(
                f"--invariant {dim}: no dimension of the kernel; expected one of {names}"
            )
        reason = self.fault or known[dim]
        if reason:
            raise InputError(f"--invariant {dim}: not proved: {reason}")


def certificate(kernel: BlockProgram | Program) -> Certificate:
    """The certificate of a block program, or of a program whose tasks run without one (SIMT)."""
    try:
        if isinstance(kernel, BlockProgram):
            verify(kernel, {name for rule in RULES for name in (rule.since, rule.until)} - {""})
            kernel = kernel.placement.program
        reads = {read.name: read for read in kernel.every_read()}
        trace = Trace(kernel, reads)
        trace.run()
    except (CheckFailed, NoProofError) as error:
        return Certificate(fault=str(error))
    return _Statement(kernel, trace).certificate()


class _Statement:
    """Puts what a trace found into words."""

    def __init__(self, program: Program, trace: Trace) -> None:
        self.program, self.trace = program, trace
        self.stores = list(trace.stores.values())
        self.loops = {loop.index: loop for loop in _loops(program.body)}
        read = {op.array.name for op in program.ops() if op.array and op.kind == "load"}
        read |= {one.array.name for one in program.every_read()}
        given = {dim for array in program.arrays if array.name in read for dim in array.dims}
        self.launch = set(program.dims) - given  # sizes of no array that is read
        self.read = read

    def certificate(self) -> Certificate:
        """The whole statement."""
        writers = Writers.of(self.program)
        orders: dict[str, str] = {}
        for store in self.stores:
            name = _array(store)
            own = [one for one in self.stores if _array(one) == name]
            orders[name] = self._order(name, own, writers)
        results = [self._result(store, orders[_array(store)]) for store in self.stores]
        words = [
            f"{self._name(name)} is at most {self._words(most)}"
            for name, most in self.trace.assumed.items()
        ]
        return Certificate(
            tuple(dict.fromkeys(results)),
            tuple(_sums(self.program)),
            tuple(dict.fromkeys([FINITE, *words, *writers.assumed])),
            {dim: self._independent(dim, orders) for dim in self.program.dims},
        )

    def _dims(self, store: Stored) -> tuple[str, ...]:
        return self.program.array(_array(store)).dims

    def _order(self, name: str, stores: list[Stored], writers: Writers) -> str:
        if added := [one.op.label for one in stores if one.op.kind == "store_add"]:
            if all(one.op.turn is not None for one in stores):
                return writers.turns_fault(stores) or FIXED
            return f"{added[0]} adds to {name} in the order in which tasks and iterations come"
        if name in self.read:
            return f"{name} is read and written: a task may read what another has written"
        return writers.fault(stores) or FIXED

    # ---- one result

    def _result(self, store: Stored, order: str) -> Result:
        dims = self._dims(store)
        sources, numbers = self._closed(store)
        tasks = {name for name, _ in self.program.grid} | set(self.loops)
        told = _told(sources)
        places = {
            dim
            for dim, place in zip(dims, store.at, strict=True)
            if place.start.symbols() & tasks & numbers or (place.axis and place.axis in told)
        }
        rest = {self._name(name) for name in numbers - tasks}
        elements = {self._element(one, store) for one in sources if one.array}
        return Result(
            _array(store),
            tuple(sorted(elements)),
            tuple(sorted(places)),
            tuple(sorted(rest)),
            order,
        )

    def _closed(self, store: Stored) -> tuple[set[Source], set[str]]:
        """The sources of a store and its numbers, with what numbers and places are read from."""
        sources, numbers = set(store.fact.sources), set(store.fact.numbers)
        if store.op.turn is not None:  # a sum over tasks: which of them add, and when
            numbers |= self._adding(store, store.op.turn)
        while True:
            used = {
                s for one in sources for place in one.at for s in place.start.symbols()
            } | numbers
            new = {self._read(name) for name in used} - {None} - sources
            if not new:
                return sources, numbers
            sources |= {one for one in new if one is not None}

    def _adding(self, store: Stored, turn: Turn) -> frozenset[str]:
        """The numbers that say which tasks add to a place, and when each does."""
        _, missing = Writers.of(self.program).digits(store)
        extents = [extent for name, extent in self.program.grid if name in missing]
        bounds = [end for loop in store.loops for end in (loop.start, loop.stop)]
        self.trace.present = store.op.label
        return frozenset[str]().union(*map(self.trace.numbers, [turn.number, *extents, *bounds]))

    def _read(self, name: str) -> Source | None:
        """The element that a number is read from."""
        found = self.trace.reads.get(name.removeprefix(EVERY))
        if found is None:
            return None
        places = [Place(self._any(at) if name.startswith(EVERY) else at) for at in found.at]
        return Source(found.array.name, tuple(places))

    def _any(self, at: Index) -> Index:
        loops = self.loops.values()
        names = [*self.loops, *(one.name for loop in loops for one in loop.reads)]
        return substituted(at, {name: symbol(EVERY + name) for name in names})

    # ---- words

    def _element(self, source: Source, store: Stored) -> str:
        array = self.program.array(source.array)
        words, left = list[str](), set(source.below)
        targets = dict(zip(self._dims(store), store.at, strict=True))
        for dim, place in zip(array.dims, source.at, strict=True):
            limit = next((one for one in left if not _free(place.start - one.start)), None)
            if limit is not None and not place.axis and place.span is not None:
                first = self._words(place.start - limit.start)
                end = self._words(
                    place.start - limit.start + _promised(limit.stop, self.trace.assumed)
                )
                words.append(f"{dim} {'' if first == '0' else f'from {first} '}below {end}")
                left.discard(limit)
            else:
                words.append(self._place(dim, place, targets))
        more = "".join(f", of the first {self._words(one.stop)}" for one in left)
        return f"{array.name}[{', '.join(words)}]{more}"

    def _place(self, dim: str, place: Place, targets: Mapping[str, Place]) -> str:
        for name, target in targets.items():
            if _same_place(place, target, name):
                return name
            around = place.span == target.span and form(place.start) == form(target.start)
            if around and place.start.symbols():
                return f"{dim} of its {place.span}"
        if _free(place.start) and place.start.op != "symbol":
            return f"every {dim}"
        start = self._words(place.start)
        if place.span is None:
            return start
        return f"{dim} below {place.span}" if start == "0" else f"{dim} {start} +{place.span}"

    def _words(self, index: Index) -> str:
        """An expression in sizes and what numbers are called."""
        plain = _promised(index, self.trace.assumed)
        names = {one: symbol(self._name(one)) for one in plain.symbols()}
        return text(form(substituted(plain, names)))

    def _name(self, name: str) -> str:
        """What a symbol is called: a task by the dimension that it is a place of, a number that is
        read by its array and place."""
        plain = name.removeprefix(EVERY)
        if (read := self.trace.reads.get(plain)) is None:
            extent = dict(self.program.grid).get(plain)
            return extent.name if extent is not None and extent.op == "symbol" else name
        places = (
            f"every {dim}" if at.symbols() & set(self.loops) else self._words(at)
            for dim, at in zip(read.array.dims, read.at, strict=True)
        )
        return f"{read.array.name}[{', '.join(places)}]"

    # ---- what results along a dimension know of each other

    def _independent(self, dim: str, orders: Mapping[str, str]) -> str:
        """Why results along a dimension are not independent; all results where none has it."""
        along = [one for one in self.stores if dim in self._dims(one)]
        for store in along or self.stores:
            own = store.at[self._dims(store).index(dim)] if along else None
            order = orders[_array(store)] if along else FIXED
            if order != FIXED:
                return order
            if reason := self._known(dim, store, own):
                return f"{_array(store)} ({store.op.label}) {reason}"
        return ""

    def _known(self, dim: str, store: Stored, own: Place | None) -> str:
        """Why a result depends on others of a dimension, or on its place in it; of a dimension that
        results have not, why on how many there are."""
        sources, numbers = self._closed(store)
        shared = {dim: f"how many {dim} there are"}
        if own is not None:
            shared |= {
                one: f"{one}, which no input has: the launch chooses it" for one in self.launch
            }
            here = own.start.symbols() - {*self.program.dims}
            shared |= {one: f"its place along {dim} ({one})" for one in here}
        for name in sorted(shared.keys() & numbers):
            return f"depends on {shared[name]}: {self.trace.causes[name]}"
        for name, most in self.trace.assumed.items() if own is not None else ():
            if most.symbols() & shared.keys():
                return f"is proved only where {self._name(name)} is at most {most}"
        if own is not None and own.axis and own.axis in _told(sources):
            return f"depends on its place along {dim}: coordinates of {own.axis}"
        for source in sorted((one for one in sources if one.array), key=str):
            for name, place in zip(self.trace.dims(source), source.at, strict=True):
                if name == dim and own is not None:
                    if not _same_place(place, own, dim):
                        return f"reads {source.array} at {place_text(place)} of {dim}"
                    continue
                used = _promised(place.start, self.trace.assumed).symbols()
                if own is not None and own.axis and place.axis == own.axis:
                    return f"reads {source.array} at {name} by its place along {dim}"
                if found := sorted(shared.keys() & used):
                    return f"reads {source.array} at a place that depends on {shared[found[0]]}"
        return ""


def _told(sources: set[Source]) -> set[str]:
    """The axes along which a tile's value tells the place."""
    return {place.axis for one in sources if not one.array for place in one.at}


def place_text(place: Place) -> str:
    """A place in words."""
    return str(place.start) + (f" +{place.span}" if place.span is not None else "")


def _same_place(place: Place, target: Place, dim: str) -> bool:
    """Whether an element is read at the place of a dimension at which the result is."""
    one = place.span in (None, 1) and target.span in (None, 1)
    along = place.exact and place.axis == target.axis and place.span == target.span
    return (one or along) and form(place.start) == landing(target.start, dim)[0]


def _free(index: Index) -> bool:
    """Whether a place is that of any iteration."""
    return any(EVERY in name for key in form(index) for name in key)


def _promised(index: Index, assumed: Mapping[str, Index]) -> Index:
    """The expression with numbers that are promised to be no larger than a size."""
    if index.op == "min":
        for one, most in (index.args, tuple(reversed(index.args))):
            if assumed.get(one.name) == most:
                return one
    return replace(index, args=tuple(_promised(one, assumed) for one in index.args))


def _array(store: Stored) -> str:
    assert store.op.array is not None
    return store.op.array.name


def _loops(body: Sequence[Op | Loop]) -> Iterator[Loop]:
    for item in body:
        if isinstance(item, Loop):
            yield item
            yield from _loops(item.body)


INSIDE = {
    "matmul": "within the tensor core, as its instruction and the tile have it",
    "reduce": "registers of a thread, then threads of a row, as the layout has them",
    "blocks": "columns of a block in order",
    "scan": "registers of a thread, then threads of a row, as the layout has them",
}


def _sums(program: Program) -> Iterator[str]:
    """Every sum of a program and the order of its terms."""
    for op in program.ops():
        group = OPS[op.kind].group
        if group == "matmul":
            (axis,) = set(op.srcs[0].type.names) & set(op.srcs[1].type.names)
            yield f"{op.label} over {axis}: {INSIDE[group]}"
        elif group in INSIDE:
            yield f"{op.label} over {op.axis}: {INSIDE[group]}"
        elif group == "cluster":
            yield f"{op.label} over {op.start}: tasks in order"
        elif op.kind == "store_add":
            yield f"{op.label}: {op.turn or 'as tasks and iterations come'}"
    for loop in _loops(program.body):
        inside = {op.dst.name for op in loop.body if isinstance(op, Op) and op.dst is not None}
        read = {src.name for op in loop.body if isinstance(op, Op) for src in op.srcs}
        before = {op.dst.name for op in program.ops() if op.dst is not None and op not in loop.body}
        if carried := sorted(inside & read & before):
            bounds = f"{text(form(loop.start))} to {text(form(loop.stop))}"
            yield f"loop {loop.index} from {bounds}, in order: {', '.join(carried)}"
