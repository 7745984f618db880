"""Type rules: the type of a result from the types of its operands, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from warploom.errors import InputError
from warploom.tile.dtypes import BOOL, FP8, FP32, HALVES, INT8, INT32, DType
from warploom.tile.ir import Array, Span, TileType
from warploom.tile.ops import BLOCK, NIBBLES, OpSpec

MATMUL_TYPES = (*HALVES, *FP8)  # their products are added up in fp32


def join_axes(types: Sequence[TileType]) -> tuple[tuple[str, int], ...]:
    """The axes of an elementwise result: the longest operand's, the others are subsets by name."""
    widest = max(types, key=lambda t: len(t.axes), default=None)
    if widest is None:
        return ()
    known = dict(widest.axes)
    for other in types:
        if set(other.names) == set(widest.names) and other.names != widest.names:
            raise InputError(
                f"axes {list(other.names)} and {list(widest.names)} are in different order; "
                "transpose one operand with .T"
            )
        for name, length in other.axes:
            if name not in known:
                return _outer(types)
            if known[name] != length:
                raise InputError(
                    f"axis {name!r} is {length} long in {other} and {known[name]} in {widest}; "
                    "an axis has one size"
                )
    return widest.axes


def _outer(types: Sequence[TileType]) -> tuple[tuple[str, int], ...]:
    # Two vectors along different axes meet as a tile: rows from the first, columns from the second.
    axes: dict[str, int] = {}
    for kind in types:
        for name, length in kind.axes:
            if axes.setdefault(name, length) != length:
                raise InputError(f"axis {name!r} has sizes {axes[name]} and {length}")
    if len(axes) > 2 or any(len(kind.axes) > 1 for kind in types):
        listed = " and ".join(str(kind) for kind in types)
        raise InputError(f"{listed} have no common axes to join by; rename an axis of the array")
    return tuple(axes.items())


def elementwise_type(spec: OpSpec, types: Sequence[TileType]) -> TileType:
    """The type of a unary, binary, compare or select op."""
    if len(types) not in spec.arity:
        raise InputError(f"{spec.kind} takes {spec.arity[0]} operands, got {len(types)}")
    axes = join_axes(types)
    values = types[1:] if spec.group == "select" else types
    kinds = {kind.dtype for kind in values}
    if len(kinds) != 1:
        listed = ", ".join(str(kind) for kind in values)
        raise InputError(
            f"{spec.kind} of {listed}: element types differ; cast one, as in t.cast(fp32)"
        )
    (dtype,) = kinds
    if (spec.kind in NIBBLES) != (dtype is INT8):
        needs = "an int8 tile" if spec.kind in NIBBLES else "wider numbers than int8; cast it first"
        raise InputError(f"{spec.kind} needs {needs}, got {types[0]}")
    if spec.kind == "philox" and dtype is not INT32:
        raise InputError(f"philox needs int32 tiles, got {types[0]}; cast it first")
    if spec.floats_only and not dtype.is_float:
        raise InputError(f"{spec.kind} needs a floating tile, got {types[0]}; cast it first")
    if spec.integers_only and dtype.kind != "int":
        raise InputError(f"{spec.kind} needs an int32 tile, got {types[0]}; cast it first")
    if (spec.kind in ("and", "or", "not")) != (dtype is BOOL):
        needs = "bool tiles" if spec.kind in ("and", "or", "not") else "numbers, not conditions"
        raise InputError(f"{spec.kind} needs {needs}, got {types[0]}")
    if spec.group == "select" and types[0].dtype is not BOOL:
        raise InputError(f"where: the condition must be a bool tile, got {types[0]}")
    return TileType(BOOL if spec.group == "compare" else dtype, axes)


def reduce_type(kind: str, source: TileType, axis: str) -> TileType:
    """The type of a reduction along `axis`; argmax gives int32 positions."""
    require_axis(kind, source, axis)
    _require_numbers(kind, source)
    result = source.without(axis)
    return result.with_dtype(INT32) if kind == "argmax" else result


def require_axis(kind: str, source: TileType, axis: str) -> None:
    """Raise when `source` has no such axis."""
    if axis not in source.names:
        raise InputError(f"{kind}: {source} has no axis {axis!r}; it has {list(source.names)}")


def scan_type(kind: str, source: TileType, axis: str) -> TileType:
    """The type of a scan along `axis`: the source's."""
    require_axis(kind, source, axis)
    _require_numbers(kind, source)
    return source


def inverse_type(kind: str, source: TileType) -> TileType:
    """The type of the inverse of a tile: the tile's."""
    if source.dtype is not FP32 or source.shape != (BLOCK, BLOCK):
        raise InputError(f"{kind} of {source}: expected fp32 and two axes of {BLOCK}")
    return source


def _require_numbers(kind: str, source: TileType) -> None:
    if source.dtype is BOOL:
        raise InputError(f"{kind} of conditions {source}: cast them to int32 first")
    if source.dtype is INT8:
        raise InputError(f"{kind} of {source}: int8 is loaded and cast; cast it to int32 first")


def cast_type(source: TileType, target: DType) -> TileType:
    """The type of `source` in another element type; none becomes int8."""
    if target is INT8 and source.dtype is not INT8:
        raise InputError(f"cast of {source} to int8: int8 is loaded and cast, nothing makes it")
    return source.with_dtype(target)


