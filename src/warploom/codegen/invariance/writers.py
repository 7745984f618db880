"""Which task and iteration writes an element: exactly one, or the order of several is free.

The address of a store is a number system: tasks and counters are its digits. An element has one
writer if every digit can be read off its address, which is what is proved here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.codegen.invariance.forms import PART, Form, form, landing
from warploom.codegen.invariance.trace import Stored
from warploom.tile import Index, Program
from warploom.tile.index import const, substituted, symbol

Digits = Mapping[str, tuple[int, Form]]  # by symbol: the dimension and the place it is read off


@dataclass(frozen=True)
class Writers:
    """The extents of a program's grid, and what is `assumed`: that tasks which read their place
    from an array read different ones."""

    program: Program
    extents: Mapping[str, Form]
    assumed: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, program: Program) -> Writers:
        """The writers of a program."""
        return cls(program, {name: form(extent) for name, extent in program.grid})

    def digits(self, store: Stored) -> tuple[Digits, frozenset[str]]:
        """What is read off a store's address, and the tasks and counters that are not."""
        assert store.op.array is not None
        wanted = {name for name, extent in self.extents.items() if extent != {(): 1}}
        wanted |= {loop.index for loop in store.loops}
        found: dict[str, tuple[int, Form]] = {}
        halves: dict[tuple[str, str, str], tuple[int, Form]] = {}
        for dim, (name, place) in enumerate(zip(store.op.array.dims, store.at, strict=True)):
            terms, least = landing(place.start, name)
            for one in self._read_off(terms, place.span or 1, wanted, least):
                found[one] = dim, terms
            half = PART.fullmatch(_only(terms))
            if half and place.span in (None, 1):
                halves[half[1], half[2], half[3]] = dim, terms
        for (name, op, divisor), where in halves.items():
            if op == "//" and (name, "%", divisor) in halves:
                found[name] = where
        return found, frozenset(wanted - set(found)) - self._told_apart(store)

    def _told_apart(self, store: Stored) -> set[str]:
        """The tasks that the store's place tells apart by numbers read from arrays."""
        used = {name for place in store.at for name in place.start.symbols()}
        reads = {read.name: read for read in self.program.reads}
        found, queue = set[str](), [reads[name] for name in used if name in reads]
        while queue:
            read = queue.pop()
            names = {name for at in read.at for name in at.symbols()}
            queue += [reads[name] for name in names if name in reads]
            if tasks := names & set(self.extents):
                found |= tasks
                self.assumed.append(f"{read.array.name} gives every task elements of its own")
        return found

    def _read_off(
        self, terms: Form, span: int, wanted: set[str], least: Mapping[str, int]
    ) -> list[str]:
        """The digits of one place: each is worth more than all lower ones and the span together."""
        digits = {key: factor for key, factor in terms.items() if _names(key) & wanted}
        if any(
            f < 0 or len(_names(k) & wanted) > 1 or not wanted & set(k) for k, f in digits.items()
        ):
            return []
        worth, symbols = span, tuple[str, ...]()
        found: list[str] = []
        for key, factor in sorted(digits.items(), key=lambda pair: (len(pair[0]), pair[1])):
            (name,) = wanted & set(key)
            if factor < worth or tuple(sorted(set(key) - {name})) != symbols:
                return found
            found.append(name)
            extent = {(): least[name]} if name in least else self.extents.get(name, {})
            if len(extent) != 1:
                return found
            ((names, times),) = extent.items()
            worth, symbols = factor * times, tuple(sorted((*symbols, *names)))
        return found

    def fault(self, stores: list[Stored]) -> str:
        """Why elements of an array may have several writers; "" where each has one."""
        first: Digits | None = None
        for store in stores:
            assert store.op.array is not None
            found, missing = self.digits(store)
            if missing:
                return (
                    f"{store.op.label}: the place in {store.op.array.name} does not tell "
                    f"{', '.join(sorted(missing))}, so several may write one element"
                )
            if first not in (None, found):
                return f"{store.op.label}: another task may have written there by another store"
            first = found
        return ""

    def turns_fault(self, stores: list[Stored]) -> str:
        """Why sums that are added up in turn may have several orders; "" where each has one.

        A place is counted by a counter of its own, and tells all tasks and counters of loops but
        two, of which it tells a sum. With the loop's counter taken out of the turn's number by
        that sum, the number rises or falls with the task left, by known numbers alone.
        """
        (store, *more) = stores
        label, turn = store.op.label, store.op.turn
        assert turn is not None
        if more:
            return f"{label} and {more[0].op.label} add to one array in turns of their own"
        counted = [form(at) for at in turn.at if at.symbols()]
        if counted != [form(place.start) for place in store.at if place.start.symbols()]:
            return f"{label} is counted by another place than the one that it adds to"
        found, missing = self.digits(store)
        number = turn.number
        for place in store.at:
            loop = self._counter(place.start, missing) if place.span in (None, 1) else ""
            if loop:
                rest = substituted(place.start, {loop: const(0)})
                number = substituted(number, {loop: symbol("its place", signed=True) - rest})
                missing -= {loop}
        if not missing:
            return f"{label}: arrays say which tasks add to a place"
        if len(missing) > 1:
            return f"{label}: its place does not tell {', '.join(sorted(missing))}"
        (task,) = missing
        terms = form(number)
        if not terms.get((task,)) or any(task in _names(key) for key in terms if key != (task,)):
            return f"{label}: its turns are not shown to be different for each {task}"
        known = {task, "its place", *self.program.dims, *found}
        if open_ := sorted(number.symbols() - known):
            return f"{label}: its turns depend on {', '.join(open_)}"
        return ""

    def _counter(self, start: Index, missing: frozenset[str]) -> str:
        """A loop's counter that is a term of a place once, and in no other of its terms."""
        terms = form(start)
        for name in missing - set(self.extents):
            others = [key for key in terms if key != (name,)]
            if terms.get((name,)) == 1 and not any(name in _names(key) for key in others):
                return name
        return ""


def _only(found: Form) -> str:
    """The one symbol that a form is, or nothing."""
    return next(iter(found))[0] if [*found.values()] == [1] and len(next(iter(found))) == 1 else ""


def _names(key: tuple[str, ...]) -> set[str]:
    """The symbols in a product, also those within what is no sum of products."""
    return {name for one in key for name in re.findall(r"[^\W\d]\w*", one)}
