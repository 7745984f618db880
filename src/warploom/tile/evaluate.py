"""The meaning of one op on numpy values, shared by both interpreters.

Floating arithmetic is done in float32 and rounded once to the result's type, as the emitted code
does; a matmul of 8- or 16-bit operands adds up exactly before one rounding to float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError
from warploom.tile.dtypes import FP16, round_to, storage_of
from warploom.tile.ir import Op, Span, TileType, joint_axis
from warploom.tile.ops import BLOCK, OPS, TAKEN_OFF
from warploom.tile.typing import quad_places

Value = NDArray[Any]


class Disturbance(Protocol):
    """What an interpretation does beside the ops themselves: `tile.rounding` models errors so."""

    def operands(self, op: Op, values: Sequence[Value]) -> Sequence[Value]:
        """The operands that `op` gets in place of `values`."""
        ...

    def result(self, op: Op, value: Value) -> Value:
        """The result of `op` in place of `value`; of `store_add`, the sum in memory."""
        ...


def compute(op: Op, sources: Sequence[Value], symbols: Mapping[str, int]) -> Value:
    """The value of an op that gives a tile; `sources` in the op's order. Loads are elsewhere."""
    assert op.dst is not None
    spec = OPS[op.kind]
    kind = op.dst.type
    with np.errstate(all="ignore"):
        if spec.group in ("unary", "binary", "compare"):
            joined = [align(v, s.type, kind) for v, s in zip(sources, op.srcs, strict=True)]
            assert spec.meaning is not None
            result = spec.meaning(*joined)
        elif spec.group == "select":
            joined = [align(v, s.type, kind) for v, s in zip(sources, op.srcs, strict=True)]
            result = np.where(*joined)
        elif spec.group == "matmul":
            result = matmul(op, sources)
        else:
            result = _special(op, sources, symbols)
        found = np.asarray(result)
        if found.shape != kind.shape:
            found = np.broadcast_to(found, kind.shape)
        return round_to(kind.dtype, found)


def align(value: Value, kind: TileType, target: TileType) -> Value:
    """`value` with length-1 axes put in so that it broadcasts against `target` by axis name."""
    if kind.axes == target.axes:
        return value
    return value.reshape(tuple(kind.size(n) if n in kind.names else 1 for n in target.names))


def matmul(op: Op, sources: Sequence[Value]) -> Value:
    """Contract the shared axis of the first two operands; add the third, if any, in float32.

    The sum of products is formed in float64 and rounded to float32 once, so that a part of the
    rows gives the same bits as all of them; the tensor core's own order is not modelled.
    """
    a, b = op.srcs[0].type, op.srcs[1].type
    (axis,) = [name for name in a.names if name in b.names]
    left = sources[0] if a.names[1] == axis else sources[0].T
    right = sources[1] if b.names[0] == axis else sources[1].T
    assert op.dst is not None
    sums = storage_of(op.dst.type.dtype)
    product = np.matmul(left.astype(np.float64), right.astype(np.float64)).astype(sums)
    if len(sources) == 2:
        return product
    return sources[2] - product if op.value == TAKEN_OFF else sources[2] + product


def _special(op: Op, sources: Sequence[Value], symbols: Mapping[str, int]) -> Value:
    assert op.dst is not None
    kind = op.dst.type
    if op.kind == "fill":
        assert op.value is not None
        return np.full(kind.shape, op.value)
    if op.kind == "coordinate":
        assert op.start is not None
        start = op.start.evaluate(symbols)
        return start + np.arange(kind.size(op.axis)) if op.axis else np.array(start)
    source = op.srcs[0].type
    if op.kind in ("cast", "copy", "rename"):
        return sources[0]
    if op.kind == "transpose":
        return sources[0].T
    if op.kind == "lower_inverse":
        return _lower_inverse(sources[0])
    axis = source.names.index(op.axis)
    if op.kind == "quad_order":
        return np.take(sources[0], quad_places(kind.size(op.axis)), axis=axis)
    if op.kind == "slice":
        start = int(op.value or 0)
        return np.take(sources[0], np.arange(start, start + kind.size(op.axis)), axis=axis)
    if op.kind == "argmax":
        return np.argmax(sources[0], axis=axis)
    if op.kind == "gather":
        return _gather(op, sources, axis)
    meaning = OPS[op.kind].meaning
    assert meaning is not None
    return meaning(sources[0], axis=axis)


