"""GEMM + LeakyReLU: c[m, n] = leaky_relu(a[m, k] @ b[k, n]), fp16 in and out, fp32 accumulate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles

SLOPE = 0.01


@triton.jit
def gemm_leaky_relu_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    """One block_m x block_n tile of c; tiles are visited in groups of group_m rows for L2."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(m, block_m)
    tiles_n = tl.cdiv(n, block_n)
    group_tiles = group_m * tiles_n
    first_m = (pid // group_tiles) * group_m
    group_rows = min(tiles_m - first_m, group_m)
    tile_m = first_m + (pid % group_tiles) % group_rows
    tile_n = (pid % group_tiles) // group_rows
    rows = (tile_m * block_m + tl.arange(0, block_m)) % m
    cols = (tile_n * block_n + tl.arange(0, block_n)) % n
    inner = tl.arange(0, block_k)
    a_ptrs = a_ptr + rows[:, None] * k + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] * n + cols[None, :]
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, block_k)):
        left = k - step * block_k
        a = tl.load(a_ptrs, mask=inner[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=inner[:, None] < left, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += block_k
        b_ptrs += block_k * n
    acc = tl.where(acc >= 0, acc, 0.01 * acc)
    out_rows = tile_m * block_m + tl.arange(0, block_m)
    out_cols = tile_n * block_n + tl.arange(0, block_n)
    c_ptrs = c_ptr + out_rows[:, None] * n + out_cols[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=(out_rows[:, None] < m) & (out_cols[None, :] < n))


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """a, b, c, then the three sizes."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    return (
        Tensor("a", "fp16", (m, k)),
        Tensor("b", "fp16", (k, n), scale=k**-0.5),
        Tensor("c", "fp16", (m, n), "out"),
        Scalar("m", "i32", m),
        Scalar("n", "i32", n),
        Scalar("k", "i32", k),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block a tile of c."""
    tiles_m = ceil_div(shape["m"], config.constexprs["block_m"])
    return (tiles_m * ceil_div(shape["n"], config.constexprs["block_n"]), 1, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 product, then the leaky rectifier."""
    product = inputs["a"].double() @ inputs["b"].double()
    return {"c": product.where(product >= 0, SLOPE * product)}


KERNEL = SuiteKernel(
    name="gemm_leaky_relu",
    function=gemm_leaky_relu_kernel,
    configs=tiles(
        ("block_m", "block_n", "block_k"),
        (
            (128, 256, 64, 8, 3),
            (128, 256, 64, 8, 4),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 4, 4),
            (128, 128, 32, 4, 5),
            (64, 256, 64, 4, 4),
            (256, 128, 64, 8, 3),
        ),
        group_m=8,
    ),
    shape={"m": 2048, "n": 2048, "k": 2048},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 2 * shape["m"] * shape["n"] * shape["k"],
)
