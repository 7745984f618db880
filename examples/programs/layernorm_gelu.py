"""y = gelu(layernorm(x) w + bias), with the sums over rows made beside the matmul.

layernorm(x) w = (x w - mean * sums) / deviation, where `sums` are those of w's columns. The norm's
own factors are in w and its offsets in bias: all three are made once, when weights are loaded.

warploom optimize examples/programs/layernorm_gelu.py:kernel --set m=8192 --set n=4096 --set k=1024
"""

import math

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def program(tile_m: int = t.tunable(128, 256), tile_n: int = t.tunable(256, 128, 192)):
    """x: [m, k], w: [k, n], y: [m, n] in bf16; sums, bias: [n] in fp32."""

    def layernorm_gelu(x, w, sums, bias, y):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        product = t.zeros(m=tile_m, n=tile_n)
        total, squares = t.zeros(m=tile_m), t.zeros(m=tile_m)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            left = t.load(x, rows, part)
            product += left @ t.load(w, part, cols)
            wide = left.cast(t.FP32)
            total += t.sum_along(wide, "k")
            squares += t.sum_along(wide * wide, "k")
        count = t.number(t.size("k"))
        mean = total / count
        scale = t.rsqrt(squares / count - mean * mean + 1e-5)
        normal = (product - mean * t.load(sums, cols)) * scale + t.load(bias, cols)
        t.store(y, rows, cols, tile=t.gelu(normal).cast(t.BF16))

    dims = {"x": "m k", "w": "k n", "y": "m n"}
    arrays = {name: t.array(t.BF16, text) for name, text in dims.items()}
    vectors = {name: t.array(t.FP32, "n") for name in ("sums", "bias")}
    return t.trace(layernorm_gelu, {**arrays, **vectors})


def reference(arrays):
    """The formula in float64."""
    x, w, bias = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "bias"))
    x = x - x.mean(1, keepdims=True)
    y = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) @ w + bias
    return {"y": y * 0.5 * (1 + np.vectorize(math.erf)(y * math.sqrt(0.5)))}


def inputs(sizes, random):
    """Weights with the sums of their columns."""
    w = t.round_to(t.BF16, random.normal(size=(sizes["k"], sizes["n"])).astype(np.float32))
    return {"w": w, "sums": w.sum(0, dtype=np.float64)}


kernel = UserKernel(program, reference, sizes={"m": 200, "n": 264, "k": 136}, inputs=inputs)
