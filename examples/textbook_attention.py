"""Causal attention as a textbook has it: no variant, no launch plan, no schedule.

warploom optimize examples/textbook_attention.py:kernel --effort quick -o out/textbook
warploom run examples/textbook_attention.py:kernel
"""

import math

from warploom import tile as t
from warploom.kernels import UserKernel


def attention(
    rows_of_a_tile: int = t.tunable(128, 192),
    keys_of_a_tile: int = t.tunable(128, 80, 112, 64, 176),
    dim: int = 128,
    causal: bool = True,
):
    """o = softmax(q k^T / sqrt(d)) v; if causal, a row sees the keys up to its own position."""
    bq, bk = rows_of_a_tile, keys_of_a_tile

    def body(q, k, v, o):
        batch, head, i = t.grid(
            batch=t.size("batch"), heads=t.size("heads"), rows=t.cdiv(t.size("rows"), bq)
        )
        rows, d = t.span(i * bq, bq), t.span(0, dim)
        queries = t.load(q, batch, head, rows, d)
        highest, total = t.full(-math.inf, rows=bq), t.zeros(rows=bq)
        result = t.zeros(rows=bq, d=dim)
        row_at = t.coordinate("rows", bq, i * bq)
        for j in t.loop(t.cdiv(t.size("keys"), bk)):
            keys = t.span(j * bk, bk)
            scores = (queries @ t.load(k, batch, head, keys, d)) * (1 / math.sqrt(dim))
            key_at = t.coordinate("keys", bk, j * bk)
            seen = (
                (row_at >= key_at) & (key_at < t.size("keys"))
                if causal
                else key_at < t.size("keys")
            )
            scores = t.where(seen, scores, -math.inf)
            new = t.maximum(highest, t.max_along(scores, "keys"))
            weights, rescale = t.exp(scores - new), t.exp(highest - new)
            total[:] = total * rescale + t.sum_along(weights, "keys")
            result[:] = result * rescale
            result += weights.cast(t.BF16) @ t.load(v, batch, head, keys, d)
            highest[:] = new
        t.store(o, batch, head, rows, d, tile=(result / total).cast(t.BF16))

    arrays = {x: t.array(t.BF16, "batch heads rows d") for x in "qo"}
    arrays |= {x: t.array(t.BF16, "batch heads keys d") for x in "kv"}
    return t.trace(body, {x: arrays[x] for x in "qkvo"}, name="textbook_attention")


kernel = UserKernel(attention, sizes={"batch": 4, "heads": 16, "rows": 200, "keys": 200, "d": 128})
