"""Verdicts on many versions of one block at once, by the verifier's own constraints.

A player that wants to know all legal actions needs hundreds of verdicts on states that differ in
one block. `BlockBatch.check` takes K versions of a block and returns K verdicts in a few array
operations; what couples the block to the rest of the kernel is checked by `Coupling.check`.
Together they say what `Verifier.check_words` says (tests compare the two on legal and illegal
versions); the verifier stays the judge of everything that is measured or kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.sass.aliasing import is_sync
from warploom.sass.control import MAX_STALL, MAX_STALL_STAYING, NO_SCOREBOARD, SCOREBOARDS
from warploom.sass.kernel import Kernel
from warploom.sass.latency import SPACED, LatencyTable, spacing_key
from warploom.sass.mining import pipe_neighbours
from warploom.sass.operand_slots import keeps_operands, slot_registers
from warploom.sass.rules import BLOCK_EDGE, Constraints
from warploom.sass.scoreboard import takes_no_wait, waited_scoreboards
from warploom.sass.verify import Verifier

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
SLOTS: Final = 3
_BANKS: Final = 2
_NO_REGISTER: Final = 255
_FAR: Final = 1 << 30
_FIELDS: Final = ("stall", "stay", "wait", "reuse")


@dataclass(frozen=True)
class Versions:
    """K versions of a block of n instructions.

    order  [K, n]  the instruction (number inside the block as compiled) at each position
    stall, stay, wait, reuse  [K, n]  control fields by position; scoreboards stay as compiled
    """

    order: Ints
    stall: Ints
    stay: Ints
    wait: Ints
    reuse: Ints

    def __len__(self) -> int:
        """How many versions."""
        return len(self.order)

    def take(self, rows: Ints | list[int]) -> Versions:
        """Some of the versions."""
        return Versions(
            self.order[rows], self.stall[rows], self.stay[rows], self.wait[rows], self.reuse[rows]
        )


@dataclass(frozen=True)
class Timed:
    """What other blocks need to know of K versions: issue times [K, n] by instruction, cycles from
    the block's start; the duration [K]; per spaced pipe the first and last instruction [K, pipes]
    (-1: none); what the boundary instructions set, wait for and stall [K]."""

    issue: Ints
    duration: Ints
    first: Ints
    last: Ints
    first_instruction: Ints
    last_instruction: Ints
    first_wait: Ints
    last_sets: Ints
    last_stall: Ints


class KernelTables:
    """Per-instruction data of one kernel that every block's checks share."""

    def __init__(self, verifier: Verifier) -> None:
        kernel: Kernel = verifier.kernel
        table: LatencyTable = verifier.table
        items = kernel.instructions
        self.kernel = kernel
        self.constraints: Constraints = verifier.constraints
        self.block_of = np.array(kernel.block_of, np.int64)
        self.stall = np.array([item.control.stall for item in items], np.int64)
        self.stay = np.array([int(item.control.stay) for item in items], np.int64)
        self.wait = np.array([item.control.wait for item in items], np.int64)
        self.reuse = np.array([item.control.reuse for item in items], np.int64)
        self.write_sb = np.array([item.control.write_sb for item in items], np.int64)
        self.read_sb = np.array([item.control.read_sb for item in items], np.int64)
        self.sets = np.zeros(len(items), np.int64)
        for number in (self.write_sb, self.read_sb):
            self.sets |= np.where(number != NO_SCOREBOARD, 1 << number, 0)
        self.own = np.array([table.own_stall(item) for item in items], np.int64)
        self.sync_wait = np.array([i.control.wait if is_sync(i) else 0 for i in items], np.int64)
        self.no_wait = np.array([takes_no_wait(item) for item in items], bool)
        self.depbar = np.array(
            [waited_scoreboards(item) & ~item.control.wait for item in items], np.int64
        )
        self.sources = np.array(
            [[slot_registers(item).get(s, _NO_REGISTER) for s in range(SLOTS)] for item in items],
            np.int64,
        ).reshape(len(items), SLOTS)
        self.keeps = np.array([keeps_operands(item) for item in items], bool)
        self.pinned = np.array([bool(item.pinned) for item in items], bool)
        pipes = {pipe: number for number, pipe in enumerate(sorted(SPACED, key=lambda p: p.value))}
        self.pipes = len(pipes)
        self.pipe = np.array([pipes.get(item.effects.info.pipe, -1) for item in items], np.int64)
        families: dict[str, int] = {}
        for item in items:
            families.setdefault(spacing_key(item, item), item.index)
        numbers = {key: number for number, key in enumerate(families)}
        self.family = np.array([numbers[spacing_key(item, item)] for item in items], np.int64)
        examples = [items[index] for index in families.values()]
        self.spacing = np.array(
            [[table.spacing(one, other) for other in examples] for one in examples], np.int64
        )
        times = np.cumsum(self.stall) - self.stall
        # Pairs that the compiler itself put closer may stay that close.
        self.close = {
            (one.index, other.index): int(times[other.index] - times[one.index])
            for one, other in pipe_neighbours(items)
            if times[other.index] - times[one.index] < table.spacing(one, other)
        }
        self.early = {
            (one.index, other.index)
            for one, other in pairwise(items)
            if one.control.stall < 2 and self.sets[one.index] & self.wait[other.index]
        }
        self.identity = [item.identity for item in items]


