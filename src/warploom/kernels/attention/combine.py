"""Joining the parts that `decode` leaves: one softmax from those of all parts of the keys.

Every row's parts are weighed by their log-sum-exp. `combine` stores `o: [batch, queries, kv_heads,
group, d]`, with parts of so many keys each (`DecodeConfig.part`) by `lengths` as well.
"""

from __future__ import annotations

import math

from warploom import tile as t
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.kernels.attention.decode import PART, DecodeConfig

MOST_COLUMNS, FEW_SPLITS = 128, 16  # of a row that a task joins, of more parts than so


def combine(config: DecodeConfig, splits: int) -> t.Program:
    """One softmax from those of all parts of the keys, one row a task: of at most `splits` parts,
    or of `splits` parts of so many keys each at a time."""
    names = ("parts", "sums", "lengths") if config.part else ("parts", "sums")
    arrays = {name: config.arrays[name] for name in names}
    arrays["o"] = t.array(config.result, f"batch queries kv_heads group {config.columns[1]}")
    body = _combine_equal if config.part else _combine
    return t.trace(body, arrays, name="combine", config=config, splits=splits)


def _width(config: DecodeConfig, splits: int) -> int:
    """Columns of a row that a task of `combine` joins: all, or where there are many parts as many
    as registers hold of them."""
    return min(config.columns[0], MOST_COLUMNS if splits > FEW_SPLITS else config.columns[0])


def _row(config: DecodeConfig, splits: int) -> tuple[tuple[t.Index, ...], t.Span]:
    """The task of `combine`: a packed row, and columns of it."""
    columns, width = config.columns[0], _width(config, splits)
    own = {name: t.size(name) for name in ("batch", "kv_heads", "rows")}
    if columns == width:
        return tuple(t.grid(**own)), t.span(0, columns)
    *row, piece = t.grid(**own, pieces=columns // width)
    return tuple(row), t.span(piece * width, width)


def _combine(parts: t.Array, sums: t.Array, o: t.Array, config: DecodeConfig, splits: int) -> None:
    (batch, kv_head, row), columns = _row(config, splits)
    every = t.span(0, splits)
    lse = t.load(sums, batch, kv_head, every, row, edge=-math.inf)
    highest = t.max_along(lse, "splits")
    weights = t.exp2(lse - t.where(highest.equals(-math.inf), 0.0, highest))
    total = t.sum_along(weights, "splits")
    out = t.sum_along(t.load(parts, batch, kv_head, every, row, columns) * weights, "splits")
    _put_row(config, o, (batch, kv_head, row, columns), out, total)


def _put_row(
    config: DecodeConfig,
    o: t.Array,
    at: tuple[t.Index, t.Index, t.Index, t.Span],
    out: t.Tile,
    total: t.Tile,
) -> None:
    """Store columns of one packed row of sums and their weights."""
    batch, kv_head, row, columns = at
    out[:] = out * t.where(total.equals(0.0), 0.0, t.reciprocal(total))
    query, head = row // config.group, row % config.group
    t.store(o, batch, query, kv_head, head, columns, tile=out.cast(config.result))


def _combine_equal(
    parts: t.Array, sums: t.Array, lengths: t.Array, o: t.Array, config: DecodeConfig, splits: int
) -> None:
    """Parts from the first to the last that the sequence has, by online softmax: how many there is
    room for decides nothing."""
    part, axis = config.part or PART, config.columns[1]
    (batch, kv_head, row), columns = _row(config, splits)
    count = t.cdiv(t.minimum_index(t.read(lengths, batch), t.size("splits") * part), part)
    base, total = t.full(-math.inf), t.zeros()
    acc = t.zeros(t.FP32, **{axis: _width(config, splits)})
    for i in t.loop(t.cdiv(count, splits)):
        several = t.span(i * splits, splits)
        own = t.coordinate("splits", splits, i * splits) < count
        lse = t.where(own, t.load(sums, batch, kv_head, several, row), -math.inf)
        highest = t.maximum(base, t.max_along(lse, "splits"))
        under = t.where(highest.equals(-math.inf), 0.0, highest)
        rescale, weights = t.exp2(base - under), t.exp2(lse - under)
        total[:] = total * rescale + t.sum_along(weights, "splits")
        share = t.load(parts, batch, kv_head, several, row, columns) * weights
        acc[:] = acc * rescale + t.sum_along(share, "splits")
        base[:] = highest
    _put_row(config, o, (batch, kv_head, row, columns), acc, total)


def combine_schedule(config: DecodeConfig, splits: int) -> SimtSchedule:
    """A warp for a row, 16 bytes of each of up to 16 parts a thread: warps that share a row would
    wait for each other. Begun while the parts are still being made."""
    lanes = _width(config, splits) // 4
    threads = max(32, lanes * max(1, splits // 16))
    launch = LaunchPlan(persistent=False, dependent=True)
    return SimtSchedule("parts", threads, lanes, 4, launch, aligned=True)
