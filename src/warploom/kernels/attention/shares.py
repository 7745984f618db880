"""Tasks of different length shared out to SMs before the launch: a causal mask's tiles of keys.

A list costs a kernel less than a counter in memory: what it reads of a task is known where the task
begins, and nothing is handed from the loading group to the others. No SM waits for the longest
tasks at the end, as each band of heads gives its longest task to the SM with the least to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.both_ways import tasks_both_ways

START = 1  # blocks of rows that a task takes as long as, beside its own


def key_tasks(
    config: BackwardConfig, batch: int, kv_heads: int, rows: int, keys: int, sms: int
) -> NDArray[np.int32]:
    """`[tasks, 3]`, int32: batch, key head and tile of keys of each task; SM s of `sms` does tasks
    s, s + sms, ... A task behind the last tile has nothing to do."""
    lengths = task_lengths(config, rows, keys)
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
    found = np.full((max(map(len, own)), sms, 3), (0, 0, len(lengths)), np.int32)
    for sm, tasks in enumerate(own):
        for turn, task in enumerate(tasks):
            found[turn, sm] = task
    return found.reshape(-1, 3)


def task_lengths(config: BackwardConfig, rows: int, keys: int) -> list[int]:
    """Blocks of rows that see a key of each tile."""
    (bq, bk), shift = config.tile, keys - rows
    reach = keys if config.window is None else config.window  # keys from a row's own backwards

    def blocks(j: int) -> int:
        last = max(0, min(rows, (j + 1) * bk - 1 + reach - shift))
        return max(0, -(-last // bq) - max(0, j * bk - shift) // bq)

    return [blocks(j) for j in range(-(-keys // bk))]


def lists_of_tasks(
    config: BackwardConfig, batch: int, kv_heads: int, rows: int, keys: int
) -> dict[str, NDArray[np.int32]]:
    """The lists that the kernels of a configuration take."""
    if config.cut:
        return cut_tasks(config, batch, kv_heads, rows, keys)
    if config.both_ways:
        lengths = task_lengths(config, rows, keys)
        return {"key_tasks": tasks_both_ways(config, batch, kv_heads, lengths)}
    return {"key_tasks": key_tasks(config, batch, kv_heads, rows, keys, config.sms)}


def cut_tasks(
    config: BackwardConfig, batch: int, kv_heads: int, rows: int, keys: int
) -> dict[str, NDArray[np.int32]]:
    """Tasks of equal length, of which SMs do as many each, and pieces of those left over.

    `key_tasks`, `[tasks, 3]`, as `key_tasks` gives; `key_pieces`, `[tasks, 6]`: batch, key head,
    tile, slot of its sums, first block of rows and how many, of which each SM has about as many;
    and `cut_tiles`, `[slots, 3]`: batch, key head and tile of every slot.
    """
    (bq, bk), sms = config.tile, config.sms
    tiles = -(-keys // bk)
    every = [(b, h, j) for b in range(batch) for h in range(kv_heads) for j in range(tiles)]
    left = len(every) % sms
    whole, cut = every[: len(every) - left], every[len(every) - left :]  # of few heads: L2 holds it
    blocks = -(-rows // bq) * config.group
    ends = [s * left * blocks // sms for s in range(sms + 1)]
    own = [_pieces(cut, blocks, first, end) for first, end in pairwise(ends)]
    found = np.full((max(map(len, own)), sms, 6), (0, 0, tiles, left, 0, 0), np.int32)
    for sm, pieces in enumerate(own):
        for turn, piece in enumerate(pieces):
            found[turn, sm] = piece
    lists = {"key_tasks": whole, "key_pieces": found.reshape(-1, 6), "cut_tiles": cut}
    return {name: np.asarray(table, np.int32) for name, table in lists.items()}


def _pieces(
    cut: Sequence[tuple[int, int, int]], blocks: int, first: int, end: int
) -> list[tuple[int, ...]]:
    """The pieces between two of the blocks of rows of all cut tiles, which have so many each."""
    found: list[tuple[int, ...]] = []
    for slot in range(first // blocks, -(-end // blocks)):
        start, stop = max(first - slot * blocks, 0), min(end - slot * blocks, blocks)
        found.append((*cut[slot], slot, start, stop - start))
    return found
