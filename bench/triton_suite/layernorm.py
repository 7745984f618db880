"""Layer normalisation by rows: y = (x - mean) / sqrt(var + eps) * weight + bias, fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles

EPSILON = 1e-5


@triton.jit
def layernorm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols,
    epsilon,
    block: tl.constexpr,
    block_rows: tl.constexpr,
):
    """block_rows whole rows a block; block >= cols is the padded row length."""
    lanes = tl.arange(0, block)
    inside = lanes < cols
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * block_rows
    for row in range(first, min(first + block_rows, rows)):
        x = tl.load(x_ptr + row * cols + lanes, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / cols
        centred = tl.where(inside, x - mean, 0.0)
        variance = tl.sum(centred * centred, 0) / cols
        y = centred * tl.rsqrt(variance + epsilon) * weight + bias
        tl.store(y_ptr + row * cols + lanes, y.to(tl.float16), mask=inside)


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """x, weight, bias, y, the two sizes and epsilon."""
    rows, cols = shape["rows"], shape["cols"]
    return (
        Tensor("x", "fp16", (rows, cols)),
        Tensor("weight", "fp16", (cols,)),
        Tensor("bias", "fp16", (cols,)),
        Tensor("y", "fp16", (rows, cols), "out"),
        Scalar("rows", "i32", rows),
        Scalar("cols", "i32", cols),
        Scalar("epsilon", "fp32", EPSILON),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block for block_rows rows."""
    return (ceil_div(shape["rows"], config.constexprs["block_rows"]), 1, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 statistics by rows."""
    x, weight, bias = (inputs[name].double() for name in ("x", "weight", "bias"))
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return {"y": centred / (variance + EPSILON).sqrt() * weight + bias}


KERNEL = SuiteKernel(
    name="layernorm",
    function=layernorm_kernel,
    configs=tiles(
        ("block_rows",),
        ((1, 4, 1), (1, 8, 1), (1, 16, 1), (2, 8, 2), (4, 8, 3), (8, 8, 3)),
        block=4096,
    ),
    shape={"rows": 8192, "cols": 4096},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 8 * shape["rows"] * shape["cols"],
    unit="lanes",
)
