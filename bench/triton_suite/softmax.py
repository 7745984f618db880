"""Row softmax: y[rows, cols] = softmax(x) over the last axis, fp16 in and out, fp32 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles


@triton.jit
def softmax_kernel(x_ptr, y_ptr, rows, cols, block: tl.constexpr, block_rows: tl.constexpr):
    """block_rows whole rows a block; block >= cols is the padded row length."""
    lanes = tl.arange(0, block)
    inside = lanes < cols
    first = tl.program_id(0) * block_rows
    for row in range(first, min(first + block_rows, rows)):
        x = tl.load(x_ptr + row * cols + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, 0))
        y = numerator / tl.sum(numerator, 0)
        tl.store(y_ptr + row * cols + lanes, y.to(tl.float16), mask=inside)


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """x, y and the two sizes."""
    size = (shape["rows"], shape["cols"])
    return (
        Tensor("x", "fp16", size),
        Tensor("y", "fp16", size, "out"),
        Scalar("rows", "i32", shape["rows"]),
        Scalar("cols", "i32", shape["cols"]),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block for block_rows rows."""
    return (ceil_div(shape["rows"], config.constexprs["block_rows"]), 1, 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 softmax."""
    return {"y": inputs["x"].double().softmax(-1)}


KERNEL = SuiteKernel(
    name="softmax",
    function=softmax_kernel,
    configs=tiles(
        ("block_rows",),
        ((1, 4, 1), (1, 8, 1), (1, 16, 1), (2, 8, 2), (4, 4, 3), (4, 8, 3)),
        block=4096,
    ),
    shape={"rows": 8192, "cols": 4096},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: 5 * shape["rows"] * shape["cols"],
    unit="lanes",
    exponentials=lambda shape: shape["rows"] * shape["cols"],
)
