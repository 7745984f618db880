"""Variants of the attention kernel; `tuned.toml` has the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from warploom.autosched.points import Point
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.errors import InputError
from warploom.kernels.attention.program import SCALE_BLOCK, AttentionConfig, attention, textbook
from warploom.kernels.attention.reference import task_table
from warploom.kernels.tuned.table import Table
from warploom.kernels.tuned.variant import Arrays, Sizes, Template, Variant
from warploom.rewrites.rules import POWERS_LAZY, POWERS_OPTIMISTIC
from warploom.tile.typing import QUAD_PLACES

HEAD_DIMS = (64, 96, 128, 256)  # the records of the next larger one hold for a head size
# Head sizes between that build with the variants of 256. Below, tiles made for the next larger size
# spill (16, 32, 224 causal) or do not fit shared memory (80).
LARGE_HEADS = range(129, 209)
FITS_ALL = "128x64"  # its tile and rings fit with every head size
PANEL_BYTES = 128  # of a row in the panels that stores go through
MANY = 512  # batch * heads where the caller does not say
Lengths = int | Sequence[int]  # of one sequence, or of packed ones


_program = lru_cache(maxsize=256)(attention)


def takes(base: AttentionConfig, point: Point) -> bool:
    """Whether there is a kernel of a point for a configuration."""
    lazy, optimistic = "lazy_rescale" in point.rules, "optimistic_rescale" in point.rules
    if base.exact and (lazy or optimistic):
        return False
    if point.options.get("balance") == "longest_first" and not base.causal:
        return False  # tasks are of one length
    if base.narrow:
        # Fragments of 32 keys; results are wider than queries.
        unfit = point.options.get("store") == "over" or _tile(point)[1] % 32 > 0
        unfit |= base.block_scales and any(SCALE_BLOCK % side for side in _tile(point))
        return not unfit
    # The first block of a window has no key for some rows, whose warps then weigh the next
    # one twice: optimistic rescaling gets 0.97 of the same tile's rate.
    windowed = base.window is not None and optimistic
    # It has no loop without a mask to split off: such a point's rates say little, and three groups
    # have 505 TFLOP/s where two have 541 (causal heads of 128, 8192 rows, three sittings each).
    split = "split_mask_loop" in point.rules and _tile(point)[0] > 128
    windowed |= base.window is not None and base.causal and split
    return not ((base.rescale_threshold and optimistic) or windowed)


def configured(base: AttentionConfig, point: Point) -> AttentionConfig:
    """`base` with the tile and the rules of a point."""
    lazy, optimistic = "lazy_rescale" in point.rules, "optimistic_rescale" in point.rules
    return replace(
        base,
        tile=_tile(point),
        split_mask_loop="split_mask_loop" in point.rules and base.window is None,
        rescale_threshold=POWERS_LAZY if lazy else base.rescale_threshold,
        optimistic_threshold=POWERS_OPTIMISTIC if optimistic else 0.0,
    )


def _tile(point: Point) -> tuple[int, int]:
    rows, keys = point.sizes("tile")
    return rows, keys


def plan(config: AttentionConfig, point: Point) -> LaunchPlan:
    """How the grid is laid over the GPU before the point's options; longest rows first when
    causal."""
    del point
    # Packed sequences: the table of tasks has the longest first.
    reverse = ("rows_tile",) if config.causal and not config.packed else ()
    return LaunchPlan(
        split="rows",
        reverse=reverse,
        store_panels=1,
        skip_unit=config.rescale_threshold > 0 or config.optimistic_threshold > 0,
        skip_voted=config.optimistic_threshold > 0,
    )


def sizes(config: AttentionConfig, given: Sizes) -> tuple[Mapping[str, int], Arrays]:
    """Of `heads` (of the whole batch), `rows` and `keys`; packed: lengths, and heads of one."""
    rows, keys, heads = given["rows"], given["keys"], given["heads"]
    dims = {"heads": heads, "kv_heads": heads // config.group, "one": 1}
    dims |= {"d": config.head_dim, "e": config.values}
    if not config.packed:
        if config.ordered:
            dims["places"] = -(-keys // QUAD_PLACES) * QUAD_PLACES
        if config.block_scales:
            lengths = {"q": rows, "k": keys}
            dims |= {f"{x}_blocks": -(-n // SCALE_BLOCK) for x, n in lengths.items()}
        return {**dims, "batch": 1, "rows": rows, "keys": keys}, {}
    tiles = task_table(rows, keys, config.tile[0])
    bounds = {name: np.cumsum([0, *of]) for name, of in (("row", rows), ("key", keys))}
    dims |= {f"{name}_tokens": int(of[-1]) for name, of in bounds.items()}
    dims |= {"tasks": len(tiles), "pair": 2, "bounds": len(rows) + 1}
    return dims, {"tiles": tiles, **{f"{name}_bounds": of for name, of in bounds.items()}}


def free(config: AttentionConfig) -> Mapping[str, Sequence[str]]:
    """The tiles of the table."""
    del config
    found = (dict(one.point.settings)["tile"] for one in ATTENTION.variants.values())
    return {"tile": tuple(dict.fromkeys(found))}


def kinds(config: AttentionConfig) -> Sequence[str]:
    """Packed or not, element width, head size, mask; then those that are like it."""
    fitting = [d for d in HEAD_DIMS if config.head_dim <= d]
    step = 32 if config.narrow else 16  # what a matrix instruction contracts
    if not fitting or config.head_dim % step:
        raise InputError(
            f"attention head_dim={config.head_dim}: expected a multiple of {step}, at most "
            f"{HEAD_DIMS[-1]}"
        )
    dense = f"{fitting[0]} {'causal' if config.causal else 'full'}"
    narrow = ["8-bit "] if config.narrow else []
    packed = ["packed "] if config.packed else []
    leads = [*(lead + wide for lead in packed for wide in narrow), *narrow, *packed, ""]
    return [lead + dense for lead in leads]


TEMPLATE = Template(
    textbook,
    free,
    configured,
    lambda config, point: _program(config),
    plan,
    takes=takes,
    sizes=sizes,
)
ATTENTION = Table(Path(__file__).with_name("tuned.toml"), TEMPLATE, kinds, FITS_ALL)


def _fits(choice: Variant, d: int, e: int) -> bool:
    """Whether there is room for tiles of head sizes that the variant was not made for."""
    rows, keys = _tile(choice.point)
    queries = 2 if "task" in choice.point.options else 1
    operands = 2 * (queries * rows * d + 2 * keys * (d + e))
    return operands + rows * PANEL_BYTES <= shared_limit(1, "sm_90a")


def _turns(choice: Variant, config: AttentionConfig) -> bool:
    """Whether there is room for turning values: beside three groups the warps that do it have no
    registers for tasks that are not of one length, and the turned values are two slots more."""
    rows, keys = _tile(choice.point)
    uneven = "balance" in choice.point.options or config.causal
    return not (rows > 128 and uneven) and (config.head_dim <= 128 or keys <= 96)


def _builds(choice: Variant, config: AttentionConfig) -> bool:
    """Whether the variant's kernel for the configuration does not spill."""
    known = config.head_dim in HEAD_DIMS or config.head_dim in LARGE_HEADS
    if config.value_dim and not _fits(choice, config.head_dim, config.value_dim):
        return False
    if config.narrow and not config.ordered and not _turns(choice, config):
        return False
    # Two loops with optimistic rescaling leave no registers for where a sequence lies (76 B at 128
    # full).
    rules = {"split_mask_loop", "optimistic_rescale"}
    crowded = config.packed and rules <= set(choice.point.rules)
    # Nor do three groups have registers for a soft cap beside sums of heads of 128.
    optimistic = "optimistic_rescale" in choice.point.rules
    crowded |= bool(config.softcap) and optimistic and _tile(choice.point) == (192, 80)
    # Nor has a causal tile of heads of 256 for factors of every head (20 B at 96 keys).
    large = config.head_scales and config.causal and config.head_dim > 128
    crowded |= large and optimistic
    return known and not crowded


@lru_cache(maxsize=1024)
def _chosen(config: AttentionConfig, rows: Lengths, keys: Lengths, heads: int) -> Variant:
    sizes = {"heads": heads, "rows": rows, "keys": keys}
    return ATTENTION.choose(config, sizes, lambda choice: _builds(choice, config))


def choose_attention(
    rows: Lengths,
    base: AttentionConfig | None = None,
    keys: Lengths | None = None,
    heads: int = MANY,
) -> Variant:
    """The variant for a shape; raises where no head size fits.

    `heads` counts the heads of the whole batch; `keys` is `rows` unless given. For packed sequences
    give the lengths of all, and the heads of one.
    """
    config = base or AttentionConfig()
    rows, keys = (
        ((x,) if config.packed else x) if isinstance(x, int) else tuple(x)
        for x in (rows, rows if keys is None else keys)
    )
    return _chosen(config, rows, keys, heads)
