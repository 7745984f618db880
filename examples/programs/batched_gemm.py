"""c[b] = a[b] b[b] for many small matrices.

warploom optimize examples/programs/batched_gemm.py:kernel --set batch=4096 --set m=128 \
    --set n=128 --set k=64
"""

import numpy as np

from warploom import tile as t
from warploom.kernels import UserKernel


def program(tile_m: int = t.tunable(128, 64), tile_n: int = t.tunable(128, 64, 256)):
    """a: [batch, m, k], b: [batch, k, n], c: [batch, m, n] in bf16; sums in fp32."""

    def batched_gemm(a, b, c):
        tiles = {"m": t.cdiv(t.size("m"), tile_m), "n": t.cdiv(t.size("n"), tile_n)}
        one, i, j = t.grid(batch=t.size("batch"), **tiles)
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        total = t.zeros(m=tile_m, n=tile_n)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            total += t.load(a, one, rows, part) @ t.load(b, one, part, cols)
        t.store(c, one, rows, cols, tile=total.cast(t.BF16))

    dims = {"a": "batch m k", "b": "batch k n", "c": "batch m n"}
    return t.trace(batched_gemm, {name: t.array(t.BF16, text) for name, text in dims.items()})


def reference(arrays):
    """The formula in float64."""
    return {"c": np.asarray(arrays["a"], np.float64) @ np.asarray(arrays["b"], np.float64)}


kernel = UserKernel(program, reference, sizes={"batch": 3, "m": 72, "n": 136, "k": 88})
