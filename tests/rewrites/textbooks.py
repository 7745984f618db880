"""Textbook programs of these tests: written as one would on a blackboard, in several ways."""

import math

from warploom import tile as t
from warploom.tile.tiles import coordinate


def attention(
    tile=(64, 64),
    dim=64,
    mask="causal",
    natural=True,
    early=True,
    guard=False,
    lse=False,
    dtype=t.BF16,
    sinks=False,
):
    """One pass over all blocks of keys: `natural` takes e ** x, `early` scales scores before the
    mask, `guard` allows for rows that see no key, `sinks` begins with a weight a head that no value
    gets."""
    bq, bk = tile
    power = t.exp if natural else t.exp2
    factor = 1.0 / math.sqrt(dim)

    def body(q, k, v, o, **rest):
        batch, head, i = t.grid(
            batch=t.size("batch"), heads=t.size("heads"), rows=t.cdiv(t.size("rows"), bq)
        )
        rows, d = t.span(i * bq, bq), t.span(0, dim)
        queries = t.load(q, batch, head, rows, d)
        base, total, acc = t.full(-math.inf, rows=bq), t.zeros(rows=bq), t.zeros(rows=bq, d=dim)
        if sinks:
            base, total = t.zeros(rows=bq) + t.load(rest["sinks"], head), t.full(1.0, rows=bq)
        row_at = coordinate("rows", bq, i * bq + t.size("keys") - t.size("rows"))
        for j in t.loop(t.cdiv(t.size("keys"), bk)):
            keys = t.span(j * bk, bk)
            scores = queries @ t.load(k, batch, head, keys, d)
            if early:
                scores = scores * factor
            key_at = coordinate("keys", bk, j * bk)
            seen = key_at < t.size("keys")
            if mask != "full":
                seen = (row_at >= key_at) & seen
            if mask == "window":
                seen = seen & (row_at - 90 < key_at)
            scores = t.where(seen, scores, -math.inf)

            def scaled(x):
                return x if early else x * factor

            highest = t.maximum(base, scaled(t.max_along(scores, "keys")))
            under = t.where(highest.equals(-math.inf), 0.0, highest) if guard else highest
            weights = power(scaled(scores) - under)
            rescale = power(base - under)
            total[:] = total * rescale + t.sum_along(weights, "keys")
            acc[:] = acc * rescale
            acc += weights.cast(dtype) @ t.load(v, batch, head, keys, d)
            base[:] = highest
        t.store(o, batch, head, rows, d, tile=(acc / total).cast(dtype))
        if lse:
            t.store(rest["lse"], batch, head, rows, tile=base + t.log(total))

    arrays = {name: t.array(dtype, "batch heads rows d") for name in "qo"}
    arrays |= {name: t.array(dtype, "batch heads keys d") for name in "kv"}
    if lse:
        arrays["lse"] = t.array(t.FP32, "batch heads rows")
    if sinks:
        arrays["sinks"] = t.array(t.FP32, "heads")
    names = ("q", "k", "v", "o", "lse", "sinks")
    return t.trace(body, {x: arrays[x] for x in names if x in arrays}, name="textbook")


def matmul(tile=(64, 64, 32), bias=False, activation="none", residual=False, dtype=t.FP16):
    """c = f(a b + bias) + residual."""
    bm, bn, bk = tile
    functions = {"none": lambda x: x, "relu": t.relu, "gelu": t.gelu}

    def body(a, b, c, **rest):
        m, n = t.grid(m=t.cdiv(t.size("m"), bm), n=t.cdiv(t.size("n"), bn))
        rows, cols = t.span(m * bm, bm), t.span(n * bn, bn)
        acc = t.zeros(m=bm, n=bn)
        for i in t.loop(t.cdiv(t.size("k"), bk)):
            depth = t.span(i * bk, bk)
            acc += t.load(a, rows, depth) @ t.load(b, depth, cols)
        result = acc + t.load(rest["bias"], cols) if bias else acc
        result = functions[activation](result)
        if residual:
            result = result + t.load(rest["residual"], rows, cols).cast(t.FP32)
        t.store(c, rows, cols, tile=result.cast(dtype))

    arrays = {"a": t.array(dtype, "m k"), "b": t.array(dtype, "k n"), "c": t.array(dtype, "m n")}
    if bias:
        arrays["bias"] = t.array(t.FP32, "n")
    if residual:
        arrays["residual"] = t.array(dtype, "m n")
    return t.trace(body, arrays, name="matmul")
