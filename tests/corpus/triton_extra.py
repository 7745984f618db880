"""Triton kernels that only the corpus needs: TMA descriptors made on the device, scans, atomics."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from warploom.integrations.triton_capture import (
    CapturedKernel,
    ScalarArgument,
    TensorArgument,
    capture,
)


@triton.jit
def tma_gemm_kernel(a_ptr, b_ptr, c_ptr, m, n, k, block: tl.constexpr, block_k: tl.constexpr):
    """Persistent GEMM through TMA descriptors, which live in Triton's hidden global scratch."""
    a_map = tl.make_tensor_descriptor(a_ptr, [m, k], [k, 1], [block, block_k])
    b_map = tl.make_tensor_descriptor(b_ptr, [n, k], [k, 1], [block, block_k])
    c_map = tl.make_tensor_descriptor(c_ptr, [m, n], [n, 1], [block, block])
    tiles_n = tl.cdiv(n, block)
    tiles = tl.cdiv(m, block) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row = (tile // tiles_n) * block
        col = (tile % tiles_n) * block
        acc = tl.zeros((block, block), dtype=tl.float32)
        for step in range(tl.cdiv(k, block_k)):
            a = a_map.load([row, step * block_k])
            b = b_map.load([col, step * block_k])
            acc = tl.dot(a, b.T, acc)
        c_map.store([row, col], acc.to(tl.float16))


@triton.jit
def scan_kernel(x_ptr, y_ptr, total_ptr, bins_ptr, n, block: tl.constexpr):
    """Prefix sums, a sort, an argmax and atomics over one block of a vector."""
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + lanes, mask=lanes < n, other=0.0)
    prefix = tl.cumsum(x, 0)
    ordered = tl.sort(x)
    tl.store(y_ptr + lanes, prefix + ordered * tl.argmax(x, 0), mask=lanes < n)
    tl.atomic_add(total_ptr, tl.sum(x, 0))
    tl.atomic_max(bins_ptr + (lanes & 15), x.to(tl.int32), mask=lanes < n)


def tma_gemm(arch: int) -> CapturedKernel:
    """`tma_gemm_kernel` on 2048-cubes with one block an SM (132)."""
    size = (2048, 2048)
    return capture(
        tma_gemm_kernel,
        {
            "a_ptr": TensorArgument("fp16", size),
            "b_ptr": TensorArgument("fp16", size),
            "c_ptr": TensorArgument("fp16", size, "out"),
            **{name: ScalarArgument("i32", 2048) for name in "mnk"},
        },
        constexprs={"block": 128, "block_k": 64},
        grid=(132, 1, 1),
        num_warps=8,
        arch=arch,
    )


def scan(arch: int) -> CapturedKernel:
    """`scan_kernel` on 2^20 elements in blocks of 1024."""
    count = 1 << 20
    return capture(
        scan_kernel,
        {
            "x_ptr": TensorArgument("fp32", (count,)),
            "y_ptr": TensorArgument("fp32", (count,), "out"),
            "total_ptr": TensorArgument("fp32", (1,), "inout"),
            "bins_ptr": TensorArgument("i32", (16,), "inout"),
            "n": ScalarArgument("i32", count),
        },
        constexprs={"block": 1024},
        grid=(count // 1024, 1, 1),
        arch=arch,
    )


# (name, builder, compute capabilities)
EXTRA: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
    ("tma_gemm", tma_gemm, (90, 100)),
    ("scan", scan, (80, 90)),
)