def matmul_type(a: TileType, b: TileType) -> TileType:
    """The type of `a @ b`: the one shared axis is contracted, the result is fp32."""
    if len(a.axes) != 2 or len(b.axes) != 2:
        raise InputError(f"a @ b needs two-dimensional tiles, got {a} and {b}")
    shared = [name for name in a.names if name in b.names]
    if len(shared) != 1:
        raise InputError(
            f"a @ b contracts the one axis both have, but {a} and {b} share {shared or 'none'}; "
            "name the dimensions of the arrays so that exactly one is common"
        )
    (axis,) = shared
    if a.size(axis) != b.size(axis):
        raise InputError(f"a @ b: axis {axis!r} is {a.size(axis)} in {a} and {b.size(axis)} in {b}")
    if a.dtype != b.dtype or a.dtype.name not in MATMUL_TYPES:
        raise InputError(
            f"a @ b of {a} and {b}: both must be one of {', '.join(MATMUL_TYPES)}; cast first"
        )
    axes = (*a.without(axis).axes, *b.without(axis).axes)
    return TileType(FP32, axes)


QUAD_PLACES = 16  # that the four lanes of a quad hold of an accumulator's row, four by four


def quad_places(length: int) -> list[int]:
    """Where `quad_order` takes its elements from: place 16 n + 4 q + 2 h + c holds element
    16 n + 8 h + 2 q + c (q below 4, h and c below 2).

    A thread q of a quad holds the columns 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q of 16 of an
    accumulator, and gives columns 4 q to 4 q + 3 of an 8-bit operand (PTX ISA 9.x, wgmma register
    fragments): in this order it gives what it holds.
    """
    quads = range(4)
    within = [8 * h + 2 * q + c for q in quads for h in range(2) for c in range(2)]
    return [first + place for first in range(0, length, QUAD_PLACES) for place in within]


def rename_type(source: TileType, axis: str, name: str) -> TileType:
    """The type with an axis under another name."""
    require_axis("rename", source, axis)
    if name in source.names:
        raise InputError(f"rename of {axis!r} to {name!r}: {source} has that axis")
    axes = tuple((name if own == axis else own, size) for own, size in source.axes)
    return TileType(source.dtype, axes)


def slice_type(source: TileType, axis: str, start: int, size: int) -> TileType:
    """The type of the part [start, start + size) of one axis."""
    require_axis("sub", source, axis)
    if not (start >= 0 and size > 0 and start + size <= source.size(axis)):
        raise InputError(
            f"sub({axis!r}, {start}, {size}) leaves {source}: the axis is {source.size(axis)} long"
        )
    return source.resized(axis, size)


def reduce_scatter_type(
    source: TileType, axis: str, parts: int, width: int | None = None
) -> TileType:
    """The type of one of `parts` parts along `axis` of a sum of tiles: equal ones, or so wide."""
    require_axis("reduce_scatter", source, axis)
    size = source.size(axis)
    if source.dtype is not FP32 or parts < 2 or (width is None and size % parts):
        raise InputError(
            f"reduce_scatter of {source} in {parts} parts along {axis!r}: expected an fp32 tile "
            "whose axis is a multiple of at least 2 parts"
        )
    width = size // parts if width is None else width
    if width < 1 or size % width or size > width * parts:
        raise InputError(
            f"reduce_scatter of {source} in {parts} parts of {width} along {axis!r}: expected a "
            f"width that {size} is a multiple of, and parts for all of it"
        )
    return source.resized(axis, width)


def gather_type(source: TileType, index: TileType, axis: str) -> TileType:
    """The type of `source` with positions along `axis` taken from the int32 tile `index`."""
    require_axis("gather", source, axis)
    if index.dtype is not INT32 or set(index.names) - set(source.names) or axis not in index.names:
        raise InputError(
            f"gather needs an int32 index with axis {axis!r} and axes of {source}, got {index}"
        )
    return source.resized(axis, index.size(axis))


def quad_order_type(source: TileType, axis: str) -> TileType:
    """The type of `source` with the places of every 16 along `axis` in the order of quads."""
    require_axis("quad_order", source, axis)
    if source.size(axis) % QUAD_PLACES:
        raise InputError(
            f"quad_order along {axis!r} of {source}: expected a multiple of {QUAD_PLACES} places"
        )
    return source


def span_type(source: Array, spans: Sequence[Span]) -> TileType:
    """The type of the tile that the ranges `spans` of an array make."""
    if len(spans) != len(source.dims):
        raise InputError(
            f"array {source} has {len(source.dims)} dimensions, {len(spans)} ranges were given"
        )
    axes = tuple((span.axis, span.size) for span in spans if span.size is not None)
    stacked = [span for span in spans if span.others]
    if stacked:
        if len(stacked) > 1 or stacked[0].size is not None or not axes:
            raise InputError(
                f"tile of {source.name}: parts are stacked along the tile's first axis, from the "
                "places given for one dimension that it drops"
            )
        axes = ((axes[0][0], axes[0][1] * len(stacked[0].starts)), *axes[1:])
    if any(length <= 0 for _, length in axes):
        raise InputError(f"tile of {source.name}: sizes {[n for _, n in axes]} must be positive")
    names = [name for name, _ in axes]
    runs = [name for name, _ in groupby(names)]
    if len(set(runs)) != len(runs) or (stacked and runs != names):
        raise InputError(
            f"tile of {source.name}: axes {names}: expected distinct ones, or an axis of ranges "
            "behind one another that are not stacked"
        )
    joined = {name: prod(length for own, length in axes if own == name) for name in runs}
    return TileType(source.dtype, tuple(joined.items()))
