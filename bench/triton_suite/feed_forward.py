"""Fused feed-forward: c[m, n] = silu(x[m, k] @ gate[k, n]) * (x @ up[k, n]), fp16, fp32 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles


@triton.jit
def feed_forward_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    c_ptr,
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """One block_m x block_n tile of c: two products share the tiles of x."""
    rows = tl.program_id(1) * block_m + tl.arange(0, block_m)
    cols = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    x_ptrs = x_ptr + (rows % m)[:, None] * k + inner[None, :]
    gate_ptrs = gate_ptr + inner[:, None] * n + (cols % n)[None, :]
    up_ptrs = up_ptr + inner[:, None] * n + (cols % n)[None, :]
    gate_acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    up_acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, block_k)):
        left = k - step * block_k
        x = tl.load(x_ptrs, mask=inner[None, :] < left, other=0.0)
        gate = tl.load(gate_ptrs, mask=inner[:, None] < left, other=0.0)
        gate_acc = tl.dot(x, gate, gate_acc)
        up = tl.load(up_ptrs, mask=inner[:, None] < left, other=0.0)
        up_acc = tl.dot(x, up, up_acc)
        x_ptrs += block_k
        gate_ptrs += block_k * n
        up_ptrs += block_k * n
    result = gate_acc * tl.sigmoid(gate_acc) * up_acc
    c_ptrs = c_ptr + rows[:, None] * n + cols[None, :]
    tl.store(c_ptrs, result.to(tl.float16), mask=(rows[:, None] < m) & (cols[None, :] < n))


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """x, the two weights, c, then the three sizes."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    return (
        Tensor("x", "fp16", (m, k)),
        Tensor("gate", "fp16", (k, n), scale=k**-0.5),
        Tensor("up", "fp16", (k, n), scale=k**-0.5),
        Tensor("c", "fp16", (m, n), "out"),
        Scalar("m", "i32", m),
        Scalar("n", "i32", n),
        Scalar("k", "i32", k),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block a tile of c."""
    tiles_m = ceil_div(shape["m"], config.constexprs["block_m"])
    return (ceil_div(shape["n"], config.constexprs["block_n"]), tiles_m, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 products and gate."""
    x = inputs["x"].double()
    gate = x @ inputs["gate"].double()
    return {"c": gate * gate.sigmoid() * (x @ inputs["up"].double())}


KERNEL = SuiteKernel(
    name="feed_forward",
    function=feed_forward_kernel,
    configs=tiles(
        ("block_m", "block_n", "block_k"),
        (
            (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
            (128, 128, 32, 8, 4),
            (128, 64, 64, 4, 4),
            (64, 128, 64, 4, 4),
            (128, 256, 32, 8, 3),
        ),
    ),
    shape={"m": 2048, "n": 2048, "k": 2048},
    arguments=arguments,
    grid=grid,
    reference=reference,
    exponentials=lambda shape: shape["m"] * shape["n"],
    flops=lambda shape: 4 * shape["m"] * shape["n"] * shape["k"],
)
