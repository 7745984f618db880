"""What ties versions of one block to the rest of the kernel: edges, layout neighbours, pipes."""

from __future__ import annotations

import numpy as np

from warploom.rl.batch import BlockBatch
from warploom.sass.rules.original import Bools
from warploom.sass.rules.rules import Ints
from warploom.sass.rules.versions import FAR, KernelTables, Timed


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
        self.now[block] = timed.take([row])
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
            ok[row] = int(distance[row]) >= tables.close.get(pair, FAR)
        return ok