class BlockBatch:
    """Checks versions of one block. Rows are numbered inside the block."""

    def __init__(self, tables: KernelTables, block: int) -> None:
        self.tables, self.block = tables, block
        home = tables.kernel.blocks[block]
        self.start, self.size = home.start, home.size
        here = slice(home.start, home.end)
        constraints = tables.constraints
        start, block_of = self.start, tables.block_of
        inside = block_of[constraints.order[:, 0]] == block
        self.order_rows = constraints.order[inside, :2] - start
        inside = block_of[constraints.gaps[:, 0]] == block
        self.gap_rows = constraints.gaps[inside, :3] - (start, start, 0)
        edges = constraints.edge_gaps[constraints.edge_gaps[:, 1] == block]
        self.edge_rows = edges[:, [0, 2, 3]] - (start, 0, 0)
        waits = constraints.waits[constraints.waits[:, 3] == block][:, :3]
        self.wait_rows = np.where(
            (waits == BLOCK_EDGE) & (np.arange(3) < 2), BLOCK_EDGE, waits - (start, start, 0)
        )
        durations = constraints.durations[constraints.durations[:, 0] == block]
        self.least_duration = int(durations[:, 1].max()) if len(durations) else 0
        self.stall, self.stay = tables.stall[here], tables.stay[here]
        self.wait, self.reuse = tables.wait[here], tables.reuse[here]
        self.write_sb, self.read_sb = tables.write_sb[here], tables.read_sb[here]
        self.sets, self.own, self.depbar = tables.sets[here], tables.own[here], tables.depbar[here]
        self.sync_wait, self.no_wait = tables.sync_wait[here], tables.no_wait[here]
        self.sources, self.keeps = tables.sources[here], tables.keeps[here]
        self.pinned = np.flatnonzero(tables.pinned[here])
        self.pipe, self.family = tables.pipe[here], tables.family[here]
        self.close = np.full((self.size, self.size), _FAR, np.int64)
        for (one, other), distance in tables.close.items():
            if block_of[one] == block_of[other] == block:
                self.close[one - start, other - start] = distance
        self.early = np.zeros((self.size, self.size), bool)
        for one, other in tables.early:
            if block_of[one] == block_of[other] == block:
                self.early[one - start, other - start] = True
        column = self.sources.T[:, None, :]
        banks = np.arange(_BANKS)[None, :, None]
        self._reads = (column != _NO_REGISTER) & (column % _BANKS == banks)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, identity in enumerate(tables.identity[here]):
            groups.setdefault(identity, []).append(number)
        self.twins = [np.array(group) for group in groups.values() if len(group) > 1]
        rows = constraints.reuse[block_of[constraints.reuse[:, 0]] == block]
        self.reuse_rows = rows - (start, 0, 0, start)
        self.reuse_rows[:, 3] = np.where(
            rows[:, 3] == BLOCK_EDGE, BLOCK_EDGE, self.reuse_rows[:, 3]
        )
        # Reuse pairs the compiler itself left unconsumed are not held against a version.
        self.reuse_rows = self.reuse_rows[~self.stale_reuse(self.original())[0]]

    def original(self) -> Versions:
        """The block as compiled, as one version."""
        return Versions(
            np.arange(self.size)[None],
            self.stall[None].copy(),
            self.stay[None].copy(),
            self.wait[None].copy(),
            self.reuse[None].copy(),
        )

    def canonical(self, order: Ints) -> Ints:
        """Orders [K, n] with identical instructions named in ascending order, as the verifier
        names them: it cannot tell them apart either."""
        named = order.copy()
        for twins in self.twins:
            rows, places = np.nonzero(np.isin(order, twins))
            named[rows, places] = np.tile(twins, len(order))
        return named

    def positions(self, order: Ints) -> Ints:
        """The position [K, n] of each instruction."""
        position = np.empty_like(order)
        np.put_along_axis(position, order, np.arange(self.size)[None].repeat(len(order), 0), 1)
        return position

    def check(self, versions: Versions) -> tuple[Bools, Timed]:
        """(which versions break no rule inside the block [K], what `Coupling` needs of them)."""
        order = self.canonical(versions.order)
        position = self.positions(order)
        start = np.cumsum(versions.stall, 1) - versions.stall
        issue = np.take_along_axis(start, position, 1)
        duration = versions.stall.sum(1)
        ok = self._fields(versions, order)
        ok &= (position[:, self.pinned] == self.pinned).all(1)
        rows = self.order_rows
        ok &= (position[:, rows[:, 0]] < position[:, rows[:, 1]]).all(1)
        rows = self.gap_rows
        ok &= (issue[:, rows[:, 1]] - issue[:, rows[:, 0]] >= rows[:, 2]).all(1)
        rows = self.edge_rows
        inside = issue[:, rows[:, 0]]
        away = np.where(rows[:, 2] == 1, duration[:, None] - inside, inside)
        ok &= (away >= rows[:, 1]).all(1)
        ok &= duration >= self.least_duration
        stale = self.stale_reuse(Versions(order, *_fields_of(versions)))
        ok &= np.logical_not(stale.any(1))
        ok &= self._waited(versions, order, position)
        first, last, spaced = self._spaced(order, start)
        ok &= spaced
        timed = Timed(
            issue=issue,
            duration=duration,
            first=first,
            last=last,
            first_instruction=order[:, 0],
            last_instruction=order[:, -1],
            first_wait=versions.wait[:, 0],
            last_sets=self.sets[order[:, -1]],
            last_stall=versions.stall[:, -1],
        )
        return ok, timed

    def _fields(self, versions: Versions, order: Ints) -> Bools:
        """Control fields on their own, and scoreboards shown one cycle after issue."""
        stall, stay, reuse = versions.stall, versions.stay == 1, versions.reuse
        changed = (
            (stall != self.stall[order])
            | (versions.stay != self.stay[order])
            | (reuse != self.reuse[order])
        )
        bad = changed & stay & ((stall < 1) | (stall > MAX_STALL_STAYING))
        bad |= changed & (reuse != 0) & ~stay
        bad |= (stall < self.own[order]) | (stall > MAX_STALL)
        bad |= self.sync_wait[order] & ~versions.wait != 0
        bad |= self.no_wait[order] & (versions.wait != self.wait[order])
        added = reuse & ~self.reuse[order]
        registers = self.sources[order]
        for slot in range(SLOTS):
            bad |= (added >> slot & 1 == 1) & (registers[:, :, slot] == _NO_REGISTER)
        bad |= (reuse != 0) & (self.reuse[order] == 0) & ~self.keeps[order]
        # Identical words may set different scoreboards: a name given to a twin must fit.
        bad |= self.write_sb[versions.order] != self.write_sb[order]
        bad |= self.read_sb[versions.order] != self.read_sb[order]
        early = (self.sets[order[:, :-1]] & versions.wait[:, 1:] != 0) & (stall[:, :-1] < 2)
        early &= ~self.early[order[:, :-1], order[:, 1:]]
        return ~(bad.any(1) | early.any(1))

    def stale_reuse(self, versions: Versions) -> Bools:
        """[K, rows of `reuse_rows`]: kept operands neither read again nor displaced in time."""
        rows, order = self.reuse_rows, versions.order
        if not len(rows):
            return np.zeros((len(versions), 0), bool)
        position = self.positions(order)
        holder, slot, register, writer = rows.T
        kept = np.take_along_axis(versions.reuse, position[:, holder], 1) >> slot & 1 == 1
        if not kept.any():
            return kept
        # Short integers: this is the largest array of a check.
        where = np.arange(self.size, dtype=np.int16)
        last = np.empty((SLOTS, _BANKS, *order.shape), np.int16)
        needed = set(zip(slot.tolist(), (register % _BANKS).tolist(), strict=True))
        for number, bank in sorted(needed):
            reads = self._reads[number, bank][order]
            last[number, bank] = np.maximum.accumulate(np.where(reads, where, np.int16(-1)), 1)
        versions_axis = np.arange(len(order))[:, None]
        until = np.where(writer == BLOCK_EDGE, self.size - 1, position[:, np.maximum(writer, 0)])
        refreshed = last[slot, register % _BANKS, versions_axis, until]
        return kept & ~(refreshed > position[:, holder])

    def _waited(self, versions: Versions, order: Ints, position: Ints) -> Bools:
        rows = self.wait_rows
        if not len(rows):
            return np.ones(len(versions), bool)
        where = np.arange(self.size)
        mask = versions.wait | self.depbar[order]
        last = np.stack(
            [
                np.maximum.accumulate(np.where(mask >> number & 1 == 1, where, -1), 1)
                for number in range(SCOREBOARDS)
            ]
        )
        holder, consumer, scoreboard = rows.T
        floor = np.where(holder == BLOCK_EDGE, -1, position[:, holder])
        until = np.where(consumer == BLOCK_EDGE, self.size - 1, position[:, consumer])
        waited: Ints = last[scoreboard, np.arange(len(order))[:, None], until]
        return np.all(waited > floor, axis=1)

    def _spaced(self, order: Ints, start: Ints) -> tuple[Ints, Ints, Bools]:
        """(first and last instruction in each pipe [K, pipes], distances inside the block kept)."""
        count = len(order)
        first = np.full((count, self.tables.pipes), -1, np.int64)
        last = first.copy()
        ok = np.ones(count, bool)
        pipes = self.pipe[order]
        for pipe in range(self.tables.pipes):
            rows, places = np.nonzero(pipes == pipe)
            if not len(rows):
                continue
            places = places.reshape(count, -1)
            members = np.take_along_axis(order, places, 1)
            first[:, pipe], last[:, pipe] = members[:, 0], members[:, -1]
            times = np.take_along_axis(start, places, 1)
            earlier, later = members[:, :-1], members[:, 1:]
            need = self.tables.spacing[self.family[earlier], self.family[later]]
            need = np.minimum(need, self.close[earlier, later])
            ok &= (times[:, 1:] - times[:, :-1] >= need).all(1)
        return first, last, ok


