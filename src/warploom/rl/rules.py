"""One block's rules as Python values: rows by instruction, outstanding waits as bits."""

from __future__ import annotations

from typing import Final

import numpy as np

from warploom.rl.batch import BlockBatch
from warploom.sass.decode.control import SCOREBOARDS
from warploom.sass.rules.constraints import BLOCK_EDGE

_NO_REGISTER: Final = 255
_BANKS: Final = 2


class BlockRules:
    """What `BlockBatch` holds as arrays, for one version at a time.

    A wait row's first half is a pair (who set a scoreboard, which one); `needs` of a consumer,
    `raises` of a setter, `boards` and `at_exit` are sets of such pairs as the bits of an integer.
    `sticky`: the waits that always stay with an instruction, all those of a sync; `head` and
    `tail`: the least distance from it to the block's two edges.
    `reach`: cycles after which an instruction holds up nothing any more.
    """

    def __init__(self, batch: BlockBatch) -> None:
        self.batch, self.size = batch, batch.size
        size = batch.size
        self.producers: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        longest = [0] * size  # that a consumer may have to wait
        gaps: list[list[int]] = batch.gap_rows.tolist()
        for before, after, need in gaps:
            self.producers[after].append((before, need))
            longest[before] = max(longest[before], need)
        self.after: list[set[int]] = [set() for _ in range(size)]
        orders: list[list[int]] = batch.order_rows.tolist()
        for before, after in orders:
            self.after[before].add(after)
        self.own: list[int] = batch.own.tolist()
        self.stall: list[int] = batch.stall.tolist()
        self.sets: list[int] = batch.sets.tolist()
        self.depbar: list[int] = batch.depbar.tolist()
        self.keeps: list[bool] = batch.keeps.tolist()
        self.pinned: frozenset[int] = frozenset(batch.pinned.tolist())
        self.early = {(int(one), int(other)) for one, other in np.argwhere(batch.early)}
        self.pipe: list[int] = batch.pipe.tolist()
        self.pipes = batch.tables.pipes
        self.family: list[int] = batch.family.tolist()
        self.spacing: list[list[int]] = batch.tables.spacing.tolist()
        widest = int(batch.tables.spacing.max(initial=0))
        self.close = {
            (int(one), int(other)): int(batch.close[one, other])
            for one, other in np.argwhere(batch.close <= widest)
        }
        self.sticky: list[int] = batch.sync_wait.tolist()
        self.head, self.tail = [0] * size, [0] * size
        edges: list[list[int]] = batch.edge_rows.tolist()
        for one, cycles, at_end in edges:
            side = self.tail if at_end else self.head
            side[one] = max(side[one], cycles)
        self._edges_of_other_blocks()
        self.latest_head = max(self.head)
        self.reach = [
            max(need, widest if pipe >= 0 else 0)
            for need, pipe in zip(longest, self.pipe, strict=True)
        ]
        self.twin = [-1] * size
        for group, members in enumerate(batch.twins):
            for member in members.tolist():
                self.twin[member] = group
        self._waits()
        self._reuse()

    def _edges_of_other_blocks(self) -> None:
        """A result used in another block keeps, up to its need, the distance to the block's edge
        that the compiler gave it."""
        batch, tables = self.batch, self.batch.tables
        issue: list[int] = (np.cumsum(batch.stall) - batch.stall).tolist()
        duration = sum(self.stall)
        rows: list[list[int]] = tables.constraints.cross.tolist()
        for producer, consumer, need in rows:
            if tables.block_of[producer] == batch.block:
                one = producer - batch.start
                self.tail[one] = max(self.tail[one], min(duration - issue[one], need))
            if tables.block_of[consumer] == batch.block:
                one = consumer - batch.start
                self.head[one] = max(self.head[one], min(issue[one], need))

    def _waits(self) -> None:
        rows: list[list[int]] = self.batch.wait_rows.tolist()
        pairs = sorted({(holder, board) for holder, _, board in rows})
        bit = {pair: 1 << number for number, pair in enumerate(pairs)}
        self.every_pair = (1 << len(pairs)) - 1
        self.boards = [0] * SCOREBOARDS
        self.needs, self.raises = [0] * self.size, [0] * self.size
        self.at_exit = 0
        for (holder, board), one in bit.items():
            self.boards[board] |= one
            if holder != BLOCK_EDGE:
                self.raises[holder] |= one
        for holder, consumer, board in rows:
            if consumer == BLOCK_EDGE:
                self.at_exit |= bit[holder, board]
            else:
                self.needs[consumer] |= bit[holder, board]
        self.kept_by = [
            self.every_pair
            & ~sum(pairs for number, pairs in enumerate(self.boards) if mask >> number & 1)
            for mask in range(1 << SCOREBOARDS)
        ]

    def _reuse(self) -> None:
        sources: list[list[int]] = self.batch.sources.tolist()
        self.bank = [[-1 if r == _NO_REGISTER else r % _BANKS for r in row] for row in sources]
        # By (holder, slot): the bank, who overwrites the register, whether other blocks may.
        self.writers: dict[tuple[int, int], tuple[int, set[int], bool]] = {}
        rows: list[list[int]] = self.batch.reuse_rows.tolist()
        for holder, slot, register, writer in rows:
            place = holder, slot
            bank, writers, leaves = self.writers.get(place, (register % _BANKS, set[int](), False))
            if writer != BLOCK_EDGE:
                writers.add(writer)
            self.writers[place] = bank, writers, leaves or writer == BLOCK_EDGE
        # Those that no order row keeps behind the holder.
        loose = {
            place: tuple(writers - self.after[place[0]])
            for place, (_, writers, _) in self.writers.items()
        }
        self.loose = {place: found for place, found in loose.items() if found}

    def apart(self, one: int, other: int) -> int:
        """Cycles that two neighbours in a pipe must be apart."""
        need = self.spacing[self.family[one]][self.family[other]]
        return min(need, self.close.get((one, other), need))

    def floor(self, before: int, following: int, wish: int) -> int:
        """The stall an instruction keeps when no distance asks for more."""
        if wish >= 0:
            return max(wish, self.own[before])
        kept = following == before + 1 or before in self.pinned
        return self.stall[before] if kept else self.own[before]

    def last_stall(self, now: int, tails: int, floor: int) -> int:
        """The last instruction's stall: the block lasts as long as anything in it asks."""
        return max(floor, max(self.batch.least_duration, tails) - now)

    def shows(self, before: int, mine: int, wait: int) -> bool:
        """Whether an instruction waits for a scoreboard that the one before it sets."""
        return bool(self.sets[before] & wait) and (before, mine) not in self.early

    def waiting(self, mine: int, out: int) -> tuple[int, int]:
        """(the wait mask of an instruction, the pairs outstanding after it waited)."""
        wait = self.sticky[mine]
        out &= self.kept_by[wait | self.depbar[mine]]
        missing = out & self.needs[mine]
        if missing:
            for number, pairs in enumerate(self.boards):
                if missing & pairs:
                    wait |= 1 << number
                    out &= ~pairs
        return wait, out

    def leaving(self, out: int) -> int:
        """The scoreboards to wait for before control leaves the block."""
        missing = out & self.at_exit
        return sum(1 << number for number, pairs in enumerate(self.boards) if missing & pairs)
