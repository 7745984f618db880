"""Your own kernel on the command line: y = rmsnorm(x) w, normalised while the matmul runs.

warploom run   examples/tile_rmsnorm_linear.py:kernel            # interpreter, numpy
warploom build examples/tile_rmsnorm_linear.py:kernel -o out/rmsnorm --set tile_n=256
warploom optimize examples/tile_rmsnorm_linear.py:kernel -o out/rmsnorm # solved, with proof
warploom run   examples/tile_rmsnorm_linear.py:kernel --on gpu
"""

from collections.abc import Mapping

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def rmsnorm_linear(tile_m: int = 128, tile_n: int = 128, step: int = 64) -> t.Program:
    """The program for these tiles; the scale of a row is known when its last column was seen."""

    def body(x: t.Array, w: t.Array, y: t.Array) -> None:
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        product = t.zeros(m=tile_m, n=tile_n)
        squares = t.zeros(m=tile_m)
        for k in t.loop(t.cdiv(t.size("k"), step)):
            part = t.span(k * step, step)
            left, right = t.load(x, rows, part), t.load(w, part, cols)
            product += left @ right
            wide = t.load(x, rows, part).cast(t.FP32)  # in registers: `left` is in shared memory
            squares += t.sum_along(wide * wide, "k")
        scale = t.rsqrt(squares / t.number(t.size("k")) + 1e-6)
        t.store(y, rows, cols, tile=(product * scale).cast(t.BF16))

    arrays = {"x": t.array(t.BF16, "m k"), "w": t.array(t.BF16, "k n"), "y": t.array(t.BF16, "m n")}
    return t.trace(body, arrays, name="rmsnorm_linear")


def reference(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in numpy, from the arrays as the kernel sees them."""
    x, w = arrays["x"].astype(np.float64), arrays["w"].astype(np.float64)
    return {"y": x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) @ w}


kernel = UserKernel(rmsnorm_linear, reference, sizes={"m": 200, "n": 264, "k": 136})
