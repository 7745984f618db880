"""c = a b as a textbook has it: sizes of the tile are open, nothing else is said.

warploom optimize examples/textbook_gemm.py:kernel --effort quick -o out/textbook
"""

from warploom.kernels import UserKernel
from warploom.tile import (
    BF16,
    array,
    cdiv,
    grid,
    load,
    loop,
    size,
    span,
    store,
    trace,
    tunable,
    zeros,
)


def gemm(
    tile_m: int = tunable(128, 256, 192, 64, range(136, 192, 8), 200),
    tile_n: int = tunable(256, 128, 192, 64, 176, 200),
):
    """c = a b in bf16, summed in fp32."""

    def body(a, b, c):
        i, j = grid(m=cdiv(size("m"), tile_m), n=cdiv(size("n"), tile_n))
        rows, cols = span(i * tile_m, tile_m), span(j * tile_n, tile_n)
        total = zeros(m=tile_m, n=tile_n)
        for step in loop(cdiv(size("k"), 64)):
            total += load(a, rows, span(step * 64, 64)) @ load(b, span(step * 64, 64), cols)
        store(c, rows, cols, tile=total.cast(BF16))

    names = {"a": "m k", "b": "k n", "c": "m n"}
    arrays = {name: array(BF16, dims) for name, dims in names.items()}
    return trace(body, arrays, name="textbook_gemm")


kernel = UserKernel(gemm)
