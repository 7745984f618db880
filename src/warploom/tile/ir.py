"""The typed IR of a tile program: what tracing leaves, small enough to print on one screen.

    program := name, arrays, scalars, grid, body
    body    := (op | loop)*
    loop    := index, start, stop, body
    op      := [var <-] kind vars attributes

A var is a tile the program may write more than once, as the user's mutable tile is; an op reads the
present value of its sources and then writes its destination. The meaning is sequential: for every
point of the grid, in any order, run the body from top to bottom. Invariants are those of
`tile.verify`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from warploom.errors import InputError
from warploom.tile.dtypes import DType
from warploom.tile.index import Index


class Derived:
    """A dataclass that keeps what follows from its fields: its copies and pickles have the fields
    alone."""

    def __getstate__(self) -> dict[str, Any]:
        own: Any = self
        return {one.name: getattr(self, one.name) for one in fields(own)}


@dataclass(frozen=True)
class TileType(Derived):
    """The type of a tile: element type and named axes with static sizes, outermost first."""

    dtype: DType
    axes: tuple[tuple[str, int], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axis names."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The axis sizes."""
        return tuple(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The size of one axis."""
        return dict(self.axes)[axis]

    def without(self, axis: str) -> TileType:
        """The type with one axis gone."""
        return replace(self, axes=tuple(pair for pair in self.axes if pair[0] != axis))

    def resized(self, axis: str, size: int) -> TileType:
        """The type with one axis of another size."""
        return replace(self, axes=tuple((n, size if n == axis else s) for n, s in self.axes))

    def with_dtype(self, dtype: DType) -> TileType:
        """The type with another element type."""
        return replace(self, dtype=dtype)

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.dtype}[{inner}]"


@dataclass(frozen=True)
class Var:
    """A tile variable; its name is unique in the program."""

    name: str
    type: TileType

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Array:
    """A parameter in global memory: element type and named dimensions, outermost first.

    Two dimensions of one name are equal. The innermost is contiguous unless `strides` of the call
    say otherwise, which the launch checks.

    With `fragments` the tiles of the last two dimensions lie in memory as the registers of a matmul
    hold them: each 64 rows, and in these each 8 columns, are 128 threads' four elements. What
    hands such an array from kernel to kernel stores it without turning tiles into rows. Vectors of
    the last dimension lie as columns do: of each 16, the four that a thread has are neighbours
    (`Tile.quad_order`).
    """

    name: str
    dtype: DType
    dims: tuple[str, ...]
    fragments: bool = False

    def __str__(self) -> str:
        order = " in fragments" if self.fragments else ""
        return f"{self.name}: {self.dtype}[{', '.join(self.dims)}]{order}"


@dataclass(frozen=True)
class Span:
    """A range of one array dimension: `size` elements from `start`; size None takes one, dropped.

    `axis` is the tile axis the range becomes. From `stop` on a store drops what it is given.
    `others`: a load takes one part of its tile at `start` and one at each of these places, stacked
    along the tile's first axis. Ranges of several dimensions that name one axis are that axis
    together, row by row: two of 16 and of 4 elements an axis of 64.
    """

    start: Index
    size: int | None = None
    axis: str = ""
    stop: Index | None = None
    others: tuple[Index, ...] = ()

    @property
    def starts(self) -> tuple[Index, ...]:
        """Every place at which the range begins."""
        return (self.start, *self.others)

    def __str__(self) -> str:
        stop = "" if self.stop is None else f" below {self.stop}"
        if self.others:
            return f"({', '.join(map(str, self.starts))})"
        return str(self.start) if self.size is None else f"{self.start} +{self.size}{stop}"


def joint_axis(spans: Sequence[Span]) -> str:
    """The tile axis that the ranges of several dimensions become together; "" where none does."""
    axes = [span.axis for span in spans if span.size is not None]
    return next((axis for axis in axes if axes.count(axis) > 1), "")


@dataclass(frozen=True)
class Read:
    """A number from an int32 array, then a symbol of indices: read before the body of a task, or
    of an iteration of the loop that has it."""

    name: str
    array: Array
    at: tuple[Index, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.array.name}[{', '.join(map(str, self.at))}]"


@dataclass(frozen=True)
class Turn:
    """When a store adds to its place: as soon as `number` stores have, which the element `at` of
    an int32 array counts. The first replaces what is there."""

    counts: Array
    at: tuple[Index, ...]
    number: Index

    def __str__(self) -> str:
        return f"in turn {self.number} of {self.counts.name}[{', '.join(map(str, self.at))}]"


@dataclass(frozen=True)
class Op:
    """One operation. Which fields count depends on `kind`; `tile.ops` is the table."""

    id: int
    kind: str
    dst: Var | None
    srcs: tuple[Var, ...] = ()
    array: Array | None = None
    spans: tuple[Span, ...] = ()
    axis: str = ""
    start: Index | None = None
    value: float | int | None = None
    turn: Turn | None = None
    where: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """The name of this op as a node of a schedule, such as `mma.4`."""
        return f"{self.kind}.{self.id}"

    def on(self, var: Callable[[Var], Var]) -> Op:
        """The op with `var(tile)` in place of every tile it reads and of the one it writes."""
        dst = None if self.dst is None else var(self.dst)
        return replace(self, dst=dst, srcs=tuple(map(var, self.srcs)))

    def __str__(self) -> str:
        words = [self.kind, *([", ".join(v.name for v in self.srcs)] if self.srcs else [])]
        if self.array is not None:
            words.append(f"{self.array.name}[{', '.join(str(span) for span in self.spans)}]")
        if self.axis:
            words.append(f"axis {self.axis}")
        if self.start is not None:
            words.append(f"from {self.start}")
        if self.value is not None:
            words.append(f"{'edge ' if self.kind == 'load' else ''}{self.value}")
        if self.turn is not None:
            words.append(str(self.turn))
        text = " ".join(words)
        return text if self.dst is None else f"{self.dst}: {self.dst.type} = {text}"


@dataclass(frozen=True)
class Loop:
    """A counted loop: `index` runs over start, start + 1, ..., stop - 1; empty if stop <= start.

    `until` promises that iterations from there on change nothing in a part of the tiles: the rows
    that `part_begin` and `part_end` name. Whoever runs that part alone may leave them out.
    `reads` are the numbers that an iteration reads.
    """

    index: str
    start: Index
    stop: Index
    body: tuple[Op | Loop, ...]
    where: str = field(default="", compare=False)
    until: Index | None = None
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True)
class Program(Derived):
    """A tile program: what every point of `grid` does, in one sequential order."""

    name: str
    arrays: tuple[Array, ...]
    grid: tuple[tuple[str, Index], ...]
    body: tuple[Op | Loop, ...]
    scalars: tuple[Var, ...] = ()
    reads: tuple[Read, ...] = ()

    def array(self, name: str) -> Array:
        """The parameter of that name."""
        for array in self.arrays:
            if array.name == name:
                return array
        names = ", ".join(a.name for a in self.arrays)
        raise InputError(f"program {self.name} has no array {name!r}; it has {names}")

    @property
    def dims(self) -> tuple[str, ...]:
        """Every distinct dimension name, in order of first appearance."""
        return tuple(dict.fromkeys(dim for array in self.arrays for dim in array.dims))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def ops(self) -> Iterator[Op]:
        """Every op, in program order, loops entered once."""
        return iter(self._ops)

    @cached_property
    def _ops(self) -> tuple[Op, ...]:
        return tuple(walk(self.body))

    def loops(self) -> tuple[Loop, ...]:
        """The loops of the top level."""
        return tuple(item for item in self.body if isinstance(item, Loop))

    def every_read(self) -> tuple[Read, ...]:
        """The numbers that tasks read, then those that iterations read."""
        return (*self.reads, *(read for loop in _nested(self.body) for read in loop.reads))

    def __str__(self) -> str:
        head = ", ".join([*map(str, self.arrays), *(f"{s.name}: {s.type}" for s in self.scalars)])
        lines = [f"program {self.name}({head})"]
        lines += [f"  for each {name} < {extent}" for name, extent in self.grid]
        lines += [f"  {read}" for read in self.reads]
        lines += [f"  {line}" for line in _lines(self.body)]
        return "\n".join(lines) + "\n"


def walk(body: tuple[Op | Loop, ...]) -> Iterator[Op]:
    """Every op of a body, loops entered once."""
    for item in body:
        if isinstance(item, Loop):
            yield from walk(item.body)
        else:
            yield item


def _nested(body: tuple[Op | Loop, ...]) -> Iterator[Loop]:
    """Every loop of a body, the outer before the inner."""
    for item in body:
        if isinstance(item, Loop):
            yield item
            yield from _nested(item.body)


def _lines(body: tuple[Op | Loop, ...]) -> Iterator[str]:
    for item in body:
        if isinstance(item, Op):
            yield f"{item.id:>3}  {item}"
            continue
        until = "" if item.until is None else f", a part until {item.until}"
        yield f"     loop {item.index} from {item.start} to {item.stop}{until}:"
        yield from (f"       {read}" for read in item.reads)
        yield from (f"  {line}" for line in _lines(item.body))
