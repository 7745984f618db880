"""Prove that one cubin is another with its scoreboards given out anew.

Works from the bytes of both; shares nothing with what chose the numbers. Both programs are the same
instructions in the same order, and only the numbers of scoreboards, wait masks and longer stalls
differ. What must hold is a relation between the two along every path:

*Events.* Setting a scoreboard is an event; it is over when an instruction of that program has
waited for the number it was given there. The state holds, for each event that may have happened,
whether the original still has it open and whether the other has (one entry for each combination
that some path allows). An event that the original is through with and the other is not is *late*.

*Nothing relies on a late event.* An event settles registers: results of its instruction, sources it
reads, and those of operations of its pipe that issued before it and had no scoreboard to tell (a
pipe completes in order). An instruction may not read or overwrite a result, nor overwrite a
source, that a late event settles. Where the original relies on distance alone nothing may be late,
because a wait in between is part of the distance; nor at a barrier, fence, arrival or other
synchronising operation, which may wait for what no register shows, nor at a branch that waits. What
a synchronising operation itself told must be over for every access to memory.

*Numbers.* A scoreboard that some DEPBAR names keeps its setters and waiters. Who sets a scoreboard
at all stays. No increment is awaited in the cycle after it, unless the original does the same. A
loop that sets a scoreboard waits for it, unless the original's does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.control import CONTROL_MASK, NO_SCOREBOARD, SCOREBOARDS
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.opcodes import Order
from warploom.sass.decode.resources import resource_name
from warploom.sass.flow import outstanding
from warploom.sass.flow.aliasing import is_sync
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.paths import fixed_point
from warploom.sass.flow.scoreboard import protected_sources, takes_no_wait, waited_scoreboards
from warploom.sass.rules.fresh import change_outside, decode_anew, new_lint
from warploom.sass.rules.verdict import Finding

ALL_BOARDS: Final = (1 << SCOREBOARDS) - 1
# An entry of the state: event * 4 + open in the original * 2 + open in the other. An event is
# instruction * 2, plus 1 when it tells that sources were read and not that the result is there.
_OTHER, _ORIGINAL, _EVENT = 1, 2, 4
State = frozenset[int]


@dataclass(frozen=True)
class Late:
    """`item` relies on an event (`setter`, its result or its sources) that is not over."""

    item: int
    setter: int
    result: bool
    reason: str


def verify_scoreboards(original: Cubin, other: Cubin, name: str) -> list[Finding]:
    """Every reason why `other` is not `original` with scoreboards given out anew."""
    if finding := change_outside(original, other, name):
        return [finding]
    one, two = decode_anew(original, name), decode_anew(other, name)
    found = [*_words(one, two), *_named(one, two), *_visible(one, two), *_loops(one, two)]
    if found:
        return found
    found = [
        Finding.at("BOARD_LATE", one.instructions[late.item], late.reason)
        for late in lates(one, two)
    ]
    return found or [*_unsettled(one, two), *new_lint(one, two)]


# --- fields --------------------------------------------------------------------------------------


def _words(one: Kernel, two: Kernel) -> Iterator[Finding]:
    """The same words but for scoreboards, waits and longer stalls; who sets a scoreboard stays."""
    for first, second in zip(one.instructions, two.instructions, strict=True):
        if (first.low, first.high & ~CONTROL_MASK) != (second.low, second.high & ~CONTROL_MASK):
            yield Finding.at("BOARD_WORD", first, "the instruction itself changed")
            continue
        before, after = first.control, second.control
        if (before.stay, before.reuse) != (after.stay, after.reuse) or after.stall < before.stall:
            yield Finding.at("BOARD_WORD", first, "a hint changed or a stall became shorter")
        if takes_no_wait(first) and after.wait != before.wait:
            yield Finding.at("BOARD_WORD", first, "the instruction takes no wait")
        if fault := after.fault():
            yield Finding.at("BOARD_WORD", first, fault)
        for what in ("write_sb", "read_sb"):
            sets = getattr(before, what) != NO_SCOREBOARD, getattr(after, what) != NO_SCOREBOARD
            if sets[0] != sets[1]:
                yield Finding.at("BOARD_SET", first, f"{what} is set in one of the two only")


def named_scoreboards(kernel: Kernel) -> int:
    """Scoreboards that some DEPBAR names, and those a copy group counts on."""
    mask = 0
    for item in kernel.instructions:
        if item.base == "DEPBAR":
            for number in re.findall(r"SB(\d)", item.line.operands):
                mask |= 1 << int(number)
        if item.base == "LDGDEPBAR" and item.control.write_sb != NO_SCOREBOARD:
            mask |= 1 << item.control.write_sb
    return mask


def _named(one: Kernel, two: Kernel) -> Iterator[Finding]:
    named = named_scoreboards(one)
    for first, second in zip(one.instructions, two.instructions, strict=True):
        before, after = first.control, second.control
        changed = (before.wait ^ after.wait) & named
        for what in ("write_sb", "read_sb"):
            numbers = getattr(before, what), getattr(after, what)
            if numbers[0] != numbers[1]:
                changed |= sum(1 << n for n in numbers if n != NO_SCOREBOARD) & named
        if changed:
            yield Finding.at("BOARD_NAMED", first, "a scoreboard that a DEPBAR names changed hands")


def _visible(one: Kernel, two: Kernel) -> Iterator[Finding]:
    """An increment shows one cycle after issue."""
    for place in range(1, len(two.instructions)):
        if _early(two, place) and not _early(one, place):
            yield Finding.at(
                "BOARD_VISIBLE", two.instructions[place], "waits in the cycle after the increment"
            )


def _early(kernel: Kernel, place: int) -> bool:
    setter, waiter = kernel.instructions[place - 1], kernel.instructions[place]
    numbers = {setter.control.write_sb, setter.control.read_sb} - {NO_SCOREBOARD}
    return setter.control.stall < 2 and any(waiter.control.wait >> n & 1 for n in numbers)


def _loops(one: Kernel, two: Kernel) -> Iterator[Finding]:
    """A count has six bits: what a loop sets it waits for, where the original does."""
    for loop in natural_loops(one):
        indices = [
            index
            for number in loop.blocks
            for index in range(one.blocks[number].start, one.blocks[number].end)
        ]
        in_one, in_two = _awaited(one, indices), _awaited(two, indices)
        for index in indices:
            for event in events(one.instructions[index]):
                first, second = number_of(one, event), number_of(two, event)
                if in_one >> first & 1 and not in_two >> second & 1:
                    reason = f"its loop sets scoreboard {second} and never awaits it"
                    yield Finding.at("BOARD_COUNT", two.instructions[index], reason)


def _awaited(kernel: Kernel, indices: list[int]) -> int:
    """Scoreboards that some of these instructions wait for, or count down."""
    mask = 0
    for index in indices:
        item = kernel.instructions[index]
        mask |= item.control.wait
        if item.base == "DEPBAR":
            mask |= sum(1 << int(n) for n in set(re.findall(r"SB(\d)", item.line.operands)))
    return mask


# --- the relation --------------------------------------------------------------------------------


class Relation:
    """What of two programs does not depend on the numbers: events, what they settle, where the
    original relies on distance alone."""

    def __init__(self, original: Kernel) -> None:
        self.kernel = original
        self.settles: dict[int, tuple[set[int], set[int]]] = {}
        self.alone: set[int] = set()
        for item in original.instructions:
            for event in events(item):
                results = {access.resource for access in item.effects.writes}
                sources = set(protected_sources(item))
                self.settles[event] = (set() if event & 1 else results, sources)
        for item, state in outstanding.walk(original):
            self._join(state, item)
            if any(True for _ in outstanding.conflicts(original, state, item)):
                self.alone.add(item.index)

    def _join(self, state: outstanding.State, item: Instruction) -> None:
        """An event of `item` also settles what its pipe issued before with no way to tell."""
        pipe = item.effects.info.pipe
        for event in events(item):
            results, sources = self.settles[event]
            for entry in outstanding.before_issue(state, item):
                producer = self.kernel.instructions[entry.producer]
                if entry.joins and producer.effects.info.pipe is pipe:
                    if not entry.written:
                        sources.add(entry.resource)
                    elif not event & 1:
                        results.add(entry.resource)

    def relies(self, item: Instruction, event: int) -> str:
        """Why `item` may not issue before the event is over; empty when it may."""
        if is_sync(item):
            return "synchronises"
        if item.index in self.alone:
            return "relies on distance"
        if item.control.wait and item.effects.info.order is Order.FIXED:
            return "waited where control goes elsewhere"
        setter = self.kernel.instructions[event // 2]
        if is_sync(setter) and item.effects.info.order is Order.MEMORY:
            return "accesses memory"
        results, sources = self.settles[event]
        reads = {access.resource for access in item.effects.reads}
        writes = {access.resource for access in item.effects.writes}
        touched = results & (reads | writes) | sources & writes
        return f"touches {resource_name(min(touched))}" if touched else ""


def events(item: Instruction) -> Iterator[int]:
    """The scoreboards an instruction sets, as events."""
    if item.control.write_sb != NO_SCOREBOARD:
        yield 2 * item.index
    if item.control.read_sb != NO_SCOREBOARD:
        yield 2 * item.index + 1


def number_of(kernel: Kernel, event: int) -> int:
    """The scoreboard an event sets in a program."""
    control = kernel.instructions[event // 2].control
    return control.read_sb if event & 1 else control.write_sb


def lates(one: Kernel, two: Kernel, relation: Relation | None = None) -> list[Late]:
    """Where `two` relies on an event that `one` was through with.

    Only the first places along each path: a scoreboard missed there counts as awaited afterwards.
    """
    known = relation or Relation(one)
    waits = [
        (waited_scoreboards(first), waited_scoreboards(second))
        for first, second in zip(one.instructions, two.instructions, strict=True)
    ]
    numbers = {event: (number_of(one, event), number_of(two, event)) for event in known.settles}
    sets = [tuple(events(item)) for item in one.instructions]
    found: dict[tuple[int, int], str] = {}

    def wanted(state: State, index: int) -> int:
        """Scoreboards that should have been awaited here; they count as awaited from here on."""
        in_one, in_two = waits[index]
        mask = 0
        for entry in sorted(state):
            event = entry // _EVENT
            first, second = numbers[event]
            past = not entry & _ORIGINAL or in_one >> first & 1
            if not past or not entry & _OTHER or (in_two | mask) >> second & 1:
                continue
            if reason := known.relies(one.instructions[index], event):
                found[index, event] = reason
                mask |= 1 << second
        return mask

    def step(state: State, index: int) -> State:
        in_one, in_two = waits[index]
        in_two |= wanted(state, index)
        after: set[int] = set()
        for entry in state:
            first, second = numbers[entry // _EVENT]
            left = entry
            if in_one >> first & 1:
                left &= ~_ORIGINAL
            if in_two >> second & 1:
                left &= ~_OTHER
            if left & _OTHER:
                after.add(left)
        after.update(event * _EVENT + _ORIGINAL + _OTHER for event in sets[index])
        return frozenset(after)

    def through(block: int, state: State) -> State:
        for index in range(one.blocks[block].start, one.blocks[block].end):
            state = step(state, index)
        return state

    fixed_point(one, frozenset[int](), through, lambda known, new: known | new)
    return [
        Late(index, event // 2, not event & 1, _words_of(one, event, reason))
        for (index, event), reason in sorted(found.items())
    ]


def _words_of(kernel: Kernel, event: int, reason: str) -> str:
    what = "sources" if event & 1 else "result"
    return f"{reason} while the {what} of {kernel.instructions[event // 2]} may be open"


# --- the same hazards, asked of each program alone -----------------------------------------------


def _unsettled(one: Kernel, two: Kernel) -> Iterator[Finding]:
    """Registers used with no proof that they are settled: none that the original has not."""
    known = set(_open_uses(one))
    for index, producer, resource in sorted(set(_open_uses(two)) - known):
        item, other = two.instructions[index], two.instructions[producer]
        yield Finding.at("BOARD_HAZARD", item, f"{resource_name(resource)} of {other} may be open")


def _open_uses(kernel: Kernel) -> Iterator[tuple[int, int, int]]:
    for item, state in outstanding.walk(kernel):
        for entry, _ in outstanding.conflicts(kernel, state, item):
            yield item.index, entry.producer, entry.resource
