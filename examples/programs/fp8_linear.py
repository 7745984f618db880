"""y = (x w^T) * x's scales * w's scales: 8-bit activations with a scale a token, weights a channel.

warploom optimize examples/programs/fp8_linear.py:kernel --set m=8192 --set n=4096 --set k=4096
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def program(
    tile_m: int = t.tunable(128, 256, 192, range(136, 192, 8), 200),
    tile_n: int = t.tunable(256, 128, 192),
):
    """x: [m, k], w: [n, k] in e4m3; scale_x: [m], scale_w: [n] in fp32; y: [m, n] in bf16."""

    def fp8_linear(x, w, scale_x, scale_w, y):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        total = t.zeros(m=tile_m, n=tile_n)
        for step in t.loop(t.cdiv(t.size("k"), 128)):
            part = t.span(step * 128, 128)
            total += t.load(x, rows, part) @ t.load(w, cols, part)
        scaled = total * t.load(scale_x, rows) * t.load(scale_w, cols)
        t.store(y, rows, cols, tile=scaled.cast(t.BF16))

    arrays = {"x": t.array(t.E4M3, "m k"), "w": t.array(t.E4M3, "n k")}
    arrays |= {"scale_x": t.array(t.FP32, "m"), "scale_w": t.array(t.FP32, "n")}
    return t.trace(fp8_linear, {**arrays, "y": t.array(t.BF16, "m n")})


def reference(arrays):
    """The formula in float64."""
    x, w, of_x, of_w = (np.asarray(arrays[n], np.float64) for n in ("x", "w", "scale_x", "scale_w"))
    return {"y": x @ w.T * of_x[:, None] * of_w}


kernel = UserKernel(program, reference, sizes={"m": 200, "n": 264, "k": 144})
