"""A grouped product in Triton, for `bench.gemm_serving`: TMA descriptors, a list of tasks, several
tiles of which the fastest stands. With block scales every 128 of k are summed by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# (rows, columns, k) of a tile, warps, stages
TILES = (
    ((128, 256, 64), 8, 3),
    ((128, 256, 64), 8, 4),
    ((256, 128, 64), 8, 3),
    ((128, 128, 64), 8, 4),
    ((128, 128, 64), 4, 3),
    ((64, 256, 64), 4, 4),
    ((64, 128, 64), 4, 4),
    ((64, 128, 128), 4, 4),
)
BAND = 8  # rows of tasks that run at a time
BLOCK = 128  # elements of a row of a, and of rows and columns of b, that share a scale


@triton.jit
def _grouped(a, b, c_data, tasks, n, k, tiles, bm: tl.constexpr, bn: tl.constexpr,
             bk: tl.constexpr, band: tl.constexpr, scale_a, scale_b, pitch,
             of_rows: tl.constexpr, block: tl.constexpr):  # fmt: skip
    across = tl.cdiv(n, bn)
    task = tl.program_id(0)
    first = task // (band * across) * band
    high = tl.minimum(tiles - first, band)
    inside = task % (band * across)
    row, col = first + inside % high, inside // high
    expert = tl.load(tasks + row * 3)
    begin = tl.load(tasks + row * 3 + 1)
    end = tl.load(tasks + row * 3 + 2)
    if begin < end:
        acc = tl.zeros((bm, bn), tl.float32)
        rows = begin + tl.arange(0, bm)
        cols = col * bn + tl.arange(0, bn)
        if block:  # scale_a: [k / block, m], scale_b: [experts, n / block, k / block]
            at_b = scale_b + (expert * tl.cdiv(n, block) + cols // block) * tl.cdiv(k, block)
        for i in range(0, k, bk):
            left = a.load([begin, i])
            right = b.load([expert * n + col * bn, i])
            if block:
                of_a = tl.load(scale_a + i // block * pitch + rows, rows < end, 0.0)
                of_b = tl.load(at_b + i // block, cols < n, 0.0)
                acc += tl.dot(left, right.T) * of_a[:, None] * of_b[None]
            else:
                acc = tl.dot(left, right.T, acc)
        if of_rows:
            of_a = tl.load(scale_a + rows, rows < end, 0.0)
            of_b = tl.load(scale_b + expert * n + cols, cols < n, 0.0)
            acc = acc * of_a[:, None] * of_b[None]
        where = rows.to(tl.int64)[:, None] * n + cols[None]
        tl.store(c_data + where, acc.to(tl.bfloat16), (rows[:, None] < end) & (cols[None] < n))


def candidates(
    torch: Any, a: Any, b: Any, out: Any, lists: Callable[[int], Any], scales: Any = ()
) -> dict[str, Callable[[], Any]]:
    """Calls by the name of the tile: `a: [m, k]`, `b: [experts, n, k]`; `lists` gives the tasks for
    tiles of so many rows, which are made ahead of the calls. `scales` of fp8: one a row of a, one a
    column of each expert's b; or one for each `BLOCK` of a row, the rows of a block next to each
    other, and of rows and columns of b."""
    experts, n, k = b.shape
    block = BLOCK if scales and scales[0].dim() > 1 else 0
    pitch = scales[0].stride(1) if block else 0
    flat = b.view(experts * n, k)
    found: dict[str, Callable[[], Any]] = {}
    for (bm, bn, deep), warps, stages in TILES:
        tasks, bk = lists(bm), deep * 2 // a.dtype.itemsize
        if block and bk > block:
            continue
        left = TensorDescriptor.from_tensor(a, [bm, bk])
        right = TensorDescriptor.from_tensor(flat, [bn, bk])
        blocks = tasks.shape[0] * triton.cdiv(n, bn)

        def call(
            tasks: Any = tasks, left: Any = left, right: Any = right, blocks: int = blocks,
            tile: tuple[int, int, int] = (bm, bn, bk), warps: int = warps, stages: int = stages,
        ) -> Any:  # fmt: skip
            _grouped[(blocks,)](
                left, right, out, tasks, n, k, tasks.shape[0], *tile, BAND, *(scales or (a, b)),
                pitch, bool(scales) and not block, block,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return out

        found[f"Triton {bm}x{bn}x{bk}_w{warps}_s{stages}"] = call
    return found
