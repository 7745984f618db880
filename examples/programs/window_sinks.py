"""Attention of gpt-oss: a sliding window, and a sink: a weight, learned a head, that no value gets.

warploom optimize examples/programs/window_sinks.py:kernel --set rows=8192 --set keys=8192
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel

SCALE, WINDOW = 64**-0.5, 128


def program(
    rows_of_a_tile: int = t.tunable(128, 192),
    keys_of_a_tile: int = t.tunable(128, 64),
    group: int = 8,
):
    """q, o: [batch, heads, rows, 64], k, v: [batch, pairs, keys, 64] in bf16; sinks: [heads]."""
    bq, bk, d = rows_of_a_tile, keys_of_a_tile, t.span(0, 64)

    def window_sinks(q, k, v, sinks, o):
        sizes = {"batch": t.size("batch"), "heads": t.size("heads")}
        batch, head, i = t.grid(**sizes, rows=t.cdiv(t.size("rows"), bq))
        rows, row_at = t.span(i * bq, bq), t.coordinate("rows", bq, i * bq)
        queries = t.load(q, batch, head, rows, d)
        highest = t.zeros(rows=bq) + t.load(sinks, head)
        total, result = t.full(1.0, rows=bq), t.zeros(rows=bq, d=64)
        for j in t.loop(t.cdiv(t.size("keys"), bk)):
            keys, key_at = t.span(j * bk, bk), t.coordinate("keys", bk, j * bk)
            scores = (queries @ t.load(k, batch, head // group, keys, d)) * SCALE
            seen = (row_at >= key_at) & (row_at - WINDOW < key_at) & (key_at < t.size("keys"))
            scores = t.where(seen, scores, -np.inf)
            new = t.maximum(highest, t.max_along(scores, "keys"))
            weights, rescale = t.exp(scores - new), t.exp(highest - new)
            total[:] = total * rescale + t.sum_along(weights, "keys")
            result[:] = result * rescale
            result += weights.cast(t.BF16) @ t.load(v, batch, head // group, keys, d)
            highest[:] = new
        t.store(o, batch, head, rows, d, tile=(result / total).cast(t.BF16))

    rows, keys = t.array(t.BF16, "batch heads rows d"), t.array(t.BF16, "batch pairs keys d")
    arrays = {"q": rows, "k": keys, "v": keys, "sinks": t.array(t.FP32, "heads"), "o": rows}
    return t.trace(window_sinks, arrays)


def reference(arrays):
    """The formula in float64."""
    q, k, v, sinks = (np.asarray(arrays[x], np.float64) for x in ("q", "k", "v", "sinks"))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
    seen = (distance <= 0) & (distance > -WINDOW)
    weights = np.exp(np.where(seen, q @ k.swapaxes(2, 3) * SCALE, -np.inf))
    total = weights.sum(3, keepdims=True) + np.exp(sinks)[:, None, None]
    return {"o": weights / total @ v}


kernel = UserKernel(program, reference, {"batch": 1, "heads": 8, "pairs": 1, "d": 64})