def _fields_of(versions: Versions) -> tuple[Ints, Ints, Ints, Ints]:
    return versions.stall, versions.stay, versions.wait, versions.reuse


class Coupling:
    """What ties one block's versions to the other blocks as they stand now."""

    def __init__(self, tables: KernelTables, blocks: list[BlockBatch]) -> None:
        self.tables, self.blocks = tables, blocks
        rows = tables.constraints.cross
        self._cross = [
            rows[(tables.block_of[rows[:, 0]] == b) | (tables.block_of[rows[:, 1]] == b)]
            for b in range(len(blocks))
        ]
        self.now = [batch.check(batch.original())[1] for batch in blocks]
        self._update()

    def set(self, block: int, timed: Timed, row: int) -> None:
        """Take over one version of a block as the one that stands."""
        self.now[block] = Timed(
            timed.issue[row : row + 1],
            timed.duration[row : row + 1],
            timed.first[row : row + 1],
            timed.last[row : row + 1],
            timed.first_instruction[row : row + 1],
            timed.last_instruction[row : row + 1],
            timed.first_wait[row : row + 1],
            timed.last_sets[row : row + 1],
            timed.last_stall[row : row + 1],
        )
        self._update()

    def _update(self) -> None:
        self._issue = np.concatenate([timed.issue[0] for timed in self.now])
        self._duration = np.array([int(timed.duration[0]) for timed in self.now])
        self._begin = np.cumsum(self._duration) - self._duration

    def check(self, block: int, timed: Timed) -> Bools:
        """Which versions of a block fit the rest of the kernel [K]."""
        ok = self._latencies(block, timed)
        ok &= self._visible(block, timed)
        for pipe in range(self.tables.pipes):
            ok &= self._spacing(block, pipe, timed)
        return ok

    def _latencies(self, block: int, timed: Timed) -> Bools:
        rows = self._cross[block]
        if not len(rows):
            return np.ones(len(timed.duration), bool)
        tables, start = self.tables, self.blocks[block].start
        producer, consumer, need = rows.T
        home, away = tables.block_of[producer], tables.block_of[consumer]
        last = self.blocks[block].size - 1
        mine = timed.duration[:, None] - timed.issue[:, np.clip(producer - start, 0, last)]
        tail = np.where(home == block, mine, self._duration[home] - self._issue[producer])
        mine = timed.issue[:, np.clip(consumer - start, 0, last)]
        head = np.where(away == block, mine, self._issue[consumer])
        return (tail + head >= need).all(1)

    def _visible(self, block: int, timed: Timed) -> Bools:
        """Scoreboards set by a block's last instruction and awaited by the next one's first."""
        ok = np.ones(len(timed.duration), bool)
        if block > 0:
            before, start = self.now[block - 1], self.blocks[block - 1].start
            early = (before.last_sets & timed.first_wait != 0) & (before.last_stall < 2)
            last = int(before.last_instruction[0]) + start
            ok &= ~self._not_compiled(
                early, np.full(len(ok), last), timed.first_instruction + self.blocks[block].start
            )
        if block + 1 < len(self.blocks):
            after, start = self.now[block + 1], self.blocks[block + 1].start
            early = (timed.last_sets & after.first_wait != 0) & (timed.last_stall < 2)
            first = int(after.first_instruction[0]) + start
            ok &= ~self._not_compiled(
                early, timed.last_instruction + self.blocks[block].start, np.full(len(ok), first)
            )
        return ok

    def _not_compiled(self, early: Bools, one: Ints, other: Ints) -> Bools:
        for row in np.flatnonzero(early).tolist():
            if (int(one[row]), int(other[row])) in self.tables.early:
                early[row] = False
        return early

    def _spacing(self, block: int, pipe: int, timed: Timed) -> Bools:
        """Distances of neighbours in one pipe that stand in different blocks."""
        count = len(timed.duration)
        earlier = self._neighbour(block, pipe, -1)
        later = self._neighbour(block, pipe, 1)
        ok = np.ones(count, bool)
        if timed.first[0, pipe] < 0:
            if earlier is None or later is None:
                return ok
            shift = timed.duration - self._duration[block]
            distance = self._at(later) - self._at(earlier) + shift
            return self._kept(np.full(count, earlier), np.full(count, later), distance)
        start, begin = self.blocks[block].start, self._begin[block]
        if earlier is not None:
            when = begin + timed.issue[np.arange(count), timed.first[:, pipe]]
            distance = when - self._at(earlier)
            ok &= self._kept(np.full(count, earlier), timed.first[:, pipe] + start, distance)
        if later is not None:
            when = begin + timed.issue[np.arange(count), timed.last[:, pipe]]
            shift = timed.duration - self._duration[block]
            distance = self._at(later) + shift - when
            ok &= self._kept(timed.last[:, pipe] + start, np.full(count, later), distance)
        return ok

    def _at(self, index: int) -> int:
        return int(self._begin[self.tables.block_of[index]] + self._issue[index])

    def _neighbour(self, block: int, pipe: int, step: int) -> int | None:
        """The nearest instruction of a pipe in the blocks before (-1) or after (1), in layout."""
        other = block + step
        while 0 <= other < len(self.blocks):
            found = self.now[other].last if step < 0 else self.now[other].first
            if found[0, pipe] >= 0:
                return int(found[0, pipe]) + self.blocks[other].start
            other += step
        return None

    def _kept(self, one: Ints, other: Ints, distance: Ints) -> Bools:
        tables = self.tables
        ok = distance >= tables.spacing[tables.family[one], tables.family[other]]
        for row in np.flatnonzero(~ok).tolist():
            pair = (int(one[row]), int(other[row]))
            ok[row] = int(distance[row]) >= tables.close.get(pair, _FAR)
        return ok
