"""y = rmsnorm(x) w: a row's scale is known when its last column was seen, so the matmul goes first.

warploom optimize examples/programs/rmsnorm_linear.py:kernel --set m=8192 --set n=4096 --set k=4096
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def program(tile_m: int = t.tunable(128, 256), tile_n: int = t.tunable(256, 128, 192)):
    """x: [m, k], w: [k, n] and y: [m, n] in bf16; sums in fp32."""

    def rmsnorm_linear(x, w, y):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        product, squares = t.zeros(m=tile_m, n=tile_n), t.zeros(m=tile_m)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            left = t.load(x, rows, part)
            product += left @ t.load(w, part, cols)
            wide = left.cast(t.FP32)
            squares += t.sum_along(wide * wide, "k")
        scale = t.rsqrt(squares / t.number(t.size("k")) + 1e-6)
        t.store(y, rows, cols, tile=(product * scale).cast(t.BF16))

    dims = {"x": "m k", "w": "k n", "y": "m n"}
    return t.trace(rmsnorm_linear, {name: t.array(t.BF16, text) for name, text in dims.items()})


def reference(arrays):
    """The formula in float64."""
    x, w = (np.asarray(arrays[name], np.float64) for name in "xw")
    return {"y": x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) @ w}


kernel = UserKernel(program, reference, sizes={"m": 200, "n": 264, "k": 136})
