"""Gradients of attention for heads too long for one kernel: a pass for each of dv, dk and dq.

The sums of one gradient of a head of 256 take 128 registers a thread, so that each has a kernel of
its own, which makes the scores again: eight matmuls in place of five. No sum is shared by tasks,
so every run has the same bits. Words and arrays are those of `kernels.attention.backward`.
"""

from __future__ import annotations

import math

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.attention.backward import (
    LOG2E,
    capped,
    key_blocks,
    row_blocks,
    seen_by_keys,
    seen_by_rows,
)
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.tile import (
    Array,
    Program,
    cdiv,
    exp2,
    grid,
    load,
    loop,
    size,
    span,
    store,
    trace,
    where,
    zeros,
)

TILE = 128  # rows or keys of a task, of two groups
# Rows or keys of a block: what of it lies in shared memory has two slots.
BLOCKS = {"values": 64, "keys": 32, "queries": 32}
# Of 16 columns of what a task loads once, by tile, that registers are left for: these take half of
# the shared memory that matmuls of few columns need.
HELD_STEPS = {
    "values": {"k_t": tuple(range(0, 16, 2))},
    "keys": {"k_t": tuple(range(6)), "v_t": tuple(range(6))},
    "queries": {"q_t": (0, 2, 5, 8, 10, 13), "do_t": (0, 2, 5, 8, 10, 13)},
}
ARRAYS = {
    "values": "q do k dv base",
    "keys": "q do k v dk base delta",
    "queries": "q do k v dq base delta",
}


def one_pass(config: BackwardConfig, part: str) -> Program:
    """The kernel of one gradient: "values" for dv, "keys" for dk, "queries" for dq."""
    body = _queries if part == "queries" else _keys
    arrays = config.arrays(ARRAYS[part])
    return trace(body, arrays, name=f"attention_backward_{part}", config=config)


def pass_policy(config: BackwardConfig, part: str) -> Policy:
    """Program order; the longest tasks of a causal mask come first, of a band of heads."""
    by_rows = part == "queries"
    depths = {"k_t": config.depth, "q_t": config.depth}
    held = {
        tile: tuple(step for step in steps if 16 * step < depths.get(tile, config.value_depth))
        for tile, steps in HELD_STEPS[part].items()
        if not config.softcap  # whose slopes take the registers
    }
    launch = LaunchPlan(
        split="rows" if by_rows else "keys",
        tile_scheduler="dynamic" if config.causal else "static",
        supergroup=config.band,
        grouped="all",
        reverse=("rows_tile",) if config.causal and by_rows else (),
        store_panels=1,
        held_steps=held,
        hold_arithmetic=by_rows,
    )
    order = "lcsf-early" if part == "keys" else "multistage"
    return Policy(order, launch, groups=TILE // 64, vectors=not by_rows)


def _keys(config: BackwardConfig, q: Array, do: Array, k: Array, **rest: Array) -> None:
    """dv, or where there is v, dk, of a tile of keys."""
    of_keys, d, e = "v" in rest, span(0, config.depth), span(0, config.value_depth, "d")
    bq = BLOCKS["keys" if of_keys else "values"]
    batch, kv_head, j = grid(
        batch=size("batch"), kv_heads=size("kv_heads"), keys=cdiv(size("keys"), TILE)
    )
    keys = span(j * TILE, TILE)
    key_tile = load(k, batch, kv_head, keys, d)
    value_tile = load(rest["v"], batch, kv_head, keys, e) if of_keys else None
    sums = zeros(keys=TILE, d=config.depth if of_keys else config.value_depth)
    shift = size("keys") - size("rows")
    first, blocks = row_blocks(config, j, (bq, TILE), size("rows"), size("keys"))
    for n in loop(blocks * config.group):
        head = kv_head * config.group + (n // blocks if config.group > 1 else 0)
        i = first + (n % blocks if config.group > 1 else n)
        rows = span(i * bq, bq)
        queries, grads = load(q, batch, head, rows, d), load(do, batch, head, rows, e)
        scores, slope = capped(config, key_tile @ queries)
        grad = None if value_tile is None else value_tile @ grads
        seen = seen_by_keys(config, (bq, i * bq + shift), (TILE, j * TILE), size("keys"))
        scores[:] = where(seen, scores, -math.inf)
        base = load(rest["base"], batch, head, rows)
        weights = exp2(scores * (config.power * LOG2E) - base)
        if grad is None:
            sums += weights.cast(config.dtype) @ grads
        else:
            delta = load(rest["delta"], batch, head, rows)
            change = weights * (grad - delta)
            change = change if slope is None else change * slope
            sums += change.cast(config.dtype) @ queries
    if of_keys:
        sums = sums * config.factor
    made, columns = ("dk", d) if of_keys else ("dv", e)
    store(rest[made], batch, kv_head, keys, columns, tile=sums.cast(config.dtype))


def _queries(
    config: BackwardConfig, q: Array, do: Array, k: Array, v: Array, **rest: Array
) -> None:
    """dq of a tile of queries."""
    bk = BLOCKS["queries"]
    d, e = span(0, config.depth), span(0, config.value_depth, "d")
    batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), TILE))
    rows, kv_head = span(i * TILE, TILE), head // config.group
    queries, grads = load(q, batch, head, rows, d), load(do, batch, head, rows, e)
    base = load(rest["base"], batch, head, rows, edge=math.inf)
    delta = load(rest["delta"], batch, head, rows)
    sums = zeros(rows=TILE, d=config.depth)
    shift = size("keys") - size("rows")
    first, blocks = key_blocks(config, i, (TILE, bk))
    for n in loop(blocks):
        j = first + n
        keys = span(j * bk, bk)
        key_tile, value_tile = load(k, batch, kv_head, keys, d), load(v, batch, kv_head, keys, e)
        scores, slope = capped(config, queries @ key_tile)
        grad = grads @ value_tile
        seen = seen_by_rows(config, (TILE, i * TILE + shift), (bk, j * bk))
        scores[:] = where(seen, scores, -math.inf)
        weights = exp2(scores * (config.power * LOG2E) - base)
        change = weights * (grad - delta)
        change = change if slope is None else change * slope
        sums += change.cast(config.dtype) @ key_tile
    store(rest["dq"], batch, head, rows, d, tile=(sums * config.factor).cast(config.dtype))
