"""c = a b as a textbook has it: sizes of the tile are open, nothing else is said.

warploom optimize examples/textbook_gemm.py:kernel --effort quick -o out/textbook
"""

from warploom import tile as t
from warploom.kernels import UserKernel


def gemm(
    tile_m: int = t.tunable(128, 256, 192, 64, range(136, 192, 8), 200),
    tile_n: int = t.tunable(256, 128, 192, 64, 176, 200),
):
    """c = a b in bf16, summed in fp32."""

    def body(a, b, c):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        total = t.zeros(m=tile_m, n=tile_n)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            total += t.load(a, rows, t.span(step * 64, 64)) @ t.load(b, t.span(step * 64, 64), cols)
        t.store(c, rows, cols, tile=total.cast(t.BF16))

    names = {"a": "m k", "b": "k n", "c": "m n"}
    arrays = {name: t.array(t.BF16, dims) for name, dims in names.items()}
    return t.trace(body, arrays, name="textbook_gemm")


kernel = UserKernel(gemm)
