"""y = silu(x g) * (x u): both products of a gated feed-forward layer in one pass over x.

warploom optimize examples/programs/swiglu.py:kernel --set m=8192 --set n=14336 --set k=4096
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def program(tile_m: int = t.tunable(128, 256), tile_n: int = t.tunable(128, 96, 64)):
    """x: [m, k], g and u: [k, n], y: [m, n] in bf16; sums in fp32."""

    def swiglu(x, g, u, y):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        gate, up = t.zeros(m=tile_m, n=tile_n), t.zeros(m=tile_m, n=tile_n)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            left = t.load(x, rows, part)
            gate += left @ t.load(g, part, cols)
            up += left @ t.load(u, part, cols)
        t.store(y, rows, cols, tile=(t.silu(gate) * up).cast(t.BF16))

    dims = {"x": "m k", "g": "k n", "u": "k n", "y": "m n"}
    return t.trace(swiglu, {name: t.array(t.BF16, text) for name, text in dims.items()})


def reference(arrays):
    """The formula in float64."""
    x, g, u = (np.asarray(arrays[name], np.float64) for name in "xgu")
    gate = x @ g
    return {"y": gate / (1 + np.exp(-gate)) * (x @ u)}


kernel = UserKernel(program, reference, sizes={"m": 200, "n": 264, "k": 136})
