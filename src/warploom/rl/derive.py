"""Control fields for many orders of one block at once.

The same idea as `edit.rederive` (stalls as short as the distances allow, waits where a consumer
would otherwise overtake, yield and reuse as wished), from the verifier's constraint rows and over K
orders in parallel, so that every action a player could take is worked out in one pass over the
block. Like the editor it proves nothing: `BlockBatch` and the verifier decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.rl.batch import BlockBatch
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, SCOREBOARDS
from warploom.sass.rules.rules import BLOCK_EDGE
from warploom.sass.rules.versions import Rows, Versions

Ints = npt.NDArray[np.int64]
NO_WISH: Final = -1
_NEVER: Final = -(1 << 30)


@dataclass(frozen=True)
class Wishes(Rows):
    """What K versions ask for, by instruction [K, n]: a least stall (-1: as the order needs),
    the yield hint and the reuse hints."""

    stall: Ints
    stay: Ints
    reuse: Ints

    def repeated(self, count: int) -> Wishes:
        """The wishes of one version, so many times."""
        return self.take([0] * count)


class BatchDeriver:
    """Derives versions of one block.

    By instruction: `sticky`, the waits that always stay with it; `head` and `tail`, the least
    distance from it to the block's two edges.
    """

    def __init__(self, batch: BlockBatch) -> None:
        self.batch = batch
        size = batch.size
        self._producers, self._gaps = _padded(
            size, [(int(b), int(a), int(need)) for a, b, need in batch.gap_rows]
        )
        at_edge = batch.wait_rows[:, 1] == BLOCK_EDGE
        self._holders, self._boards = _padded(
            size, [(int(c), int(h), int(s)) for h, c, s in batch.wait_rows[~at_edge]]
        )
        self._at_exit: Ints = batch.wait_rows[at_edge][:, [0, 2]]
        self.head = np.zeros(size, np.int64)
        self.tail = np.zeros(size, np.int64)
        for instruction, cycles, at_end in batch.edge_rows:
            side = self.tail if at_end else self.head
            side[instruction] = max(side[instruction], cycles)
        self._edges_of_other_blocks()
        # Waits of the compiler that no rule explains stay with their instruction, and all those of
        # a sync. One that stays can explain another away, so it is asked until nothing is missing.
        self.sticky = batch.sync_wait.copy()
        while True:
            explained = self._derive(batch.original().order, self._none(1))
            missing = batch.wait & ~explained.wait[0]
            if not missing.any():
                break
            self.sticky |= missing

    def _edges_of_other_blocks(self) -> None:
        """A result used in another block keeps, up to its need, the distance to the block's edge
        that the compiler gave it."""
        batch, tables = self.batch, self.batch.tables
        issue = np.cumsum(batch.stall) - batch.stall
        duration = int(batch.stall.sum())
        for producer, consumer, need in tables.constraints.cross:
            if tables.block_of[producer] == batch.block:
                one = int(producer) - batch.start
                keep = min(duration - int(issue[one]), int(need))
                self.tail[one] = max(self.tail[one], keep)
            if tables.block_of[consumer] == batch.block:
                one = int(consumer) - batch.start
                self.head[one] = max(self.head[one], min(int(issue[one]), int(need)))

    def _none(self, count: int) -> Wishes:
        return Wishes(
            np.full((count, self.batch.size), NO_WISH),
            np.tile(self.batch.stay, (count, 1)),
            np.tile(self.batch.reuse, (count, 1)),
        )

    def derive(self, order: Ints, wishes: Wishes) -> Versions:
        """Versions [K, n] of orders [K, n]; a block as compiled with no wish keeps its fields."""
        versions = self._derive(order, wishes)
        return self.drop_stale_reuse(versions)

    def _derive(self, order: Ints, wishes: Wishes) -> Versions:
        batch = self.batch
        count, size = order.shape
        rows: Ints = np.arange(count, dtype=np.int64)
        floors = self._floors(order, wishes)
        waits = np.zeros((count, size), np.int64)
        stalls = np.zeros((count, size), np.int64)
        # One column more than there are instructions: what padding points at, long past.
        issue = np.full((count, size + 1), _NEVER, np.int64)
        position = np.full((count, size + 1), -1, np.int64)
        waited = np.full((count, SCOREBOARDS), -1, np.int64)
        in_pipe = np.full((count, batch.tables.pipes), -1, np.int64)
        spacing, family = batch.tables.spacing, batch.family
        now = np.zeros(count, np.int64)
        before = order[:, 0]
        for place in range(size):
            mine = order[:, place]
            wait = self._wait(mine, place, rows, waited, position)
            if place:
                floor = floors[:, place - 1]
                shown = (batch.sets[before] & wait != 0) & ~batch.early[before, mine]
                floor = np.where(shown, np.maximum(floor, 2), floor)
                earliest = now + floor
            else:
                earliest = now
            producers = self._producers[mine]
            ready = issue[rows[:, None], producers] + self._gaps[mine]
            earliest = np.maximum(earliest, ready.max(1))
            if place:  # what comes first is issued as the block begins
                earliest = np.maximum(earliest, self.head[mine])
            pipe = batch.pipe[mine]
            other = np.where(pipe >= 0, in_pipe[rows, np.maximum(pipe, 0)], -1)
            apart = np.minimum(spacing[family[other], family[mine]], batch.close[other, mine])
            near = np.where(other >= 0, issue[rows, other] + apart, 0)
            earliest = np.maximum(earliest, near)
            if place:
                stalls[:, place - 1] = earliest - now
            now, before = earliest, mine
            issue[rows, mine], position[rows, mine] = now, place
            spaced = pipe >= 0
            in_pipe[rows[spaced], pipe[spaced]] = mine[spaced]
            waits[:, place] = wait
            if place == size - 1:
                waits[:, place] |= self._exit_waits(waited, position)
        least = np.maximum(batch.least_duration, (issue[:, :size] + self.tail).max(1))
        stalls[:, -1] = np.maximum(floors[:, -1], least - now)
        return self._settled(order, stalls, waits, wishes)

    def settled(self, order: Ints, stalls: Ints, waits: Ints, wishes: Wishes) -> Versions:
        """Versions from stalls and waits: stalls that fit their field, hints as wished."""
        return self.drop_stale_reuse(self._settled(order, stalls, waits, wishes))

    def _settled(self, order: Ints, stalls: Ints, waits: Ints, wishes: Wishes) -> Versions:
        stalls = _spread_back(stalls)
        stay = np.take_along_axis(wishes.stay, order, 1)
        stay = stay * ((stalls >= 1) & (stalls <= MAX_STALL_STAYING))
        reuse = np.take_along_axis(wishes.reuse, order, 1) * stay
        return Versions(order, stalls, stay, waits, reuse)

    def _floors(self, order: Ints, wishes: Wishes) -> Ints:
        """The stall each position keeps when no distance asks for more."""
        batch = self.batch
        wish = np.take_along_axis(wishes.stall, order, 1)
        own = batch.own[order]
        following = np.concatenate([order[:, 1:], np.full((len(order), 1), batch.size)], 1)
        pinned = np.isin(order, batch.pinned)
        kept = (following == order + 1) | pinned
        floors = np.where(kept, batch.stall[order], own)
        return np.where(wish >= 0, np.maximum(wish, own), floors)

    def _wait(self, mine: Ints, place: int, rows: Ints, waited: Ints, position: Ints) -> Ints:
        """The wait mask of one position: sticky bits, and what was not awaited since its setter."""
        batch = self.batch
        wait = self.sticky[mine]
        awaited = wait | batch.depbar[mine]
        for number in range(SCOREBOARDS):
            waited[awaited >> number & 1 == 1, number] = place
        holders, boards = self._holders[mine], self._boards[mine]
        set_at = np.where(holders == BLOCK_EDGE, -1, position[rows[:, None], holders])
        missing = (waited[rows[:, None], boards] <= set_at) & (holders < batch.size)
        if missing.any():
            for number in range(SCOREBOARDS):
                late = (missing & (boards == number)).any(1)
                if late.any():
                    wait = np.where(late, wait | 1 << number, wait)
                    waited[late, number] = place
        return wait

    def _exit_waits(self, waited: Ints, position: Ints) -> Ints:
        """What the block must have waited for before control leaves it."""
        wait = np.zeros(len(waited), np.int64)
        for holder, board in self._at_exit:
            set_at = -1 if holder == BLOCK_EDGE else position[:, holder]
            late = waited[:, board] <= set_at
            wait = np.where(late, wait | 1 << board, wait)
        return wait

    def drop_stale_reuse(self, versions: Versions) -> Versions:
        """The versions less the reuse hints whose operand is overwritten before it is read."""
        batch = self.batch
        if not versions.reuse.any():
            return versions
        named = Versions(
            batch.canonical(versions.order),
            versions.stall,
            versions.stay,
            versions.wait,
            versions.reuse,
        )
        stale = batch.stale_reuse(named)
        if not stale.any():
            return versions
        reuse = versions.reuse.copy()
        position = batch.positions(named.order)
        for version, row in zip(*np.nonzero(stale), strict=True):
            holder, slot = batch.reuse_rows[row, :2]
            reuse[version, position[version, holder]] &= ~(1 << slot)
        return Versions(versions.order, versions.stall, versions.stay, versions.wait, reuse)


def _spread_back(stalls: Ints) -> Ints:
    """Stalls of at most 15: what is too long goes to the instructions before."""
    if stalls.max() <= MAX_STALL:
        return stalls
    for place in range(stalls.shape[1] - 1, 0, -1):
        excess = np.maximum(stalls[:, place] - MAX_STALL, 0)
        stalls[:, place] -= excess
        stalls[:, place - 1] += excess
    return stalls


def _padded(size: int, rows: list[tuple[int, int, int]]) -> tuple[Ints, Ints]:
    """(partners [n, P], values [n, P]) of rows (instruction, partner, value); padding is n, 0."""
    of: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for instruction, partner, value in rows:
        of[instruction].append((partner, value))
    width = max(1, *(len(found) for found in of))
    partners = np.full((size, width), size, np.int64)
    values = np.zeros((size, width), np.int64)
    for instruction, found in enumerate(of):
        for column, (partner, value) in enumerate(found):
            partners[instruction, column], values[instruction, column] = partner, value
    return partners, values
