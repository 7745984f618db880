"""Causal attention with soft-capped scores (Gemma 2) and linear biases (ALiBi).

warploom optimize examples/programs/softcap_alibi.py:kernel --set rows=8192 --set keys=8192
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel

CAP, SCALE = 30.0, 128**-0.5


def program(
    rows_of_a_tile: int = t.tunable(128, 192), keys_of_a_tile: int = t.tunable(128, 96, 64)
):
    """q, k, v, o: [batch, heads, rows or keys, 128] in bf16; slopes: [heads] in fp32."""
    bq, bk, d = rows_of_a_tile, keys_of_a_tile, t.span(0, 128)

    def softcap_alibi(q, k, v, slopes, o):
        sizes = {"batch": t.size("batch"), "heads": t.size("heads")}
        *head, i = t.grid(**sizes, rows=t.cdiv(t.size("rows"), bq))
        rows, row_at = t.span(i * bq, bq), t.coordinate("rows", bq, i * bq)
        queries, slope = t.load(q, *head, rows, d), t.load(slopes, head[1])
        highest, total = t.full(-np.inf, rows=bq), t.zeros(rows=bq)
        result = t.zeros(rows=bq, d=128)
        for j in t.loop(t.cdiv(t.size("keys"), bk)):
            keys, key_at = t.span(j * bk, bk), t.coordinate("keys", bk, j * bk)
            scores = t.tanh((queries @ t.load(k, *head, keys, d)) * (SCALE / CAP)) * CAP
            scores = scores + (key_at - row_at).T.cast(t.FP32) * slope
            scores = t.where((row_at >= key_at) & (key_at < t.size("keys")), scores, -np.inf)
            new = t.maximum(highest, t.max_along(scores, "keys"))
            weights, rescale = t.exp(scores - new), t.exp(highest - new)
            total[:] = total * rescale + t.sum_along(weights, "keys")
            result[:] = result * rescale
            result += weights.cast(t.BF16) @ t.load(v, *head, keys, d)
            highest[:] = new
        t.store(o, *head, rows, d, tile=(result / total).cast(t.BF16))

    rows, keys = t.array(t.BF16, "batch heads rows d"), t.array(t.BF16, "batch heads keys d")
    arrays = {"q": rows, "k": keys, "v": keys, "slopes": t.array(t.FP32, "heads"), "o": rows}
    return t.trace(softcap_alibi, arrays)


def reference(arrays):
    """The formula in float64."""
    q, k, v, slopes = (np.asarray(arrays[x], np.float64) for x in ("q", "k", "v", "slopes"))
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
    scores = CAP * np.tanh(q @ k.swapaxes(2, 3) * SCALE / CAP) + distance * slopes[:, None, None]
    weights = np.exp(np.where(distance <= 0, scores, -np.inf))
    return {"o": weights / weights.sum(3, keepdims=True) @ v}


def inputs(sizes, random):
    """Slopes of ALiBi."""
    return {"slopes": 2.0 ** (-8.0 * np.arange(1, sizes["heads"] + 1) / sizes["heads"])}


kernel = UserKernel(program, reference, {"batch": 1, "heads": 2, "d": 128}, inputs=inputs)
