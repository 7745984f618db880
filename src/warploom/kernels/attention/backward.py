"""Attention backward: the gradients of q, k and v, one pass over the queries for a tile of keys.

With P = exp(scale q k^T - lse), dP = dO v^T, D = rowsum(dO o) and dS = P (dP - D):
dv = P^T dO, dk = scale dS^T q, dq = scale dS k (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Three programs after one another: `prepare` makes of o, dO and lse what `backward` needs of a row,
`base`, which is lse in powers of 2 (inf for a row that sees no key), and `delta`, which is D, and
zeroes `dq_sum`; `backward` gives dk and dv, and adds to `dq_sum` dq of every tile of keys, without
the scale; `finish` makes dq of it. The compute groups share out the rows of dq, or those of its
transpose where the head size is long enough for them.

Arrays: `q, o, do, dq: [batch, heads, rows, d]`, `k, v, dk, dv: [batch, kv_heads, keys, d]`,
`lse, base, delta: [batch, heads, rows]`, `dq_sum: [batch, heads, rows, d]` or, transposed,
`[batch, heads, d, rows]`.
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
    Index,
    Program,
    Span,
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
    sum_along,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
ROWS = 32  # of a task of the programs without a matmul


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
    longest_first: bool = False

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def transposed(self) -> bool:
        """Whether dq is summed with its rows last."""
        return self.head_dim % self.tile[1] == 0

    def arrays(self, names: str) -> dict[str, Array]:
        """The parameters of those names."""
        rows, keys, row = "batch heads rows d", "batch kv_heads keys d", "batch heads rows"
        every: dict[str, Array] = dict.fromkeys("q o do dq".split(), array(self.dtype, rows))
        every |= dict.fromkeys("k v dk dv".split(), array(self.dtype, keys))
        every |= dict.fromkeys("lse base delta".split(), array(FP32, row))
        every["dq_sum"] = array(FP32, "batch heads d rows" if self.transposed else rows)
        return {name: every[name] for name in names.split()}


def backward(config: BackwardConfig | None = None) -> Program:
    """The gradients of a tile of keys, and its part of the queries'."""
    chosen = config or BackwardConfig()
    arrays = chosen.arrays("q do k v dk dv base delta dq_sum")
    return trace(_backward, arrays, name="attention_backward", config=chosen)


def prepare(config: BackwardConfig) -> Program:
    """What the backward pass needs to know of a row, and sums of zero."""
    arrays = config.arrays("o do lse base delta dq_sum")
    return trace(_prepare, arrays, name="attention_backward_prepare", config=config)


def finish(config: BackwardConfig) -> Program:
    """The gradients of the queries from their sums."""
    arrays = config.arrays("dq_sum dq")
    return trace(_finish, arrays, name="attention_backward_finish", config=config)


def _task(config: BackwardConfig) -> tuple[Index, Index, Span, Span]:
    batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), ROWS))
    return batch, head, span(i * ROWS, ROWS), span(0, config.head_dim)


def _prepare(config: BackwardConfig, o: Array, do: Array, lse: Array, **made: Array) -> None:
    batch, head, rows, d = _task(config)
    out, grad = (load(x, batch, head, rows, d).cast(FP32) for x in (o, do))
    sums = load(lse, batch, head, rows)
    base = where(sums.equals(-math.inf), math.inf, sums * LOG2E)
    store(made["base"], batch, head, rows, tile=base)
    store(made["delta"], batch, head, rows, tile=sum_along(out * grad, "d"))
    if config.transposed:
        store(made["dq_sum"], batch, head, d, rows, tile=zeros(d=config.head_dim, rows=ROWS))
    else:
        store(made["dq_sum"], batch, head, rows, d, tile=zeros(rows=ROWS, d=config.head_dim))


def _finish(config: BackwardConfig, dq_sum: Array, dq: Array) -> None:
    batch, head, rows, d = _task(config)
    order = (d, rows) if config.transposed else (rows, d)
    sums = load(dq_sum, batch, head, *order)
    sums = sums.T if config.transposed else sums
    store(dq, batch, head, rows, d, tile=(sums * config.factor).cast(config.dtype))


def _backward(
    config: BackwardConfig, q: Array, do: Array, k: Array, v: Array, **rest: Array
) -> None:
    (bq, bk), d = config.tile, span(0, config.head_dim)
    extents = {"batch": size("batch"), "kv_heads": size("kv_heads")}
    if config.longest_first:
        j, batch, kv_head = grid(keys=cdiv(size("keys"), bk), **extents)
    else:
        batch, kv_head, j = grid(**extents, keys=cdiv(size("keys"), bk))
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
        dq = key_tile @ change if config.transposed else change @ key_tile
        dk += change @ queries
        order = (d, rows) if config.transposed else (rows, d)
        store(rest["dq_sum"], batch, head, *order, tile=dq, add=True)
    store(rest["dk"], batch, kv_head, keys, d, tile=(dk * config.factor).cast(config.dtype))
    store(rest["dv"], batch, kv_head, keys, d, tile=dv.cast(config.dtype))


def backward_schedule(
    config: BackwardConfig, depth: int = 2, in_flight: int = 0, **plan: Any
) -> KernelSchedule:
    """Program order, with the matmuls of an iteration in flight until their results are read."""
    launch = LaunchPlan(split="keys", **plan)
    return multistage(backward(config), depth, launch, config.tile[1] // 64, in_flight)
