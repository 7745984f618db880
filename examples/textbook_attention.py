"""Causal attention as a textbook has it: no variant, no launch plan, no schedule.

warploom optimize examples/textbook_attention.py:kernel --effort quick -o out/textbook
warploom run examples/textbook_attention.py:kernel
"""

import math

from warploom.kernels import UserKernel
from warploom.tile import (
    BF16,
    array,
    cdiv,
    coordinate,
    exp,
    full,
    grid,
    load,
    loop,
    max_along,
    maximum,
    size,
    span,
    store,
    sum_along,
    trace,
    tunable,
    where,
    zeros,
)


def attention(
    rows_of_a_tile: int = tunable(128, 192),
    keys_of_a_tile: int = tunable(128, 80, 112, 64, 176),
    dim: int = 128,
    causal: bool = True,
):
    """o = softmax(q k^T / sqrt(d)) v; if causal, a row sees the keys up to its own position."""
    bq, bk = rows_of_a_tile, keys_of_a_tile

    def body(q, k, v, o):
        batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), bq))
        rows, d = span(i * bq, bq), span(0, dim)
        queries = load(q, batch, head, rows, d)
        highest, total = full(-math.inf, rows=bq), zeros(rows=bq)
        result = zeros(rows=bq, d=dim)
        row_at = coordinate("rows", bq, i * bq)
        for j in loop(cdiv(size("keys"), bk)):
            keys = span(j * bk, bk)
            scores = (queries @ load(k, batch, head, keys, d)) * (1 / math.sqrt(dim))
            key_at = coordinate("keys", bk, j * bk)
            seen = (row_at >= key_at) & (key_at < size("keys")) if causal else key_at < size("keys")
            scores = where(seen, scores, -math.inf)
            new = maximum(highest, max_along(scores, "keys"))
            weights, rescale = exp(scores - new), exp(highest - new)
            total[:] = total * rescale + sum_along(weights, "keys")
            result[:] = result * rescale
            result += weights.cast(BF16) @ load(v, batch, head, keys, d)
            highest[:] = new
        store(o, batch, head, rows, d, tile=(result / total).cast(BF16))

    arrays = {x: array(BF16, "batch heads rows d") for x in "qo"}
    arrays |= {x: array(BF16, "batch heads keys d") for x in "kv"}
    return trace(body, {x: arrays[x] for x in "qkvo"}, name="textbook_attention")


kernel = UserKernel(attention, sizes={"batch": 4, "heads": 16, "rows": 200, "keys": 200, "d": 128})
