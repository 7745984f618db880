"""Tasks of causal gradients whose sums have one order, shared out to SMs before the launch.

Tiles of keys add to a block of dq's sums in turn, and their tasks are as long as the rows that see
them. Where a head goes forwards, from its first rows to its last, its last tile, the shortest, adds
first: tiles that begin together find their turns when they get to a block, but the longest tasks go
out last, and most SMs have nothing to do beside them. Where it goes backwards, from the last rows
to the first, the first tile, the longest, adds first, and each of the others has to begin a little
behind the one before it. So every second head goes backwards: the SM that does the shortest task of
a head that goes forwards takes the longest one of the next, and so on, each when its turn comes,
and both together are as long for every SM.

Which heads go backwards follows from their numbers alone, so that bits depend neither on the batch
nor on how tasks are shared out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.backward_config import BackwardConfig

PASSED = 1  # blocks of rows until the next tile sees that a block's turn has come to it
EMPTY = 1  # and that a task takes as long as beside its own
L2_BYTES, BEYOND = 17e6, 0.05  # of rows and sums at a time, and how much longer twice as many take
ROW_BYTES = 8  # of an element of a row: q, dO and the sum of dq
Task = tuple[int, int, int]  # number of a head of all sequences, tile, whether it goes backwards


def tasks_both_ways(
    config: BackwardConfig, batch: int, kv_heads: int, lengths: Sequence[int]
) -> NDArray[np.int32]:
    """`[tasks, 4]`, int32: batch, key head, tile of keys and whether it goes backwards, of each
    task; SM s of `config.sms` does tasks s, s + sms, ... `lengths`: blocks of rows that see a key
    of each tile. A task behind the last tile has nothing to do. Each comes behind those of the
    turns before its own."""
    heads, tiles, sms = batch * kv_heads, len(lengths), config.sms
    row = config.group * max(lengths) * config.tile[0] * config.depth * ROW_BYTES

    def slower(count: int) -> float:
        """By how much, where so many heads go at a time."""
        return 1 + BEYOND * max(0.0, count * row / L2_BYTES - 1)

    def unfit(count: int) -> float:
        tasks = count * tiles
        return -(-tasks // sms) * sms / tasks * slower(count)

    half = min(range(1, max(2, heads // 2 + 1)), key=unfit)
    most = -(-heads // 2)
    # As few SMs as do the same number of tasks each have nothing to do in between.
    rounds = math.ceil(heads * tiles / 2 / sms)
    columns = math.ceil(heads * tiles / 2 / rounds)
    ways = {(sms, half), (columns, half), (sms, most)}
    turned = [head % kv_heads % 2 for head in range(heads)]
    made = [_Shares(config, lengths, turned, *way) for way in sorted(ways)]
    own = min(made, key=lambda one: one.end * slower(one.half)).own
    found = np.full((max(map(len, own)), sms, 4), (0, 0, tiles, 0), np.int32)
    for sm, tasks in enumerate(own):
        for turn, task in enumerate(tasks):
            if task is not None:
                head, j, back = task
                found[turn, sm] = (*divmod(head, kv_heads), j, back)
    return found.reshape(-1, 4)


class _Shares:
    """Tasks of each of `columns` SMs: `half` heads go forwards, as many behind them backwards, and
    so on; the last ones are more. A task goes where it can begin first."""

    def __init__(
        self,
        config: BackwardConfig,
        lengths: Sequence[int],
        turned: Sequence[int],
        columns: int,
        half: int,
    ) -> None:
        self.half, heads = half, len(turned)
        self.own: list[list[Task | None]] = [[] for _ in range(columns)]
        self._config, self._lengths = config, lengths
        self._free, self._rows = np.zeros(columns), np.zeros(columns, int)  # time, tasks
        for first in range(0, max(1, heads - 2 * half + 1), 2 * half):
            last = first + 2 * half if first + 4 * half <= heads else heads
            self._give(_in_order(range(first, last), turned, lengths))

    @property
    def end(self) -> float:
        """When the last SM is done, in blocks of rows."""
        return float((self._free + EMPTY * (self._rows.max() - self._rows)).max())

    def _give(self, tasks: Iterator[Task]) -> None:
        numbers, sms, group = np.arange(len(self.own)), self._config.sms, self._config.group
        before: dict[int, tuple[int, float, int]] = {}  # of a head: blocks, begin and place
        for task in tasks:
            head, j, back = task
            blocks, place, begin = self._lengths[j], -1, 0.0
            if head in before:
                longer, begin, place = before[head]
                begin += PASSED + (longer - blocks) * (group - 1 if back else 1)
            rows = np.maximum(self._rows, (place - numbers) // sms + 1)
            begins = np.maximum(self._free + EMPTY * (rows - self._rows), begin)
            sm = int(np.argmin(begins + EMPTY * rows))
            begin, row = float(begins[sm]), int(rows[sm])
            self.own[sm] += [None] * (row - len(self.own[sm])) + [task]
            before[head] = blocks, begin, row * sms + sm
            self._free[sm], self._rows[sm] = begin + group * blocks + EMPTY, row + 1


def _in_order(heads: range, turned: Sequence[int], lengths: Sequence[int]) -> Iterator[Task]:
    """The tasks of a band: forwards the last tiles first, then backwards the first ones."""
    tiles = range(len(lengths))
    for back in (0, 1):
        for j in tiles if back else reversed(tiles):
            yield from ((head, j, back) for head in heads if turned[head] == back)
