"""Causal linear attention in chunks: a state in registers is the operand of a matmul."""

import numpy as np

from warploom import tile as t


def _body(q, k, v, o, rows, depth):
    (h,) = t.grid(heads=t.size("heads"))
    state = t.zeros(d=depth, e=depth)
    for i in t.loop(t.cdiv(t.size("m"), rows)):
        here, there = t.span(i * rows, rows), t.span(i * rows, rows, "n")
        d, e = t.span(0, depth), t.span(0, depth)
        qt, keys, values = t.load(q, h, here, d), t.load(k, h, there, d), t.load(v, h, there, e)
        scores = qt @ keys
        scores = t.causal(t.coordinate("m", rows), t.coordinate("n", rows), scores, 0.0)
        out = scores.cast(t.BF16) @ values
        out += qt @ state.cast(t.BF16)  # what the chunks before have left
        state += keys @ values  # contracts the rows of both
        t.store(o, h, here, e, tile=out)


def state_case(m=200, rows=64, depth=64):
    """(program, arrays)."""
    dims = {"q": "heads m d", "k": "heads n d", "v": "heads n e"}
    arrays = {name: t.array(t.BF16, text) for name, text in dims.items()}
    arrays["o"] = t.array(t.FP32, "heads m e")
    program = t.trace(_body, arrays, name="linear_attention", rows=rows, depth=depth)
    random = np.random.default_rng(8)
    values = {name: random.integers(-1, 2, (2, m, depth)) for name in "qkv"}
    return program, values | {"o": np.full((2, m, depth), np.nan)}


def attended(values):
    """What it must give."""
    q, k, v = (np.asarray(values[name], np.float64) for name in "qkv")
    scores = np.tril(q @ k.transpose(0, 2, 1))
    return scores @ v