def _lower_inverse(value: Value) -> Value:
    """Row after row of blocks: what is left of one on the diagonal is its inverse times the rows
    above. Operands are fp16; blocks of half that size are inverted by substitution."""

    def product(a: Value, b: Value) -> Value:
        return np.matmul(round_to(FP16, a), round_to(FP16, b))

    low, inverse = np.tril(value, -1), np.eye(len(value), dtype=value.dtype)
    half = BLOCK // 8
    for at in range(0, len(value), half):
        own = slice(at, at + half)
        for c in range(at, at + half - 1):
            inverse[own, own] -= low[own, c, None] * inverse[c, own]
    for at in range(half, len(value), 2 * half):
        before, own = slice(at - half, at), slice(at, at + half)
        left = product(inverse[own, own], low[own, before])
        inverse[own, before] = product(-left, inverse[before, before])
    for at in range(2 * half, len(value), 2 * half):
        own = slice(at, at + 2 * half)
        left = product(inverse[own, own], low[own, :at])
        inverse[own, :at] = product(-left, inverse[:at, :at])
    return inverse


def _gather(op: Op, sources: Sequence[Value], axis: int) -> Value:
    values, index = sources
    length = values.shape[axis]
    if index.size and (index.min() < 0 or index.max() >= length):
        raise InputError(
            f"{op.where}: gather position {int(index.min())}..{int(index.max())} outside of axis "
            f"{op.axis!r} of length {length}"
        )
    kind = op.srcs[0].type.resized(op.axis, op.srcs[1].type.size(op.axis))
    full = np.broadcast_to(align(index, op.srcs[1].type, kind), kind.shape)
    return np.take_along_axis(values, full, axis=axis)


def bounds(
    spans: Sequence[Span], shape: Sequence[int], symbols: Mapping[str, int]
) -> tuple[tuple[slice | int, ...], tuple[slice, ...]] | None:
    """Where a tile and its array meet: the array's index and the tile's; None when nowhere."""
    outer: list[slice | int] = []
    inner: list[slice] = []
    for span, length in zip(spans, shape, strict=True):
        start = span.start.evaluate(symbols)
        if span.size is None:
            if not 0 <= start < length:
                return None
            outer.append(start)
            continue
        if span.stop is not None:
            length = min(length, span.stop.evaluate(symbols))  # noqa: PLW2901
        low, high = max(start, 0), min(start + span.size, length)
        if low >= high:
            return None
        outer.append(slice(low, high))
        inner.append(slice(low - start, high - start))
    return tuple(outer), tuple(inner)


def parts_of(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """The ranges of each part of a tile whose parts a load stacks; one for other tiles."""
    count = max(len(span.starts) for span in spans) if spans else 1
    return [
        tuple(replace(s, start=s.starts[n], others=()) if s.others else s for s in spans)
        for n in range(count)
    ]


def _sizes(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(span.size for span in spans if span.size is not None)


def read_tile(op: Op, source: Value, symbols: Mapping[str, int]) -> Value:
    """The tile a load gives: the array's elements, and the edge value outside of it."""
    assert op.dst is not None and op.array is not None
    kind = op.dst.type
    tile = np.full(kind.shape, op.value or 0, dtype=storage_of(kind.dtype))
    parts = parts_of(op.spans)
    for number, spans in enumerate(parts):
        part = tile
        if len(parts) > 1:
            rows = len(tile) // len(parts)
            part = tile[number * rows : (number + 1) * rows]
        elif joint_axis(spans):
            part = tile.reshape(_sizes(spans))
        meeting = bounds(spans, source.shape, symbols)
        if meeting is not None:
            outer, inner = meeting
            part[inner] = round_to(kind.dtype, np.asarray(source[outer]))
    return tile


def write_tile(
    op: Op,
    tile: Value,
    target: Value,
    symbols: Mapping[str, int],
    disturb: Disturbance | None = None,
) -> None:
    """Store (or add) the part of the tile that lies in the array."""
    assert op.array is not None
    meeting = bounds(op.spans, target.shape, symbols)
    if meeting is None:
        return
    outer, inner = meeting
    if joint_axis(op.spans):
        tile = tile.reshape(_sizes(op.spans))
    if op.kind == "store_add":
        total = round_to(op.array.dtype, target[outer] + tile[inner])
        target[outer] = disturb.result(op, total) if disturb else total
    else:
        target[outer] = tile[inner]
