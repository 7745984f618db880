"""Which wait protects which instruction: the rows of a kernel that concern scoreboards.

A block is walked once in its original order. What is outstanding is followed from the instruction
that left it open to the wait that settles it, and every instruction that relies on that wait,
inherited or its own, gets a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import GROUP_SLOT, Block, Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.arrivals import LOADS, arrives
from warploom.sass.flow.distances import exclusive
from warploom.sass.flow.liveness import Later
from warploom.sass.flow.scoreboard import (
    UNATTACHED,
    Pending,
    attaches,
    protected_sources,
    releases,
    waited_scoreboards,
)
from warploom.sass.rules.rules import BLOCK_EDGE, Builder, Rule


@dataclass
class _Open:
    """One outstanding item inside a block. `cleared` is set by the wait that released it."""

    pending: Pending
    at_entry: bool
    scoreboard: int
    holder: int  # BLOCK_EDGE: the scoreboard was set before the block
    cleared: bool = False
    original_waits: int = 0
    # Scoreboards of later operations of its pipe, which read their sources after it: setter of
    # each, and those of them that were waited for since.
    lenders: dict[int, int] = field(default_factory=dict[int, int])
    borrowed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


class WaitTracker:
    """Walks one block: `visit` every instruction in order, then `finish`."""

    def __init__(
        self,
        builder: Builder,
        kernel: Kernel,
        block: Block,
        entry: frozenset[Pending],
        later: Later,
        times: list[int],
    ) -> None:
        self.builder, self.kernel, self.block = builder, kernel, block
        self.later, self.times = later, times
        self.items: list[_Open] = []
        self.writers: dict[int, list[_Open]] = {}
        self.readers: dict[int, list[_Open]] = {}
        self.same_pipe: dict[Pipe, list[int]] = {}
        for pending in sorted(entry, key=lambda item: (item.producer, item.release)):
            scoreboard = pending.scoreboard
            self._open(_Open(pending, True, scoreboard, BLOCK_EDGE))

    def _open(self, item: _Open) -> None:
        self.items.append(item)
        producer = self.kernel.instructions[item.pending.producer]
        if item.pending.release == "W":
            for access in producer.effects.writes:
                self.writers.setdefault(access.resource, []).append(item)
            return
        for resource in protected_sources(producer):
            self.readers.setdefault(resource, []).append(item)

    def visit(self, item: Instruction) -> None:
        self._clear(waited_scoreboards(item))
        written = {access.resource for access in item.effects.writes}
        touched = {access.resource for access in item.effects.reads} | written
        conflicts = {
            id(other): (other, resource)
            for table, resources in ((self.writers, touched), (self.readers, written))
            for resource in sorted(resources)
            for other in table.get(resource, ())
        }
        for other, resource in conflicts.values():
            self._protect(other, item, resource)
        if arrives(item):
            self._keep_read(item)
        for access in item.effects.writes:
            # What follows is tied to this writer, which is itself tied to the older ones. A
            # WARPGROUP instruction only names the registers of its group.
            if access.slot != GROUP_SLOT:
                self.writers.pop(access.resource, None)
                self.readers.pop(access.resource, None)
        self._attach(item)
        for pending in releases(item):
            self._open(_Open(pending, False, pending.scoreboard, pending.holder))
        self.same_pipe.setdefault(item.effects.info.pipe, []).append(item.index)

    def _clear(self, waited: int) -> None:
        """Mark what the waits of an instruction release."""
        if not waited:
            return
        for other in self.items:
            if not other.cleared:
                other.original_waits |= waited
                other.borrowed.update(
                    (lender, number)
                    for number, lender in other.lenders.items()
                    if waited >> number & 1
                )
                attached = other.scoreboard != UNATTACHED
                other.cleared = attached and bool(waited >> other.scoreboard & 1)

    def _attach(self, item: Instruction) -> None:
        """Let operations without a scoreboard join one that `item` sets in their pipe."""
        numbers = {item.control.write_sb, item.control.read_sb} - {NO_SCOREBOARD}
        if not numbers:
            return
        for other in self.items:
            if other.cleared:
                continue
            if other.scoreboard != UNATTACHED:
                if self._may_borrow(other, item):
                    other.lenders.update(dict.fromkeys(numbers, item.index))
                continue
            scoreboard = attaches(other.pending, item)
            if scoreboard is not None:
                other.scoreboard, other.holder = scoreboard, item.index
                if not other.at_entry:
                    self._order(other.pending.producer, item.index)

    def _may_borrow(self, other: _Open, item: Instruction) -> bool:
        """Sources whose own scoreboard is the late one of the result: a pipe reads in order, so
        the compiler may rely on the scoreboard of any later operation of it."""
        producer = self.kernel.instructions[other.pending.producer]
        return (
            other.pending.release == "R"
            and producer.control.read_sb == NO_SCOREBOARD
            and other.pending.pipe is item.effects.info.pipe
        )

    def _order(self, earlier: int, later: int) -> None:
        self.builder.order.append((earlier, later, Rule.SCOREBOARD_ORDER, 0))

    def _protect(self, other: _Open, item: Instruction, resource: int) -> None:
        block = self.block.index
        if other.cleared:
            rule = Rule.INHERITED_WAIT if other.at_entry else Rule.WAIT
            self.builder.waits.append(
                (other.holder, item.index, other.scoreboard, block, int(rule))
            )
            return
        producer = self.kernel.instructions[other.pending.producer]
        if exclusive(producer, item):
            return
        self._keep_distance(other, item, resource)

    def _keep_read(self, item: Instruction) -> None:
        """Loads that an arrival comes behind stay done before it."""
        for other in self.items:
            load = self.kernel.instructions[other.pending.producer]
            if other.cleared and other.pending.release == "W" and load.base in LOADS:
                self._protect(other, item, load.effects.writes[0].resource)

    def _keep_distance(self, other: _Open, item: Instruction, resource: int) -> None:
        """No wait covers the pair: it keeps its distance, its waits and its pipe's order."""
        start = self.block.start
        when = self.times[item.index - start]
        if other.at_entry:
            self.builder.edge_gaps.append((item.index, self.block.index, when, 0))
            holder = BLOCK_EDGE
        else:
            holder = other.pending.producer
            distance = when - self.times[holder - start]
            self.builder.gaps.append((holder, item.index, distance, Rule.SPACING, resource))
        for scoreboard in range(NO_SCOREBOARD):
            if other.original_waits >> scoreboard & 1:
                self.builder.waits.append(
                    (holder, item.index, scoreboard, self.block.index, int(Rule.WAIT))
                )
        for index in self.same_pipe.get(other.pending.pipe, ()):
            if index > holder:
                self._order(index, item.index)
        for lender, scoreboard in sorted(other.borrowed):
            self.builder.waits.append(
                (lender, item.index, scoreboard, self.block.index, int(Rule.WAIT))
            )
            if not other.at_entry:
                self._order(other.pending.producer, lender)

    def finish(self) -> None:
        """What the block waited for must still be waited for when control leaves it."""
        block = self.block.index
        end = self.times[-1] + self.kernel.instructions[self.block.end - 1].control.stall
        for other in self.items:
            if other.cleared:
                if not self._matters_later(other):
                    continue
                self.builder.waits.append(
                    (other.holder, BLOCK_EDGE, other.scoreboard, block, int(Rule.WAIT_BEFORE_EXIT))
                )
            elif other.scoreboard == UNATTACHED and not other.at_entry:
                # Later blocks rely on completion in order and on the distance there was.
                producer = other.pending.producer
                distance = end - self.times[producer - self.block.start]
                self.builder.edge_gaps.append((producer, block, distance, 1))
                for index in self.same_pipe.get(other.pending.pipe, ()):
                    if index > producer:
                        self._order(producer, index)
            elif not other.at_entry:
                # A later block may rely on a scoreboard lent to it here.
                for lender in other.lenders.values():
                    self._order(other.pending.producer, lender)

    def _matters_later(self, other: _Open) -> bool:
        """A later block may rely on this wait: it may touch a result that was awaited, or
        overwrite a source that was. A register nobody touches again protects nothing."""
        producer = self.kernel.instructions[other.pending.producer]
        if other.pending.release == "W":
            return any(
                self.later.touched >> access.resource & 1 for access in producer.effects.writes
            )
        sources = protected_sources(producer)
        return any(self.later.written >> resource & 1 for resource in sources)
