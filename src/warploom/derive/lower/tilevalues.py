"""Values as tiles at the present position of the loops.

Three kinds of axes are no tile axes: `points` are cut to one position by the grid or a loop,
`unrolled` ones are walked while tracing (the taps of a convolution, the k of a top-k).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warploom import tile as tl
from warploom.derive.formula.graph import Node
from warploom.derive.formula.ops import MASKED
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lower.boxes import EMPTY, SIMPLE, clean, joined, largest
from warploom.derive.lower.channels import Channels
from warploom.errors import InputError


@dataclass
class TileValues:
    """Where each loop stands, the tile of each value, the states.

    `tail`: streamed axes whose present slices may pass the end; `masked`: whether the present
    slices are cut by the mask that bounds their loop.
    """

    kernel: Kernel
    arrays: Mapping[str, tl.Array]
    dtype: tl.DType
    points: frozenset[str]
    unrolled: frozenset[str] = frozenset()
    start: dict[str, Any] = field(default_factory=dict[str, Any])
    position: dict[str, int] = field(default_factory=dict[str, int])
    tiles: dict[str, tl.Tile] = field(default_factory=dict[str, tl.Tile])
    state: dict[str, tl.Tile] = field(default_factory=dict[str, tl.Tile])
    seen: dict[int, tl.Tile] = field(default_factory=dict[int, tl.Tile])
    channels: dict[str, Channels] = field(default_factory=dict[str, Channels])
    tail: set[str] = field(default_factory=set[str])
    masked: bool = True

    # --- where values are ------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """A value at the present position of the unrolled axes it has."""
        at = [a for a in self.kernel.body.axes_of(name) if a in self.unrolled]
        return name + "".join(f"@{a}{self.position[a]}" for a in at)

    def is_loaded(self, name: str) -> bool:
        """Whether a value is an external array, perhaps through a view."""
        node = self.kernel.body.node.get(name)
        return node is None or (node.kind == "view" and node.inputs[0] in self.kernel.body.array)

    def keys(self, node: Node) -> list[str]:
        """A value at all positions of its unrolled axes (at most one axis)."""
        loose = [a for a in node.axes if a in self.unrolled]
        if not loose:
            return [node.name]
        return [f"{node.name}@{loose[0]}{i}" for i in range(self.kernel.body.size[loose[0]])]

    def at_keys(self, node: Node) -> Iterator[str]:
        """The same, standing at each position in turn."""
        loose = [a for a in node.axes if a in self.unrolled]
        for here, key in enumerate(self.keys(node)):
            self.position |= dict.fromkeys(loose, here)
            yield key

    def length(self, axis: str) -> int:
        """The tile length of an axis."""
        index = self.kernel.depth_of_axis.get(axis)
        if index is None:
            return self.kernel.body.size[axis]
        return self.kernel.tile[self.kernel.loops[index].symbol]

    def shape(self, axes: tuple[str, ...]) -> dict[str, int]:
        """Tile axes and lengths."""
        return {clean(a): self.length(a) for a in axes if not self._cut(a)}

    def _cut(self, axis: str) -> bool:
        """Whether tiles do not carry an axis."""
        return axis in self.points or axis in self.unrolled

    def spans(self, axes: tuple[str, ...], rename: Mapping[str, str] | None = None) -> list[Any]:
        """The ranges of an array's dimensions at the current position."""
        spans: list[Any] = []
        for axis in axes:
            begin = self.position[axis] if axis in self.unrolled else self.start.get(axis, 0)
            name = clean((rename or {}).get(axis, axis))
            spans.append(begin if self._cut(axis) else tl.span(begin, self.length(axis), name))
        return spans

    def load_tile(self, name: str, rename: Mapping[str, str] | None = None) -> tl.Tile:
        """The current tile of an external array, in its stored type."""
        return tl.load(
            self.arrays[clean(name)], *self.spans(self.kernel.body.axes_of(name), rename)
        )

    def raw(self, name: str) -> tl.Tile:
        """The current tile of an array or of a view of one, loaded once a position."""
        key = f"raw {self.key(name)}"
        if key not in self.tiles:
            node = self.kernel.body.node.get(name)
            self.tiles[key] = self.load_tile(name) if node is None else self._window(node)
        return self.tiles[key]

    def _window(self, node: Node) -> tl.Tile:
        """A view of an array: each source dimension starts where its driving axes stand."""
        source = node.inputs[0]
        mapping, where = dict(node.attr("map")), list[Any]()
        for axis in self.kernel.body.axes_of(source):
            begin: Any = 0
            tiled: list[tuple[str, int]] = []
            for name, stride in mapping[axis]:
                at = self.position[name] if name in self.unrolled else self.start.get(name, 0)
                begin = begin + at * stride
                tiled += [] if self._cut(name) else [(name, stride)]
            if len(tiled) > 1 or any(stride != 1 for _, stride in tiled):
                raise InputError(
                    f"box {node.name!r}: axis {axis!r} of {source} is read with strides "
                    f"{dict(mapping[axis])}; a tile is a contiguous range: stream or unroll all "
                    "driving axes but one of stride 1"
                )
            spans = [tl.span(begin, self.length(name), clean(name)) for name, _ in tiled]
            where.append(spans[0] if spans else begin)
        return tl.load(self.arrays[clean(source)], *where)

    # --- values ----------------------------------------------------------------------------------

    def value(self, name: str) -> tl.Tile:
        """A value in fp32, axes in the box's order."""
        key = self.key(name)
        if key in self.tiles:
            return self.tiles[key]
        node = self.kernel.body.node.get(name)
        if node is not None and self.kernel.closed_loops(node):
            return self.state[key]
        if node is None or self.is_loaded(name):
            raw = self.raw(name)
            self.tiles[key] = raw if raw.dtype is tl.FP32 else raw.cast(tl.FP32)
        elif node.op == "topk":
            found = self.top(node)
            self.tiles |= dict(zip(self.keys(node), found, strict=True))
        else:
            self.tiles[key] = self._compute(node)
        return self.tiles[key]

    def _compute(self, node: Node) -> tl.Tile:
        """One box on tiles."""
        if node.kind == "const":
            return tl.full(float(node.attr("value")), tl.FP32)
        if node.kind == "mask":
            return self._mask(node)
        if node.kind in ("reduce", "contract"):
            return self.reduced(node)
        if node.kind in ("scan", "scan_contract"):
            return self.scanned(node)
        values = [self.value(name) for name in node.inputs]
        if node.op not in SIMPLE:
            raise InputError(f"box {node.name!r} ({node.op}) has no tile form")
        return self.ordered(SIMPLE[node.op](*(self.ordered(v, node) for v in values)), node)

    def ordered(self, value: tl.Tile, node: Node) -> tl.Tile:
        """A two-axis tile transposed when its order differs from the box's."""
        wanted = [clean(a) for a in node.axes if clean(a) in value.type.names]
        return value.T if len(wanted) == 2 and list(value.type.names) != wanted else value

    def scanned(self, node: Node) -> tl.Tile:
        """The present slice of a scan; the walk knows its state."""
        raise InputError(f"box {node.name!r}: a scan has no tile form outside of its loop")

    def _mask(self, node: Node) -> tl.Tile:
        """where(column <= row + shift [and within the window], x, fill)."""
        value = self.value(node.inputs[0])
        row, column = str(node.attr("row")), str(node.attr("column"))
        if not self.masked and (column, node.name) in self.kernel.bound_by:
            return value
        shift = tl.size(clean(column)) - tl.size(clean(row))
        rows = tl.coordinate(clean(row), self.length(row), self.start.get(row, 0) + shift)
        columns = tl.coordinate(clean(column), self.length(column), self.start.get(column, 0))
        fill = float(node.attr("fill", MASKED))
        by_rows = list(value.type.names) == [clean(row), clean(column)]
        result = tl.where(rows >= columns if by_rows else columns <= rows, value, fill)
        if node.attr("window"):
            last = columns + int(node.attr("window"))
            result = tl.where(rows < last if by_rows else last > rows, result, fill)
        return self.ordered(result, node)

    def covered(self, value: tl.Tile, axes: tuple[str, ...], empty: float) -> tl.Tile:
        """Positions beyond the end of a looped axis replaced by the reduction's identity."""
        for axis in axes:
            streamed = axis in self.kernel.stream_index
            looped = axis in self.start and (axis in self.tail or not streamed)
            if clean(axis) in value.type.names and (looped or axis in self.kernel.padded):
                place = tl.coordinate(clean(axis), self.length(axis), self.start.get(axis, 0))
                value = tl.where(place < tl.size(clean(axis)), value, empty)
        return value

    def reduced(self, node: Node) -> tl.Tile:
        """A reduction or contraction of the current slice."""
        total = self._over(node, [axis for axis in node.over if axis in self.unrolled])
        if node.op != "mean" or self.kernel.closed_loops(node):
            return total
        inside = [self.length(a) for a in node.over if a not in self.kernel.padded]
        total = total * (1.0 / float(np.prod(inside)))
        for axis in node.over:
            total = total / tl.number(tl.size(clean(axis))) if axis in self.kernel.padded else total
        return total

    def _over(self, node: Node, loose: list[str]) -> tl.Tile:
        """The unrolled axes walked, the rest reduced as tiles."""
        if not loose:
            return self._reduce_tile(node)
        axis, total, before = loose[0], None, self.position.get(loose[0])
        monoid = node.op if node.kind == "reduce" else "sum"
        for here in range(self.kernel.body.size[axis]):
            self.position[axis] = here
            part = self._over(node, loose[1:])
            total = part if total is None else joined(monoid, total, part)
        self.position.pop(axis)
        if before is not None:
            self.position[axis] = before
        assert total is not None
        return total

    def _reduce_tile(self, node: Node) -> tl.Tile:
        """A reduction of one tile (a mean gives its sum)."""
        if node.kind == "contract":
            product = self._product(node)
            if product is not None:
                return product
            value = self.value(node.inputs[0])
            for name in node.inputs[1:]:
                value = value * self.value(name)
            return self._sum(self.covered(value, node.over, 0.0), node)
        value = self.covered(self.value(node.inputs[0]), node.over, EMPTY[node.op])
        if node.op in ("sum", "mean"):
            return self._sum(value, node)
        along = tl.max_along if node.op == "max" else tl.min_along
        for axis in node.over:
            value = along(value, clean(axis)) if clean(axis) in value.type.names else value
        return value

    def _sum(self, value: tl.Tile, node: Node) -> tl.Tile:
        """Sum along all axes the box removes."""
        for axis in node.over:
            if clean(axis) in value.type.names:
                value = tl.sum_along(value, clean(axis))
        return self.ordered(value, node)

    def _product(self, node: Node) -> tl.Tile | None:
        """A matrix product when both operands have two axes and share exactly the summed one."""
        summed = [axis for axis in node.over if not self._cut(axis)]
        if len(node.inputs) != 2 or len(summed) != 1:
            return None
        axes = [[a for a in self.kernel.body.axes_of(n) if not self._cut(a)] for n in node.inputs]
        if any(len(each) != 2 for each in axes) or set(axes[0]) & set(axes[1]) != set(summed):
            return None
        a, b = (self._operand(name, node) for name in node.inputs)
        first = [clean(axis) for axis in node.axes if not self._cut(axis)]
        return a @ b if first[0] in a.type.names else b @ a

    def _operand(self, name: str, node: Node) -> tl.Tile:
        """A product's operand in the element type, zero outside the array."""
        if self.is_loaded(name):
            return self.raw(name)
        return self.covered(self.value(name), node.over, 0.0).cast(self.dtype)

    def top(self, node: Node) -> list[tl.Tile]:
        """The k largest of the current slice, one tile each."""
        (axis,) = node.over
        value = self.covered(self.value(node.inputs[0]), node.over, EMPTY["topk"])
        return largest(value, clean(axis), int(node.attr("k")))
