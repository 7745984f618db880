"""What any legal reordering of a kernel must satisfy, derived from the original code alone.

The result is a set of flat integer arrays, so that checking a candidate is a few vector operations
over its positions, issue times and control fields. Each row remembers the rule it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.sass.aliasing import AliasMode, memory_accesses, must_keep_order
from warploom.sass.boundaries import across_blocks
from warploom.sass.control import NO_SCOREBOARD
from warploom.sass.dependence import dependences
from warploom.sass.effects import resource_name
from warploom.sass.kernel import Block, Instruction, Kernel
from warploom.sass.latency import LatencyTable, sync_key, table_for
from warploom.sass.mining import exclusive, issue_times, key_of, sync_pairs
from warploom.sass.opcodes import Pipe
from warploom.sass.operand_slots import slot_registers
from warploom.sass.provenance import address_pointers
from warploom.sass.scoreboard import (
    REGISTERS,
    UNATTACHED,
    Pending,
    attaches,
    counting_waits,
    outstanding_at_entry,
    releases,
    waited_scoreboards,
)

Ints = npt.NDArray[np.int64]
BLOCK_EDGE: Final = -1


class Rule(IntEnum):
    """The rules of the verdict; the name is what a refusal prints."""

    REGISTER_ORDER = 0
    MEMORY_ORDER = 1
    SYNC_ORDER = 2
    SCOREBOARD_ORDER = 3
    LATENCY = 4
    SPACING = 5
    LATENCY_ACROSS_BLOCKS = 6
    WAIT = 7
    INHERITED_WAIT = 8
    WAIT_BEFORE_EXIT = 9
    SYNC_DISTANCE = 10


@dataclass
class Builder:
    """Rows under construction; turned into arrays once."""

    order: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    gaps: list[tuple[int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int]]
    )
    edge_gaps: list[tuple[int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int]]
    )
    waits: list[tuple[int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int]]
    )
    cross: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    durations: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reuse: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])


def _array(rows: list[tuple[int, ...]], width: int) -> Ints:
    unique = sorted(set(rows))
    return np.array(unique, dtype=np.int64).reshape(len(unique), width)


@dataclass(frozen=True)
class Constraints:
    """The arrays. All indices are instruction numbers of the original order.

    order      [n, 4]  earlier, later, rule, resource: position of earlier < position of later
    gaps       [n, 5]  earlier, later, cycles, rule, resource: issue times that far apart
    edge_gaps  [n, 4]  instruction, block, cycles, at_end: distance from the block's start or end
    waits      [n, 5]  holder (-1: block start), consumer (-1: block end), scoreboard, block, rule
    cross      [n, 3]  producer, consumer in a later block, cycles: from the producer to its
                       block's end plus from the consumer's block's start to the consumer
    durations  [n, 2]  block, cycles it must last, because a pair of `cross` relies on it
    reuse      [n, 4]  instruction, source slot, register, next writer of that register
    """

    order: Ints
    gaps: Ints
    edge_gaps: Ints
    waits: Ints
    cross: Ints
    durations: Ints
    reuse: Ints
    notes: tuple[str, ...]


def derive(kernel: Kernel, mode: AliasMode, table: LatencyTable | None = None) -> Constraints:
    """Every constraint on reorderings of `kernel` under an alias mode."""
    latencies = table or table_for(kernel.sm)
    builder = Builder()
    notes: list[str] = []
    pointers = address_pointers(kernel) if mode is AliasMode.TRITON else {}
    entry = outstanding_at_entry(kernel)
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        times = issue_times(items)
        _registers(builder, kernel, block, times, latencies)
        _memory(builder, kernel, items, mode, pointers)
        _synchronisation(builder, items, times, latencies)
        _scoreboards(builder, kernel, block, entry[block.index], times, notes)
        _setter_order(builder, kernel, items)
        _reuse(builder, items)
    across_blocks(builder.cross, builder.durations, kernel, latencies)
    return Constraints(
        order=_array(list(builder.order), 4),
        gaps=_array(list(builder.gaps), 5),
        edge_gaps=_array(list(builder.edge_gaps), 4),
        waits=_array(list(builder.waits), 5),
        cross=_array(list(builder.cross), 3),
        durations=_array(list(builder.durations), 2),
        reuse=_array(list(builder.reuse), 4),
        notes=tuple(notes),
    )


def _registers(
    builder: Builder, kernel: Kernel, block: Block, times: list[int], table: LatencyTable
) -> None:
    items = kernel.instructions[block.start : block.end]
    for dependence in dependences(items):
        earlier = kernel.instructions[dependence.earlier]
        later = kernel.instructions[dependence.later]
        builder.order.append((earlier.index, later.index, Rule.REGISTER_ORDER, dependence.resource))
        key = key_of(dependence, earlier, later)
        if key is None:
            continue
        original = times[later.index - block.start] - times[earlier.index - block.start]
        # Guards that exclude each other never let the pair execute together.
        need = min(1, original) if exclusive(earlier, later) else table.gap(key, original)
        if need > 0:
            builder.gaps.append(
                (earlier.index, later.index, need, Rule.LATENCY, dependence.resource)
            )


def _memory(
    builder: Builder,
    kernel: Kernel,
    items: tuple[Instruction, ...],
    mode: AliasMode,
    pointers: dict[int, frozenset[int]],
) -> None:
    accesses = memory_accesses(kernel, items, pointers)
    for position, second in enumerate(accesses):
        for first in accesses[:position]:
            if must_keep_order(first, second, mode):
                builder.order.append((first.index, second.index, Rule.MEMORY_ORDER, 0))


def _synchronisation(
    builder: Builder, items: tuple[Instruction, ...], times: list[int], table: LatencyTable
) -> None:
    """Syncs form a chain; memory operations stay between the syncs they stood between.

    The compiler also keeps a distance: a shared load in the cycle after a BAR reads too early.
    """
    when = {item.index: time for item, time in zip(items, times, strict=True)}
    for earlier, later in sync_pairs(items):
        builder.order.append((earlier.index, later.index, Rule.SYNC_ORDER, 0))
        need = table.gap(sync_key(earlier, later), when[later.index] - when[earlier.index])
        builder.gaps.append((earlier.index, later.index, need, Rule.SYNC_DISTANCE, 0))


def _setter_order(builder: Builder, kernel: Kernel, items: tuple[Instruction, ...]) -> None:
    """Where a DEPBAR counts down to more than zero, the setters of its scoreboard keep order."""
    counted = {counting_waits(item) for item in kernel.instructions} - {None}
    for scoreboard in counted:
        last: int | None = None
        for item in items:
            sets = scoreboard in (item.control.write_sb, item.control.read_sb)
            if sets or counting_waits(item) == scoreboard:
                if last is not None:
                    builder.order.append((last, item.index, Rule.SCOREBOARD_ORDER, 0))
                last = item.index


def _scoreboards(
    builder: Builder,
    kernel: Kernel,
    block: Block,
    entry: frozenset[Pending],
    times: list[int],
    notes: list[str],
) -> None:
    """Walk the block once, tying every conflicting instruction to the wait that protects it."""
    tracker = _Tracker(builder, kernel, block, entry, times, notes)
    for item in kernel.instructions[block.start : block.end]:
        tracker.visit(item)
    tracker.finish()


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


class _Tracker:
    def __init__(
        self,
        builder: Builder,
        kernel: Kernel,
        block: Block,
        entry: frozenset[Pending],
        times: list[int],
        notes: list[str],
    ) -> None:
        self.builder, self.kernel, self.block = builder, kernel, block
        self.times, self.notes = times, notes
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
        for access in producer.effects.reads:
            if access.resource < REGISTERS and access.slot not in ("guard", "old"):
                self.readers.setdefault(access.resource, []).append(item)

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
        for resource in written:
            # What follows is tied to this writer, which is itself tied to the older ones.
            self.writers.pop(resource, None)
            self.readers.pop(resource, None)
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
        if not self._same_pipe_overwrite(other, item, resource):
            self.notes.append(
                f"{producer} -> {item}: {resource_name(resource)} is covered by distance alone"
            )
        self._keep_distance(other, item, resource)

    @staticmethod
    def _same_pipe_overwrite(other: _Open, item: Instruction, resource: int) -> bool:
        """The later write comes from the same pipe, which reads sources and writes in order."""
        reads = other.pending.release == "W" and any(
            access.resource == resource and access.slot != "old" for access in item.effects.reads
        )
        return not reads and other.pending.pipe is item.effects.info.pipe

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


ARITHMETIC: Final = frozenset((Pipe.FMA, Pipe.IMAD, Pipe.ALU, Pipe.HALF, Pipe.FP64, Pipe.MMA))


def _reuse(builder: Builder, items: tuple[Instruction, ...]) -> None:
    """An operand kept for reuse must be read again or displaced before its register changes."""
    next_writer: dict[int, int] = {}
    for item in reversed(items):
        if item.effects.info.pipe in ARITHMETIC:
            for slot, register in sorted(slot_registers(item).items()):
                if register in next_writer:
                    builder.reuse.append((item.index, slot, register, next_writer[register]))
        for access in item.effects.writes:
            next_writer[access.resource] = item.index
