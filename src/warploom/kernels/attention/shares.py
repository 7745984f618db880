"""Tasks of different length shared out to SMs before the launch: a causal mask's tiles of keys.

A list costs a kernel less than a counter in memory: what it reads of a task is known where the task
begins, and nothing is handed from the loading group to the others. No SM waits for the longest
tasks at the end, as each band of heads gives its longest task to the SM with the least to do.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.backward_config import BackwardConfig

START = 4  # blocks of rows that a task takes as long as, beside its own


def key_tasks(
    config: BackwardConfig, batch: int, kv_heads: int, rows: int, keys: int, sms: int
) -> NDArray[np.int32]:
    """`[tasks, 3]`, int32: batch, key head and tile of keys of each task; SM s of `sms` does tasks
    s, s + sms, ... A task behind the last tile has nothing to do."""
    (bq, bk), shift = config.tile, keys - rows
    tiles = -(-keys // bk)
    reach = keys if config.window is None else config.window  # keys from a row's own backwards

    def blocks(j: int) -> int:
        """Blocks of rows that see a key of tile j."""
        last = max(0, min(rows, (j + 1) * bk - 1 + reach - shift))
        return max(0, -(-last // bq) - max(0, j * bk - shift) // bq)

    lengths = [blocks(j) for j in range(tiles)]
    heads = [(b, h) for b in range(batch) for h in range(kv_heads)]
    own: list[list[tuple[int, int, int]]] = [[] for _ in range(sms)]
    loads = [(0, s) for s in range(sms)]
    heapify(loads)
    band = max(1, config.band)
    for first in range(0, len(heads), band):
        for j, length in enumerate(lengths):
            for head in heads[first : first + band]:
                load, sm = loads[0]
                own[sm].append((*head, j))
                heapreplace(loads, (load + config.group * length + START, sm))
    found = np.full((max(map(len, own)), sms, 3), (0, 0, tiles), np.int32)
    for sm, tasks in enumerate(own):
        for turn, task in enumerate(tasks):
            found[turn, sm] = task
    return found.reshape(-1, 3)
