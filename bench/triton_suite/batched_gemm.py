"""Batched GEMM: c[batch, m, n] = a[batch, m, k] @ b[batch, k, n], fp16, fp32 accumulate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles


@triton.jit
def batched_gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """One block_m x block_n tile of one batch; grid = (tiles of n, tiles of m, batch)."""
    batch = tl.program_id(2)
    rows = tl.program_id(1) * block_m + tl.arange(0, block_m)
    cols = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    a_ptrs = a_ptr + batch * m * k + (rows % m)[:, None] * k + inner[None, :]
    b_ptrs = b_ptr + batch * k * n + inner[:, None] * n + (cols % n)[None, :]
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, block_k)):
        left = k - step * block_k
        a = tl.load(a_ptrs, mask=inner[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=inner[:, None] < left, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += block_k
        b_ptrs += block_k * n
    c_ptrs = c_ptr + batch * m * n + rows[:, None] * n + cols[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=(rows[:, None] < m) & (cols[None, :] < n))


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """a, b, c, then the three sizes of one matrix."""
    batch, m, n, k = shape["batch"], shape["m"], shape["n"], shape["k"]
    return (
        Tensor("a", "fp16", (batch, m, k)),
        Tensor("b", "fp16", (batch, k, n), scale=k**-0.5),
        Tensor("c", "fp16", (batch, m, n), "out"),
        Scalar("m", "i32", m),
        Scalar("n", "i32", n),
        Scalar("k", "i32", k),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block a tile of one batch."""
    tiles_m = ceil_div(shape["m"], config.constexprs["block_m"])
    return (ceil_div(shape["n"], config.constexprs["block_n"]), tiles_m, shape["batch"])


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 product."""
    return {"c": inputs["a"].double() @ inputs["b"].double()}


KERNEL = SuiteKernel(
    name="batched_gemm",
    function=batched_gemm_kernel,
    configs=tiles(
        ("block_m", "block_n", "block_k"),
        (
            (128, 256, 64, 8, 3),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 4, 4),
            (128, 128, 32, 4, 4),
            (64, 256, 64, 4, 3),
            (64, 128, 64, 4, 4),
        ),
    ),
    shape={"batch": 16, "m": 1024, "n": 1024, "k": 1024},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 2 * shape["batch"] * shape["m"] * shape["n"] * shape["k"],
)
