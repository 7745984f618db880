"""Skinny GEMM (decoding): c[m, n] = x[m, k] @ weight[n, k]^T with few rows m, fp16, fp32 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles


@triton.jit
def skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    c_ptr,
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """block_n columns of c, all rows at once (block_m >= m): the weights stream by once."""
    rows = tl.arange(0, block_m)
    cols = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    x_ptrs = x_ptr + (rows % m)[:, None] * k + inner[None, :]
    weight_ptrs = weight_ptr + (cols % n)[None, :] * k + inner[:, None]
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, block_k)):
        left = k - step * block_k
        x = tl.load(x_ptrs, mask=inner[None, :] < left, other=0.0)
        weight = tl.load(weight_ptrs, mask=inner[:, None] < left, other=0.0)
        acc = tl.dot(x, weight, acc)
        x_ptrs += block_k
        weight_ptrs += block_k
    c_ptrs = c_ptr + rows[:, None] * n + cols[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=(rows[:, None] < m) & (cols[None, :] < n))


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """x, weight, c, then the three sizes."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    return (
        Tensor("x", "fp16", (m, k)),
        Tensor("weight", "fp16", (n, k), scale=k**-0.5),
        Tensor("c", "fp16", (m, n), "out"),
        Scalar("m", "i32", m),
        Scalar("n", "i32", n),
        Scalar("k", "i32", k),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block for block_n columns."""
    return (ceil_div(shape["n"], config.constexprs["block_n"]), 1, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 product."""
    return {"c": inputs["x"].double() @ inputs["weight"].double().T}


KERNEL = SuiteKernel(
    name="skinny_gemm",
    function=skinny_gemm_kernel,
    configs=tiles(
        ("block_n", "block_k"),
        (
            (32, 256, 4, 4),
            (32, 128, 4, 5),
            (32, 256, 4, 3),
            (32, 512, 4, 3),
            (64, 128, 4, 5),
            (64, 256, 4, 4),
            (16, 256, 4, 5),
        ),
    ),
    constants={"block_m": 16},
    shape={"m": 16, "n": 8192, "k": 8192},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 2 * shape["m"] * shape["n"] * shape["k"],
)
