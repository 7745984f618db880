"""Few heads of many rows: segments of a head run side by side, in three kernels.

    states   what the rows of each segment add to the state (`recurrent`, output=False)
    scan     the state before each segment, one after the other: S_s+1 = exp(sum_s) S_s + F_s
    outputs  each segment from the state before it (`recurrent`, initial=True)

A segment is a sequence of its own to the first and the last: [batch * segments, rows, ...].
"""

from __future__ import annotations

import math
from dataclasses import replace

from warploom import tile as t
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK

COLUMNS = 16  # of a state, a task of the scan
CHUNK_US = 1.7  # of a task's chunk; H200, a block on each SM (bench/linear_attention.py, Mamba-2)
STATES_SHARE = 0.6  # of it without an output: half of the matmuls, no scores and no store
LAUNCHES_US = 12.0  # two more kernels, the sums of gates and a scan of small states
MOST = 64  # segments


def segments(config: RecurrentConfig, batch: int, heads: int, rows: int, sms: int) -> int:
    """How many segments each head's rows are best cut in; 1: one kernel does it all.

    Segments have equally many rows, a multiple of a chunk. A model of three numbers: how many
    blocks run at a time, what a chunk takes, what the other kernels cost.
    """
    if config.in_parts or not rows:
        return 1
    tasks = batch * heads * math.ceil(config.value_dim / config.columns)
    places = sms * (1 if config.columns > 64 else 2)

    def time(count: int) -> float:
        chunks, rounds = rows / CHUNK / count, math.ceil(tasks * count / places)
        if count == 1:
            return CHUNK_US * chunks * rounds
        return CHUNK_US * (1 + STATES_SHARE) * chunks * rounds + LAUNCHES_US

    counts = [n for n in (1, 2, 4, 8, 16, 32, MOST) if n == 1 or rows % (n * CHUNK) == 0]
    return min(counts, key=time)


def configs(config: RecurrentConfig) -> tuple[RecurrentConfig, RecurrentConfig]:
    """(of the states, of the outputs)."""
    states = replace(config, output=False, initial=False, final=True, skip=False)
    return states, replace(config, initial=True, final=False)


def scan(config: RecurrentConfig) -> t.Program:
    """The states before the segments, `before`, and after the last one, `final`.

    `added: [batch, segments, heads, d, e]` is what each segment adds, `sums: [batch, segments,
    heads]` the logarithm of what it multiplies by; with `config.initial` there is a state before
    the first one, `initial: [batch, heads, d, e]`.
    """
    each, whole = "batch segments heads d e", "batch heads d e"
    arrays = {"added": t.array(t.FP32, each), "sums": t.array(t.FP32, "batch segments heads")}
    arrays |= {"before": t.array(t.FP32, each), "final": t.array(t.FP32, whole)}
    arrays |= {"initial": t.array(t.FP32, whole)} if config.initial else {}

    def body(**given: t.Array) -> None:
        blocks = t.cdiv(t.size("e"), COLUMNS)
        batch, head, column = t.grid(batch=t.size("batch"), heads=t.size("heads"), cols=blocks)
        part = t.span(0, config.key_dim, "d"), t.span(column * COLUMNS, COLUMNS, "e")
        if config.initial:
            state = t.load(given["initial"], batch, head, *part).copy()
        else:
            state = t.zeros(d=config.key_dim, e=COLUMNS)
        for s in t.loop(t.size("segments")):
            t.store(given["before"], batch, s, head, *part, tile=state)
            state *= t.exp(t.load(given["sums"], batch, s, head))
            state += t.load(given["added"], batch, s, head, *part)
        t.store(given["final"], batch, head, *part, tile=state)

    return t.trace(body, arrays, name="recurrent_scan")
