"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight by rows, fp16, fp32 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles

EPSILON = 1e-6


@triton.jit
def rmsnorm_kernel(
    x_ptr, weight_ptr, y_ptr, rows, cols, epsilon, block: tl.constexpr, block_rows: tl.constexpr
):
    """block_rows whole rows a block; block >= cols is the padded row length."""
    lanes = tl.arange(0, block)
    inside = lanes < cols
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * block_rows
    for row in range(first, min(first + block_rows, rows)):
        x = tl.load(x_ptr + row * cols + lanes, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / cols + epsilon)
        tl.store(y_ptr + row * cols + lanes, (x * inverse * weight).to(tl.float16), mask=inside)


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """x, weight, y, the two sizes and epsilon."""
    rows, cols = shape["rows"], shape["cols"]
    return (
        Tensor("x", "fp16", (rows, cols)),
        Tensor("weight", "fp16", (cols,)),
        Tensor("y", "fp16", (rows, cols), "out"),
        Scalar("rows", "i32", rows),
        Scalar("cols", "i32", cols),
        Scalar("epsilon", "fp32", EPSILON),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block for block_rows rows."""
    return (ceil_div(shape["rows"], config.constexprs["block_rows"]), 1, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 root mean square by rows."""
    x = inputs["x"].double()
    inverse = ((x * x).mean(-1, keepdim=True) + EPSILON).rsqrt()
    return {"y": x * inverse * inputs["weight"].double()}


KERNEL = SuiteKernel(
    name="rmsnorm",
    function=rmsnorm_kernel,
    configs=tiles(
        ("block_rows",),
        ((1, 4, 1), (1, 8, 1), (1, 16, 1), (2, 8, 2), (4, 8, 3), (8, 8, 3)),
        block=4096,
    ),
    shape={"rows": 8192, "cols": 4096},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 4 * shape["rows"] * shape["cols"],
    unit="lanes",
)
