"""Textbook programs of these tests: written as one would on a blackboard, in several ways."""

import math

from warploom.tile import (
    BF16,
    FP16,
    FP32,
    array,
    cdiv,
    exp,
    exp2,
    full,
    gelu,
    grid,
    load,
    log,
    loop,
    max_along,
    maximum,
    relu,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)
from warploom.tile.tiles import coordinate


def attention(
    tile=(64, 64),
    dim=64,
    mask="causal",
    natural=True,
    early=True,
    guard=False,
    lse=False,
    dtype=BF16,
    sinks=False,
):
    """One pass over all blocks of keys: `natural` takes e ** x, `early` scales scores before the
    mask, `guard` allows for rows that see no key, `sinks` begins with a weight a head that no value
    gets."""
    bq, bk = tile
    power = exp if natural else exp2
    factor = 1.0 / math.sqrt(dim)

    def body(q, k, v, o, **rest):
        batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), bq))
        rows, d = span(i * bq, bq), span(0, dim)
        queries = load(q, batch, head, rows, d)
        base, total, acc = full(-math.inf, rows=bq), zeros(rows=bq), zeros(rows=bq, d=dim)
        if sinks:
            base, total = zeros(rows=bq) + load(rest["sinks"], head), full(1.0, rows=bq)
        row_at = coordinate("rows", bq, i * bq + size("keys") - size("rows"))
        for j in loop(cdiv(size("keys"), bk)):
            keys = span(j * bk, bk)
            scores = queries @ load(k, batch, head, keys, d)
            if early:
                scores = scores * factor
            key_at = coordinate("keys", bk, j * bk)
            seen = key_at < size("keys")
            if mask != "full":
                seen = (row_at >= key_at) & seen
            if mask == "window":
                seen = seen & (row_at - 90 < key_at)
            scores = where(seen, scores, -math.inf)

            def scaled(x):
                return x if early else x * factor

            highest = maximum(base, scaled(max_along(scores, "keys")))
            under = where(highest.equals(-math.inf), 0.0, highest) if guard else highest
            weights = power(scaled(scores) - under)
            rescale = power(base - under)
            total[:] = total * rescale + sum_along(weights, "keys")
            acc[:] = acc * rescale
            acc += weights.cast(dtype) @ load(v, batch, head, keys, d)
            base[:] = highest
        store(o, batch, head, rows, d, tile=(acc / total).cast(dtype))
        if lse:
            store(rest["lse"], batch, head, rows, tile=base + log(total))

    arrays = {name: array(dtype, "batch heads rows d") for name in "qo"}
    arrays |= {name: array(dtype, "batch heads keys d") for name in "kv"}
    if lse:
        arrays["lse"] = array(FP32, "batch heads rows")
    if sinks:
        arrays["sinks"] = array(FP32, "heads")
    names = ("q", "k", "v", "o", "lse", "sinks")
    return trace(body, {x: arrays[x] for x in names if x in arrays}, name="textbook")


def matmul(tile=(64, 64, 32), bias=False, activation="none", residual=False, dtype=FP16):
    """c = f(a b + bias) + residual."""
    bm, bn, bk = tile
    functions = {"none": lambda x: x, "relu": relu, "gelu": gelu}

    def body(a, b, c, **rest):
        m, n = grid(m=cdiv(size("m"), bm), n=cdiv(size("n"), bn))
        rows, cols = span(m * bm, bm), span(n * bn, bn)
        acc = zeros(m=bm, n=bn)
        for i in loop(cdiv(size("k"), bk)):
            depth = span(i * bk, bk)
            acc += load(a, rows, depth) @ load(b, depth, cols)
        result = acc + load(rest["bias"], cols) if bias else acc
        result = functions[activation](result)
        if residual:
            result = result + load(rest["residual"], rows, cols).cast(FP32)
        store(c, rows, cols, tile=result.cast(dtype))

    arrays = {"a": array(dtype, "m k"), "b": array(dtype, "k n"), "c": array(dtype, "m n")}
    if bias:
        arrays["bias"] = array(FP32, "n")
    if residual:
        arrays["residual"] = array(dtype, "m n")
    return trace(body, arrays, name="matmul")
