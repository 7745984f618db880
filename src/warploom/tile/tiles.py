"""The tile a user holds: a proxy with numpy's operators that records what is done to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, ParamSpec, cast

import numpy as np

from warploom.errors import InputError
from warploom.tile import typing as rules
from warploom.tile.blame import a_name, refuse, shown
from warploom.tile.dtypes import FP32, INT32, DType
from warploom.tile.index import Index, as_index
from warploom.tile.ir import Array, TileType, Var
from warploom.tile.ops import OPS
from warploom.tile.trace import current

P = ParamSpec("P")
LARGEST = float(np.finfo(np.float32).max)


class Tile:
    """A mutable tile: `t + u` makes a new one, `t += u` and `t[:] = u` change this one.

    Axes have names. Operands are joined by name: a vector along `m` meets every column of a tile
    `[m, n]`. `a @ b` contracts the one axis both have.
    """

    __array_ufunc__ = None  # numpy's numbers leave operators to it, and numpy's functions refuse it

    def __init__(self, var: Var) -> None:
        self.var = var

    @property
    def type(self) -> TileType:
        """Element type and named axes."""
        return self.var.type

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.var.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return self.var.type.shape

    def __repr__(self) -> str:
        return f"<tile {self.var.name}: {self.type}>"

    def __bool__(self) -> bool:
        raise refuse(
            f"the elements of tile {self.var.name} are not known while tracing, so it cannot "
            "decide an if; use where(condition, a, b)"
        )

    def __add__(self, other: Tile | float) -> Tile:
        return elementwise("add", self, other)

    def __radd__(self, other: float) -> Tile:
        return elementwise("add", other, self)

    def __sub__(self, other: Tile | float) -> Tile:
        return elementwise("sub", self, other)

    def __rsub__(self, other: float) -> Tile:
        return elementwise("sub", other, self)

    def __mul__(self, other: Tile | float) -> Tile:
        return elementwise("mul", self, other)

    def __rmul__(self, other: float) -> Tile:
        return elementwise("mul", other, self)

    def __truediv__(self, other: Tile | float) -> Tile:
        return elementwise("div", self, other)

    def __rtruediv__(self, other: float) -> Tile:
        return elementwise("div", other, self)

    def __floordiv__(self, by: int) -> Tile:
        """Quotients of an int32 tile and a whole number above 0, rounded down."""
        given: Any = by
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise refuse(f"// {shown(given)}: expected a whole number above 0")
        return elementwise("floordiv", self, by)

    def __neg__(self) -> Tile:
        return elementwise("neg", self)

    def __abs__(self) -> Tile:
        return elementwise("abs", self)

    def __lt__(self, other: Tile | float | Index) -> Tile:
        return elementwise("lt", self, other)

    def __le__(self, other: Tile | float | Index) -> Tile:
        return elementwise("le", self, other)

    def __gt__(self, other: Tile | float | Index) -> Tile:
        return elementwise("gt", self, other)

    def __ge__(self, other: Tile | float | Index) -> Tile:
        return elementwise("ge", self, other)

    def equals(self, other: Tile | float) -> Tile:
        """Elementwise equality (`==` stays Python's identity)."""
        return elementwise("eq", self, other)

    def differs(self, other: Tile | float) -> Tile:
        """Elementwise inequality; NaN differs from everything."""
        return elementwise("ne", self, other)

    def __and__(self, other: Tile) -> Tile:
        return elementwise("and", self, other)

    def __or__(self, other: Tile) -> Tile:
        return elementwise("or", self, other)

    def __invert__(self) -> Tile:
        return elementwise("not", self)

    def __iadd__(self, other: Tile | float) -> Tile:
        return self._update("add", other)

    def __isub__(self, other: Tile | float) -> Tile:
        return self._update("sub", other)

    def __imul__(self, other: Tile | float) -> Tile:
        return self._update("mul", other)

    def __itruediv__(self, other: Tile | float) -> Tile:
        return self._update("div", other)

    def __setitem__(self, key: slice, value: Tile | float) -> None:
        if key != slice(None):
            raise refuse(f"only t[:] = value assigns to a tile, not t[{key}]")
        self.assign(value)

    def __pow__(self, power: int) -> Tile:
        given: Any = power
        if given not in (2, 3, 4):
            raise refuse(
                f"tile ** {shown(given)}: expected 2, 3 or 4; others are exp2(log2(x) * p), "
                "sqrt(x), reciprocal(x)"
            )
        result = self
        for _ in range(power - 1):
            result = result * self
        return result

    def __eq__(self, other: object) -> bool:
        raise refuse("tile == tile is no Python bool; use x.equals(y) or x.differs(y)")

    __ne__ = __eq__
    __hash__ = object.__hash__

    def __getitem__(self, key: object) -> Tile:
        raise refuse(f"a part of a tile is x.sub(axis, start, size), not x[{shown(key)}]")

    def __iter__(self) -> Any:
        raise refuse("a tile is not a sequence; loops are `for i in loop(n)`")

    def __len__(self) -> int:
        raise refuse(f"tile {self.var.name} has sizes {self.shape}, no len(); use x.shape")

    def __matmul__(self, other: Tile) -> Tile:
        a_tile(other, "@")
        kind = checked(rules.matmul_type, self.type, other.type)
        return emit("mma", kind, (self.var, other.var), stem="product")

    def assign(self, value: Tile | float) -> None:
        """Give this tile the value of another of the same type, or of a number."""
        tracer = current()
        source = value if isinstance(value, Tile) else fill(self.type, a_number(value, "assign"))
        if source.type != self.type:
            raise refuse(
                f"tile {self.var.name} is {self.type} and cannot be assigned a {source.type}; "
                "cast or broadcast it first"
            )
        tracer.append("copy", self.var, (source.var,))

    def cast(self, dtype: DType) -> Tile:
        """The tile in another element type, rounded to nearest even."""
        kind = checked(rules.cast_type, self.type, a_type(dtype, "cast to"))
        return emit("cast", kind, (self.var,), stem=self.var.name)

    def copy(self) -> Tile:
        """The present value as a tile of its own."""
        return emit("copy", self.type, (self.var,), stem=self.var.name)

    @property
    def T(self) -> Tile:  # noqa: N802 (numpy's name)
        """The tile with its two axes exchanged."""
        axes = tuple(reversed(self.type.axes))
        kind = TileType(self.dtype, axes)
        return emit("transpose", kind, (self.var,), stem=self.var.name)

    def rename(self, axis: str, name: str) -> Tile:
        """The tile with an axis under another name: what is along `axis` meets others there."""
        kind = checked(rules.rename_type, self.type, axis, a_name(name, "axis"))
        return emit("rename", kind, (self.var,), stem=self.var.name, axis=axis)

    def sub(self, axis: str, start: int, size: int) -> Tile:
        """The part of the tile from `start`, `size` long, along one axis."""
        numbers: tuple[tuple[str, Any], ...] = (("start", start), ("size", size))
        for what, given in numbers:
            if isinstance(given, bool) or not isinstance(given, Integral):
                raise refuse(f"sub {what} {shown(given)}: expected a whole number")
        kind = checked(rules.slice_type, self.type, axis, start, size)
        return emit("slice", kind, (self.var,), stem=self.var.name, axis=axis, value=start)

    def quad_order(self, axis: str) -> Tile:
        """The tile with the elements of every 16 places along `axis` in another order: place
        4 q + 2 h + c holds element 8 h + 2 q + c (`typing.quad_places`).

        An 8-bit first operand in that order needs no exchange between threads; the second
        operand's array has its elements along the contracted axis in the same order.
        """
        kind = checked(rules.quad_order_type, self.type, axis)
        return emit("quad_order", kind, (self.var,), stem=self.var.name, axis=axis)

    def _update(self, kind: str, other: Tile | float) -> Tile:
        result = elementwise(kind, self, other)
        self.assign(result)
        return self


def emit(kind: str, type_: TileType, srcs: tuple[Var, ...], stem: str = "t", **rest: Any) -> Tile:
    """Append an op with a new destination of type `type_` and give it as a tile."""
    tracer = current()
    dst = tracer.variable(stem, type_)
    tracer.append(kind, dst, srcs, **rest)
    return Tile(dst)


def checked(rule: Callable[P, TileType], *args: P.args, **kwargs: P.kwargs) -> TileType:
    """The type a rule gives; its refusal is raised again at the user's line."""
    try:
        return rule(*args, **kwargs)
    except InputError as error:
        raise refuse(str(error)) from None


def a_tile(value: object, what: str) -> Tile:
    """`value`, which must be a tile; raises `InputError` that says how one is made."""
    if isinstance(value, Tile):
        return value
    if isinstance(value, Array):
        raise refuse(f"{what} of array {value.name}: load a tile of it first, load({value.name})")
    raise refuse(f"{what} of {shown(value)}: expected a tile")


def a_type(value: object, what: str) -> DType:
    """`value`, which must be an element type."""
    if not isinstance(value, DType):
        raise refuse(f"{what} {shown(value)}: expected an element type, such as BF16")
    return value


def a_number(value: object, what: str) -> float:
    """`value`, which must be a number; raises `InputError` that says what it is."""
    if isinstance(value, Array):
        raise refuse(f"{what} of array {value.name}: load a tile of it first, load({value.name})")
    given: Any = value
    if isinstance(given, np.generic):
        given = cast("Any", given).item()
    if not isinstance(given, Real):
        raise refuse(f"{what} of {shown(value)}: expected a tile or a number")
    return given if isinstance(given, int) else float(given)


def elementwise(kind: str, *operands: Tile | float | Index) -> Tile:
    """Apply a unary, binary, comparing or selecting op; numbers become tiles without axes."""
    if not any(isinstance(value, Tile) for value in operands):
        a_tile(operands[0], kind)
    tiles = _operands(kind, operands)
    result = checked(rules.elementwise_type, OPS[kind], [t.type for t in tiles])
    return emit(kind, result, tuple(t.var for t in tiles), stem=kind)


def axes_of(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Named axes of a new tile; raises `InputError` for more than two or an impossible size."""
    for axis, size in sizes.items():
        a_name(axis, "axis")
        given: Any = size
        if isinstance(given, bool) or not isinstance(given, Integral) or given <= 0:
            raise refuse(f"axis {axis}={shown(given)}: sizes of tiles are positive whole numbers")
    if len(sizes) > 2:
        raise refuse(f"a tile with axes {', '.join(sizes)}: expected at most two")
    return tuple((axis, int(size)) for axis, size in sizes.items())


def fill(kind: TileType, value: float) -> Tile:
    """A tile of that type with one value everywhere; raises for one that the type cannot hold."""
    name = kind.dtype.name
    if name == "int32" and not (value == value // 1 and -(2**31) <= value < 2**31):
        raise refuse(f"{value} beside int32: expected a 32-bit whole number, or cast to fp32 first")
    if name == "bool" and value not in (0, 1):
        raise refuse(f"{value} beside conditions: expected True or False")
    if name == "fp32" and LARGEST < abs(value) < math.inf:
        raise refuse(f"{value}: fp32 holds numbers up to {LARGEST:.3g}")
    return emit("fill", kind, (), stem="acc" if kind.axes else "const", value=value)


def _operands(op: str, operands: tuple[Tile | float | Index, ...]) -> list[Tile]:
    # A Python number takes the element type of the first tile that is not a condition.
    types = [t.dtype for t in operands if isinstance(t, Tile) and t.dtype.kind != "bool"]
    kind = types[0] if types else FP32
    result: list[Tile] = []
    for value in operands:
        if isinstance(value, Tile):
            result.append(value)
        elif isinstance(value, Index):
            result.append(emit("coordinate", TileType(INT32, ()), (), "at", start=value))
        else:
            result.append(fill(TileType(kind, ()), a_number(value, op)))
    return result


def coordinate(axis: str, size: int, start: Index | int = 0) -> Tile:
    """int32 vector along `axis`: start, start + 1, ..., start + size - 1."""
    kind = TileType(INT32, axes_of({axis: size}))
    return emit("coordinate", kind, (), stem=f"{axis}_at", axis=axis, start=as_index(start))
