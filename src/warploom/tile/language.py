"""The functions a user writes tile programs with; `from warploom.tile import *` gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from warploom.tile import typing as rules
from warploom.tile.blame import a_name, refuse, shown
from warploom.tile.dtypes import FP32, INT32, DType
from warploom.tile.index import Index, IndexLike, as_index
from warploom.tile.ir import Array, Span, TileType, Turn
from warploom.tile.tiles import (
    Tile,
    a_number,
    a_tile,
    a_type,
    axes_of,
    checked,
    elementwise,
    emit,
    fill,
)
from warploom.tile.trace import current

EDGES = (0.0, -math.inf, math.inf)


def span(start: IndexLike, size: int, axis: str = "", stop: IndexLike | None = None) -> Span:
    """`size` elements from `start` of an array dimension; the tile axis is named after it.

    `stop`: a store drops elements from there on; loads take no `stop` (mask what they give).
    Ranges of several dimensions that name one axis are that axis together, row by row.
    """
    given: Any = size
    if isinstance(given, bool) or not isinstance(given, Integral) or given <= 0:
        raise refuse(f"span of {shown(given)} elements: expected a positive whole number")
    if axis != "":
        a_name(axis, "axis of a span")
    return Span(as_index(start), int(size), axis, None if stop is None else as_index(stop))


Place = Span | IndexLike | Sequence[IndexLike]


def _spans(target: Array, where: tuple[Place, ...]) -> tuple[Span, ...]:
    given: Any = target
    if not isinstance(given, Array):
        raise refuse(f"{shown(given)} is no array parameter of the program")
    if len(where) != len(target.dims):
        raise refuse(
            f"array {target} has {len(target.dims)} dimensions, {len(where)} ranges were given"
        )
    result: list[Span] = []
    for dim, item in zip(target.dims, where, strict=True):
        if isinstance(item, Span):
            result.append(Span(item.start, item.size, item.axis or dim, item.stop))
        elif isinstance(item, Sequence):
            if not item:
                raise refuse(f"range of {target}: no places are given for dimension {dim!r}")
            first, *others = map(as_index, item)
            result.append(Span(first, None, dim, None, tuple(others)))
        else:
            result.append(Span(as_index(item), None, dim))
    return tuple(result)


def load(source: Array, *where: Place, edge: float = 0.0) -> Tile:
    """Read a tile: one range or index for each dimension; outside of the array reads `edge`.

    Several indices of one dimension give one part of the tile each, stacked along its first axis:
    `load(k, [page, next_page], span(0, 64), span(0, 128))` is `[128, 128]`.
    """
    if edge not in EDGES:
        raise refuse(f"load edge={edge}: expected 0.0, inf or -inf")
    spans = _spans(source, where)
    if any(item.stop is not None for item in spans):
        raise refuse(f"load of {source} with a stop: only stores drop elements; mask the tile")
    kind = checked(rules.span_type, source, spans)
    return emit("load", kind, (), stem=f"{source.name}_t", array=source, spans=spans, value=edge)


Turned = tuple[Array, Sequence[IndexLike], IndexLike]  # of a store: counts, a place and a number


def store(
    target: Array,
    *where: Span | IndexLike,
    tile: Tile,
    add: bool = False,
    turn: Turned | None = None,
) -> None:
    """Write (or add) a tile to a range of an array; elements outside of the array are dropped.

    What tasks add to one place adds up in any order, unless each says which its `turn` is:
    `turn=(counts, (i, j), n)` adds when `counts[i, j]`, an int32 array of zeros, says that n have,
    and counts. All that add to a place have the turns 0, 1, 2, ... there, each in a task that comes
    behind those of the turns before it. Turn 0 replaces what is there.
    """
    spans = _spans(target, where)
    a_tile(tile, "store")
    given: Any = add
    if not isinstance(given, bool):
        raise refuse(f"store add={shown(given)}: expected True or False")
    kind = "store_add" if add else "store"
    current().append(kind, None, (tile.var,), array=target, spans=spans, turn=_turn(add, turn))


def _turn(add: bool, given: Turned | None) -> Turn | None:
    if given is None:
        return None
    counts, at, number = given
    if not add or counts.dtype != INT32 or len(at) != len(counts.dims):
        raise refuse(
            f"store turn={len(at)} indices of {counts}: expected add=True, an int32 array and an "
            "index for each of its dimensions"
        )
    return Turn(counts, tuple(map(as_index, at)), as_index(number))


def zeros(dtype: DType = FP32, **axes: int) -> Tile:
    """A tile of zeros: `zeros(m=128, n=256)`."""
    return full(0.0, dtype, **axes)


def full(value: float, dtype: DType = FP32, **axes: int) -> Tile:
    """A tile with one value everywhere."""
    return fill(TileType(a_type(dtype, "full"), axes_of(axes)), a_number(value, "full"))


def scalar(name: str, dtype: DType = FP32) -> Tile:
    """A number given at launch, as a tile without axes."""
    tracer = current()
    a_name(name, "scalar")
    var = tracer.variable(name, TileType(a_type(dtype, "scalar"), ()))
    if var.name != name:
        raise refuse(f"scalar {name!r} was declared before")
    tracer.scalars.append(var)
    return Tile(var)


def number(value: IndexLike, dtype: DType = FP32) -> Tile:
    """The value of an index expression (a size, a position) as a tile without axes."""
    return emit("coordinate", TileType(INT32, ()), (), "at", start=as_index(value)).cast(dtype)


def exp(x: Tile) -> Tile:
    """e to the power x."""
    return elementwise("exp", x)


def exp2(x: Tile) -> Tile:
    """2 to the power x: one MUFU instruction on the GPU."""
    return elementwise("exp2", x)


def log(x: Tile) -> Tile:
    """Natural logarithm."""
    return elementwise("log", x)


def log2(x: Tile) -> Tile:
    """Logarithm to base 2."""
    return elementwise("log2", x)


def sqrt(x: Tile) -> Tile:
    """Square root."""
    return elementwise("sqrt", x)


def rsqrt(x: Tile) -> Tile:
    """1 / sqrt(x)."""
    return elementwise("rsqrt", x)


def reciprocal(x: Tile) -> Tile:
    """1 / x."""
    return elementwise("reciprocal", x)


def tanh(x: Tile) -> Tile:
    """Hyperbolic tangent."""
    return elementwise("tanh", x)


def erf(x: Tile) -> Tile:
    """Error function."""
    return elementwise("erf", x)


def gelu(x: Tile) -> Tile:
    """x/2 (1 + erf(x / sqrt 2)), the exact form."""
    return elementwise("gelu", x)


def gelu_tanh(x: Tile) -> Tile:
    """x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): at most 4.8e-4 from `gelu`."""
    return elementwise("gelu_tanh", x)


def sin(x: Tile) -> Tile:
    """Sine."""
    return elementwise("sin", x)


def cos(x: Tile) -> Tile:
    """Cosine."""
    return elementwise("cos", x)


def relu(x: Tile) -> Tile:
    """max(x, 0), NaN kept."""
    return elementwise("relu", x)


def maximum(x: Tile, y: Tile | float | Index) -> Tile:
    """The larger, elementwise; the number when one is NaN."""
    return elementwise("max", x, y)


def minimum(x: Tile, y: Tile | float | Index) -> Tile:
    """The smaller, elementwise; the number when one is NaN."""
    return elementwise("min", x, y)


def low_nibble(x: Tile) -> Tile:
    """The signed number, -8 to 7, in the low four bits of each element of an int8 tile."""
    return elementwise("low_nibble", x)


def high_nibble(x: Tile) -> Tile:
    """The signed number, -8 to 7, in the high four bits of each element of an int8 tile."""
    return elementwise("high_nibble", x)


def philox(row: Tile, column: Tile, key: Tile, second_key: Tile) -> Tile:
    """32 random bits of each row and column, as int32, by Philox4x32-10: the same for the same
    numbers. Four columns from a multiple of 4 on are the words of one block."""
    return elementwise("philox", row, column, key, second_key)


def where(condition: Tile, x: Tile | float, y: Tile | float) -> Tile:
    """x where the condition holds, else y."""
    return elementwise("where", condition, x, y)


def _reduce(kind: str, x: Tile, axis: str) -> Tile:
    a_tile(x, kind)
    result = checked(rules.reduce_type, kind, x.type, axis)
    return emit(kind, result, (x.var,), stem=kind.removeprefix("reduce_"), axis=axis)


def sum_along(x: Tile, axis: str) -> Tile:
    """Sum along an axis, which goes."""
    return _reduce("reduce_sum", x, axis)


def product_along(x: Tile, axis: str) -> Tile:
    """Product along an axis, which goes."""
    return _reduce("reduce_prod", x, axis)


def max_along(x: Tile, axis: str) -> Tile:
    """Largest element along an axis, which goes."""
    return _reduce("reduce_max", x, axis)


def min_along(x: Tile, axis: str) -> Tile:
    """Smallest element along an axis, which goes."""
    return _reduce("reduce_min", x, axis)


def argmax_along(x: Tile, axis: str) -> Tile:
    """Position (int32) of the first largest element along an axis, which goes."""
    return _reduce("argmax", x, axis)


def cumsum(x: Tile, axis: str) -> Tile:
    """Running sum along an axis."""
    a_tile(x, "cumsum")
    checked(rules.scan_type, "cumsum", x.type, axis)
    return emit("cumsum", x.type, (x.var,), stem="cumsum", axis=axis)


def lower_inverse(x: Tile) -> Tile:
    """The inverse of a unit lower triangular tile.

    `x: fp32[r, n]`, both 64 long, of which only what is below the diagonal counts: with L of those
    elements the result is (1 + L)^-1. Emitted code has blocks of 8 rows in fp32, and makes the rest
    of them by matmuls of fp16 numbers with sums in fp32.
    """
    a_tile(x, "lower_inverse")
    checked(rules.inverse_type, "lower_inverse", x.type)
    return emit("lower_inverse", x.type, (x.var,), stem="inverse", axis=x.type.names[1])


def gather(x: Tile, index: Tile, axis: str) -> Tile:
    """Take along `axis` the positions in the int32 tile `index`; positions outside are refused."""
    a_tile(x, "gather")
    a_tile(index, "gather index")
    result = checked(rules.gather_type, x.type, index.type, axis)
    return emit("gather", result, (x.var, index.var), stem="gather", axis=axis)


def reduce_scatter(x: Tile, over: Index, parts: int, along: str, width: int | None = None) -> Tile:
    """Tasks along a grid axis add up their tiles: task p of them gets part p of the sum.

    `over` is that axis' index, `parts` its static extent; the sum is fp32, added in the order of
    the axis, and cut along the tile's axis `along` in equal parts, or in parts `width` long: the
    first tasks then get them, and the others zeros. Outside of loops only.
    """
    a_tile(x, "reduce_scatter")
    given: Any = over
    if not isinstance(given, Index):
        raise refuse(f"reduce_scatter over {shown(given)}: expected an index that grid(...) gave")
    result = checked(rules.reduce_scatter_type, x.type, along, parts, width)
    return emit("reduce_scatter", result, (x.var,), x.var.name, axis=along, start=over, value=parts)


def sigmoid(x: Tile) -> Tile:
    """1 / (1 + e^-x)."""
    return reciprocal(exp(-x) + 1.0)


def silu(x: Tile) -> Tile:
    """x times sigmoid(x)."""
    return x * sigmoid(x)


def leaky_relu(x: Tile, slope: float = 0.01) -> Tile:
    """x where positive, slope times x elsewhere."""
    return where(x > 0.0, x, x * slope)


def causal(rows: Tile, cols: Tile, x: Tile, fill_value: float = -math.inf) -> Tile:
    """Keep x where column <= row, by absolute coordinates; else `fill_value`."""
    # In this order two vectors make a tile [rows, cols].
    return where(rows >= cols, x, fill_value)


class Complex:
    """A tile of complex numbers as a pair of real ones."""

    def __init__(self, re: Tile, im: Tile) -> None:
        a_tile(re, "complex pair")
        a_tile(im, "complex pair")
        if re.type != im.type:
            raise refuse(f"complex pair of {re.type} and {im.type}: both parts have one type")
        self.re, self.im = re, im

    @staticmethod
    def _pair(other: object) -> Complex:
        if not isinstance(other, Complex):
            raise refuse(f"complex pair with {shown(other)}: expected another Complex(re, im)")
        return other

    def __add__(self, other: Complex) -> Complex:
        other = self._pair(other)
        return Complex(self.re + other.re, self.im + other.im)

    def __sub__(self, other: Complex) -> Complex:
        other = self._pair(other)
        return Complex(self.re - other.re, self.im - other.im)

    def __mul__(self, other: Complex) -> Complex:
        other = self._pair(other)
        re = self.re * other.re - self.im * other.im
        return Complex(re, self.re * other.im + self.im * other.re)

    def __matmul__(self, other: Complex) -> Complex:
        other = self._pair(other)
        re = self.re @ other.re
        re -= self.im @ other.im
        im = self.re @ other.im
        im += self.im @ other.re
        return Complex(re, im)

    def __truediv__(self, other: Complex) -> Complex:
        other = self._pair(other)
        scale = reciprocal(other.re * other.re + other.im * other.im)
        product = self * other.conj()
        return Complex(product.re * scale, product.im * scale)

    def exp(self) -> Complex:
        """e to this power."""
        size = exp(self.re)
        return Complex(size * cos(self.im), size * sin(self.im))

    @property
    def T(self) -> Complex:  # noqa: N802 (numpy's name)
        """Both parts with their axes exchanged."""
        return Complex(self.re.T, self.im.T)

    def cast(self, dtype: DType) -> Complex:
        """Both parts in another element type."""
        return Complex(self.re.cast(dtype), self.im.cast(dtype))

    def rename(self, axis: str, name: str) -> Complex:
        """Both parts with an axis under another name."""
        return Complex(self.re.rename(axis, name), self.im.rename(axis, name))

    def copy(self) -> Complex:
        """The present value as a pair of its own."""
        return Complex(self.re.copy(), self.im.copy())

    def conj(self) -> Complex:
        """The complex conjugate."""
        return Complex(self.re, -self.im)
