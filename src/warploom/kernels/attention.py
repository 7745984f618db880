"""Attention forward: o = softmax(scale q k^T + mask) v, one pass over the keys.

Arrays: `q, o: [batch, heads, rows, d]`, `k, v: [batch, kv_heads, keys, d]`, `lse: [batch, heads,
rows]` (natural logarithm). Query row r stands at key position r + keys - rows, so that the last
row sees every key (FlashAttention's convention). A row that sees no key gives o = 0, lse = -inf.
Source: online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.codegen.named import overlapped
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    FP32,
    Array,
    DType,
    Index,
    Program,
    Tile,
    array,
    cdiv,
    coordinate,
    exp2,
    full,
    grid,
    load,
    log2,
    loop,
    max_along,
    maximum,
    maximum_index,
    minimum,
    minimum_index,
    part_begin,
    part_end,
    reciprocal,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionConfig:
    """What is static: element type, head size, masks, query heads a key head, and the tile.

    `window` w lets row position p see keys p - w + 1 ... (None: all); `tile` is (rows, keys);
    `scale` defaults to 1 / sqrt(head_dim). The sums of a row are rescaled only when its maximum
    has grown by more than `slack` powers of 2, so that most blocks need no rescaling
    (the rule of FlashAttention-4; weights then reach 2 ** slack: at most 15 for fp16).
    """

    dtype: DType = BF16
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    group: int = 1
    lse: bool = False
    scale: float | None = None
    slack: float = 8.0
    tile: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.group < 1 or (self.window is not None and self.window < 1):
            raise InputError(f"attention group={self.group} window={self.window}: expected >= 1")

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def arrays(self) -> dict[str, Array]:
        """The parameters of the program."""
        specs = {
            "q": array(self.dtype, "batch heads rows d"),
            "k": array(self.dtype, "batch kv_heads keys d"),
            "v": array(self.dtype, "batch kv_heads keys d"),
            "o": array(self.dtype, "batch heads rows d"),
        }
        return {**specs, "lse": array(FP32, "batch heads rows")} if self.lse else specs


def attention(config: AttentionConfig | None = None) -> Program:
    """The tile program of attention forward."""
    chosen = config or AttentionConfig()
    return trace(_attention, chosen.arrays, name="attention", config=chosen)


def _attention(
    q: Array, k: Array, v: Array, o: Array, config: AttentionConfig, lse: Array | None = None
) -> None:
    bq, bk = config.tile
    d, scale = config.head_dim, config.factor * LOG2E
    batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), bq))
    rows, width, kv_head = span(i * bq, bq), span(0, d), head // config.group
    shift = size("keys") - size("rows")
    row_at = coordinate("rows", bq, i * bq + shift)
    queries = load(q, batch, head, rows, width)
    top, total, acc = full(-math.inf, rows=bq), zeros(rows=bq), zeros(rows=bq, d=d)

    begin, end, until = _bounds(config, i)
    for j in loop(begin, end, until=until):
        keys = span(j * bk, bk)
        scores = queries @ load(k, batch, kv_head, keys, width)
        scores[:] = where(_visible(config, row_at, j), scores, -math.inf)
        highest = maximum(top, max_along(scores, "keys"))
        if config.slack:
            highest = where((highest - top) * scale <= config.slack, top, highest)
        # A row that has seen no key keeps -inf; 0 in its place avoids -inf - -inf.
        base = where(highest.equals(-math.inf), 0.0, highest)
        rescale = exp2((top - base) * scale)
        weights = exp2(scores * scale - base * scale)
        total[:] = total * rescale + sum_along(weights, "keys")
        top[:] = highest
        acc[:] = acc * rescale
        values = load(v, batch, kv_head, keys, width)
        acc[:] = acc + weights.cast(config.dtype) @ values
    none = total.equals(0.0)
    store(
        o,
        batch,
        head,
        rows,
        width,
        tile=(acc * where(none, 0.0, reciprocal(total))).cast(config.dtype),
    )
    if lse is not None:
        natural = (top * scale + log2(total)) * (1.0 / LOG2E)
        store(lse, batch, head, rows, tile=where(none, -math.inf, natural))


def _visible(config: AttentionConfig, row_at: Tile, j: Index) -> Tile:
    key_at = coordinate("keys", config.tile[1], j * config.tile[1])
    if not config.causal:
        seen = key_at < size("keys")
    else:
        seen = minimum(row_at + 1, size("keys")) > key_at
    return seen if config.window is None else seen & (row_at - config.window < key_at)


def _bounds(config: AttentionConfig, i: Index) -> tuple[Index, Index, Index]:
    """The blocks of keys that row tile `i` sees: from, to, and to where a part of its rows does."""
    bq, bk = config.tile
    first, end = i * bq + size("keys") - size("rows"), cdiv(size("keys"), bk)
    exists = minimum_index(maximum_index(size("rows") - i * bq - part_begin("rows"), 0), 1)
    until = exists * end
    if config.causal:
        until = minimum_index(until, cdiv(maximum_index(first + part_end("rows"), 0), bk))
        end = minimum_index(end, cdiv(maximum_index(first + bq, 0), bk))
    if config.window is None:
        return maximum_index(0, 0), end, until
    return maximum_index(first - config.window + 1, 0) // bk, end, until


def default_schedule(config: AttentionConfig) -> KernelSchedule:
    """FlashAttention-3's: two groups in turns, P V one iteration behind Q K^T, rings of two."""
    reverse = ("rows_tile",) if config.causal else ()
    launch = LaunchPlan(split="rows", reverse=reverse)
    return overlapped(attention(config), {"k": 2, "v": 2}, launch, config.tile[0] // 64)
