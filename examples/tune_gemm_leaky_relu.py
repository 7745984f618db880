"""GEMM + LeakyReLU in Triton, ready for `warploom tune examples/tune_gemm_leaky_relu.py:kernel`.

    c[m, n] = leaky_relu(a[m, k] @ b[k, n]), fp16 in and out, fp32 accumulation

`kernel` compiles it offline for one shape and configuration; no GPU and no torch are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.integrations.triton import CapturedKernel, ScalarArgument, TensorArgument, capture

M, N, K = 2048, 2048, 1024
BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64


@triton.jit
def gemm_leaky_relu(
    a_ptr, b_ptr, c_ptr, m, n, k, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr
):
    """One bm x bn tile of c per program."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(n, bn)
    rows = (pid // tiles_n) * bm + tl.arange(0, bm)
    cols = (pid % tiles_n) * bn + tl.arange(0, bn)
    inner = tl.arange(0, bk)
    a_ptrs = a_ptr + rows[:, None] * k + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] * n + cols[None, :]
    acc = tl.zeros((bm, bn), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, bk)):
        left = k - step * bk
        a = tl.load(a_ptrs, mask=(rows[:, None] < m) & (inner[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < left) & (cols[None, :] < n), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += bk
        b_ptrs += bk * n
    acc = tl.where(acc >= 0, acc, 0.01 * acc)
    c_ptrs = c_ptr + rows[:, None] * n + cols[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=(rows[:, None] < m) & (cols[None, :] < n))


def kernel(arch: int = 90) -> CapturedKernel:
    """The kernel compiled for an architecture (90: Hopper, 80: Ampere), with its launch."""
    return capture(
        gemm_leaky_relu,
        {
            "a_ptr": TensorArgument("fp16", (M, K)),
            "b_ptr": TensorArgument("fp16", (K, N)),
            "c_ptr": TensorArgument("fp16", (M, N), "out"),
            "m": ScalarArgument("i32", M),
            "n": ScalarArgument("i32", N),
            "k": ScalarArgument("i32", K),
        },
        constexprs={"bm": BLOCK_M, "bn": BLOCK_N, "bk": BLOCK_K},
        grid=(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), 1, 1),
        num_warps=8,
        num_stages=3,
        arch=arch,
    )
