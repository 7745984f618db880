"""Two products of one loaded tile: its slot may be read stages apart."""

import numpy as np

from warploom import tile as t


def _body(x, g, u, y):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    rows, cols = t.span(i * 64, 64), t.span(0, 32)
    gate, up = t.zeros(m=64, n=32), t.zeros(m=64, n=32)
    for k in t.loop(t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        left = t.load(x, rows, part)
        gate += left @ t.load(g, part, cols)
        up += left @ t.load(u, part, cols)
    t.store(y, rows, cols, tile=gate * up)


def shared_case(m=100, k=72):
    """(program, arrays)."""
    dims = {"x": "m k", "g": "k n", "u": "k n"}
    arrays = {name: t.array(t.BF16, text) for name, text in dims.items()}
    program = t.trace(_body, arrays | {"y": t.array(t.FP32, "m n")}, name="shared_operand")
    random = np.random.default_rng(6)
    sizes = {"m": m, "k": k, "n": 32}
    values = {
        name: random.integers(-4, 5, [sizes[d] for d in text.split()]) / 4
        for name, text in dims.items()
    }
    return program, values | {"y": np.zeros((m, 32))}
