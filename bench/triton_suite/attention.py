"""Fused attention forward: softmax(q k^T / sqrt(d)) v over [batch * heads, rows, 64], fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from bench.triton_suite.common import Config, Grid, Scalar, Shape, SuiteKernel, Tensor, ceil_div
from bench.triton_suite.common import tile_configs as tiles


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    scale_log2,
    rows,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    head_dim: tl.constexpr,
):
    """block_m query rows of one head; keys and values stream by in blocks of block_n rows.

    `scale_log2` = log2(e) / sqrt(head_dim), so that the exponentials are powers of two. `rows`
    must be a multiple of block_m and block_n.
    """
    head_start = tl.program_id(1).to(tl.int64) * rows * head_dim
    query_rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    key_rows = tl.arange(0, block_n)
    lanes = tl.arange(0, head_dim)
    q = tl.load(q_ptr + head_start + query_rows[:, None] * head_dim + lanes[None, :])
    k_ptrs = k_ptr + head_start + key_rows[None, :] * head_dim + lanes[:, None]
    v_ptrs = v_ptr + head_start + key_rows[:, None] * head_dim + lanes[None, :]
    row_max = tl.full((block_m,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((block_m,), dtype=tl.float32)
    acc = tl.zeros((block_m, head_dim), dtype=tl.float32)
    for _ in range(0, rows, block_n):
        k = tl.load(k_ptrs)
        scores = tl.dot(q, k)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.math.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = tl.load(v_ptrs)
        acc = tl.dot(p.to(tl.float16), v, acc)
        row_max = new_max
        k_ptrs += block_n * head_dim
        v_ptrs += block_n * head_dim
    acc = acc / row_sum[:, None]
    o_ptrs = o_ptr + head_start + query_rows[:, None] * head_dim + lanes[None, :]
    tl.store(o_ptrs, acc.to(tl.float16))


def arguments(shape: Shape) -> tuple[Tensor | Scalar, ...]:
    """q, k, v, o, the scale and the number of rows."""
    size = (shape["batch"] * shape["heads"], shape["rows"], shape["head_dim"])
    return (
        Tensor("q", "fp16", size),
        Tensor("k", "fp16", size),
        Tensor("v", "fp16", size),
        Tensor("o", "fp16", size, "out"),
        Scalar("scale_log2", "fp32", 1.4426950408889634 * shape["head_dim"] ** -0.5),
        Scalar("rows", "i32", shape["rows"]),
    )


def grid(shape: Shape, config: Config) -> Grid:
    """One block for block_m rows of one head."""
    blocks = ceil_div(shape["rows"], config.constexprs["block_m"])
    return (blocks, shape["batch"] * shape["heads"], 1)


def reference(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """float64 softmax attention, one head at a time to bound the memory."""
    q, k, v = (inputs[name].double() for name in "qkv")
    out = q.new_empty(q.shape)
    for head in range(q.shape[0]):
        scores = (q[head] @ k[head].T) * q.shape[-1] ** -0.5
        out[head] = scores.softmax(-1) @ v[head]
    return {"o": out}


KERNEL = SuiteKernel(
    name="attention",
    function=attention_kernel,
    configs=tiles(
        ("block_m", "block_n"),
        (
            (128, 128, 8, 3),
            (128, 128, 8, 2),
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (128, 64, 4, 4),
            (64, 64, 4, 3),
            (64, 128, 4, 3),
        ),
    ),
    constants={"head_dim": 64},
    shape={"batch": 2, "heads": 16, "rows": 2048, "head_dim": 64},
    arguments=arguments,
    grid=grid,
    reference=reference,
    flops=lambda shape: (
        4 * shape["batch"] * shape["heads"] * shape["rows"] ** 2 * shape["head_dim"]
    ),
    exponentials=lambda shape: shape["batch"] * shape["heads"] * shape["rows"] ** 2,
    notes="non-causal",
)
