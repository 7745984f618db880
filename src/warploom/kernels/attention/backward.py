"""Attention backward: the gradients of q, k and v, one pass over the queries for a tile of keys.

With P = exp(scale q k^T - lse), dP = dO v^T, D = rowsum(dO o) and dS = P (dP - D):
dv = P^T dO, dk = scale dS^T q, dq = scale dS k (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Arrays: `q, do: [batch, heads, rows, d]`, `k, v, dk, dv: [batch, kv_heads, keys, d]`, and what the
preprocessing makes: `base, delta: [batch, heads, rows]`, lse in powers of 2 (inf for a row that
sees no key) and D. `dq_sum: [batch, heads, d, rows]` are the sums of dq over all tiles of keys,
transposed and without the scale; they must be zero before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from warploom.autosched.named import multistage
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.tile import (
    BF16,
    FP32,
    Array,
    DType,
    Program,
    array,
    cdiv,
    coordinate,
    exp2,
    grid,
    load,
    loop,
    maximum_index,
    size,
    span,
    store,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class BackwardConfig:
    """What is static: element type, head size, mask, query heads of a key head, scale (None: 1 /
    sqrt(head_dim)), and the (rows, keys) of a block of scores."""

    dtype: DType = BF16
    head_dim: int = 128
    causal: bool = False
    group: int = 1
    scale: float | None = None
    tile: tuple[int, int] = (64, 128)

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def arrays(self) -> dict[str, Array]:
        """The parameters of the program."""
        rows, keys, row = "batch heads rows d", "batch kv_heads keys d", "batch heads rows"
        found = {name: array(self.dtype, rows) for name in ("q", "do")}
        found |= {name: array(self.dtype, keys) for name in ("k", "v", "dk", "dv")}
        found |= {name: array(FP32, row) for name in ("base", "delta")}
        return {**found, "dq_sum": array(FP32, "batch heads d rows")}


def backward(config: BackwardConfig | None = None) -> Program:
    """The tile program of attention backward."""
    chosen = config or BackwardConfig()
    return trace(_backward, chosen.arrays, name="attention_backward", config=chosen)


def _backward(config: BackwardConfig, q: Array, do: Array, k: Array, v: Array, **rest: Array) -> None:
    (bq, bk), d = config.tile, span(0, config.head_dim)
    batch, kv_head, j = grid(
        batch=size("batch"), kv_heads=size("kv_heads"), keys=cdiv(size("keys"), bk)
    )
    keys = span(j * bk, bk)
    key_tile, value_tile = load(k, batch, kv_head, keys, d), load(v, batch, kv_head, keys, d)
    dk, dv = zeros(keys=bk, d=config.head_dim), zeros(keys=bk, d=config.head_dim)
    shift = size("keys") - size("rows")
    first = maximum_index(0, j * bk - shift) // bq if config.causal else 0
    blocks = cdiv(size("rows"), bq) - first
    for n in loop(blocks * config.group):
        head = kv_head * config.group + (n // blocks if config.group > 1 else 0)
        i = first + (n % blocks if config.group > 1 else n)
        rows = span(i * bq, bq)
        queries, grads = load(q, batch, head, rows, d), load(do, batch, head, rows, d)
        base = load(rest["base"], batch, head, rows, edge=math.inf)
        delta = load(rest["delta"], batch, head, rows)
        scores, grad = key_tile @ queries, value_tile @ grads
        weights = exp2(scores * (config.factor * LOG2E) - base)
        if config.causal:
            seen = coordinate("keys", bk, j * bk) <= coordinate("rows", bq, i * bq + shift)
            weights = where(seen, weights, 0.0)
        dv += weights.cast(config.dtype) @ grads
        change = (weights * (grad - delta)).cast(config.dtype)
        dq = key_tile @ change
        dk += change @ queries
        store(rest["dq_sum"], batch, head, d, rows, tile=dq, add=True)
    store(rest["dk"], batch, kv_head, keys, d, tile=(dk * config.factor).cast(config.dtype))
    store(rest["dv"], batch, kv_head, keys, d, tile=dv.cast(config.dtype))


def backward_schedule(
    config: BackwardConfig, depth: int = 2, in_flight: int = 1, **plan: Any
) -> KernelSchedule:
    """Program order, with the matmuls of an iteration in flight until their results are read."""
    launch = LaunchPlan(split="keys", **plan)
    return multistage(backward(config), depth, launch, config.tile[1] // 64, in_flight)
