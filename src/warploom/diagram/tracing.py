"""One trace of a kernel in the tile language: the nest, its states, each box on tiles.

`lower.lower` sets it up; this is the walk. Accumulation is fp32; positions beyond the end of an
axis are replaced by the identity of the reduction that reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warploom import tile as tl
from warploom.diagram.graph import Node
from warploom.diagram.kernel import Kernel
from warploom.diagram.ops import MASKED
from warploom.diagram.streaming import Correction, parse
from warploom.errors import InputError


def _divide(x: tl.Tile, y: tl.Tile) -> tl.Tile:
    """x over y."""
    return x / y


def _square(x: tl.Tile) -> tl.Tile:
    """x squared."""
    return x * x


SIMPLE: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "maximum": tl.maximum,
    "neg": operator.neg,
    "abs": abs,
    "square": _square,
    "exp": tl.exp,
    "log": tl.log,
    "sqrt": tl.sqrt,
    "rsqrt": tl.rsqrt,
    "recip": tl.reciprocal,
    "relu": tl.relu,
    "sigmoid": tl.sigmoid,
    "silu": tl.silu,
    "tanh": tl.tanh,
    "sin": tl.sin,
    "cos": tl.cos,
}
"""Boxes with a tile operator of the same meaning."""
EMPTY = {"sum": 0.0, "mean": 0.0, "max": MASKED, "min": -MASKED}
"""What a masked position and an untouched state hold."""


def clean(name: str) -> str:
    """A name the tile language accepts."""
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"v{text}"


@dataclass
class Lowering:
    """One trace in progress: where each loop stands and the tile of each value."""

    kernel: Kernel
    arrays: Mapping[str, tl.Array]
    dtype: tl.DType
    batch: frozenset[str]
    start: dict[str, Any] = field(default_factory=dict[str, Any])
    tiles: dict[str, tl.Tile] = field(default_factory=dict[str, tl.Tile])
    state: dict[str, tl.Tile] = field(default_factory=dict[str, tl.Tile])
    seen: dict[int, tl.Tile] = field(default_factory=dict[int, tl.Tile])

    def run(self) -> None:
        """The grid, then the nest."""
        groups = [each for each in self.kernel.loops if each.kind == "group"]
        extents = {
            clean(each.axis): tl.cdiv(tl.size(clean(each.axis)), self.kernel.tile[each.symbol])
            for each in groups
        }
        indices = tl.grid(**extents) if extents else ()
        for loop, index in zip(groups, indices, strict=True):
            self.start[loop.axis] = index * self.kernel.tile[loop.symbol]
        self._inside(self.kernel.outer - 1)

    def _inside(self, depth: int) -> None:
        """What happens inside loop `depth`, inner loop included."""
        inner = depth + 1
        if inner < len(self.kernel.loops):
            self._open(inner)
            loop = self.kernel.loops[inner]
            step = self.kernel.tile[loop.symbol]
            low, high = self._bounds(loop.axis, step)
            outside = dict(self.tiles)
            self._hoist(depth)
            outside |= self.tiles
            for index in tl.loop(low, high):
                self.start[loop.axis] = index * step
                self._inside(inner)
                self.tiles = dict(outside)
            self.start.pop(loop.axis)
        for node in self.kernel.body.nodes:
            if node.kind == "const" or self.kernel.work_depth(node) != depth:
                continue
            if self.kernel.closed_loops(node):
                self._accumulate(node)
            elif node in self.kernel.scans:
                self.tiles[node.name] = self._scan(node)
        if inner < len(self.kernel.loops):
            for node in self.kernel.states:
                if min(self.kernel.closed_loops(node)) == inner:
                    self.tiles[node.name] = self.state[node.name]
        for name in self.kernel.body.outputs:
            if self.kernel.result_depth[name] == depth:
                self._store(name)

    def _hoist(self, depth: int) -> None:
        """Compute before the inner loop what does not vary in it."""
        for array in self.kernel.body.inputs:
            if self.kernel.result_depth[array.name] <= depth:
                self._value(array.name)

    def _open(self, index: int) -> None:
        """Initial states of the loop about to run."""
        for node in self.kernel.states:
            closed = self.kernel.closed_loops(node)
            if min(closed) == index:
                monoid = node.op if node.kind == "reduce" else "sum"
                self.state[node.name] = tl.full(EMPTY[monoid], tl.FP32, **self._shape(node.axes))
        means = [
            n
            for n in self.kernel.states
            if n.op == "mean" and min(self.kernel.closed_loops(n)) == index
        ]
        if means:
            self.seen[index] = tl.full(0.0, tl.FP32)
        for node in self.kernel.scans:
            if self.kernel.depth_of_axis[self.kernel.scan_axis(node)] == index:
                k, v = (self.kernel.body.axes_of(name) for name in node.inputs[1:])
                time = str(node.attr("time"))
                axes = tuple(a for a in (*k, *v) if a != time)
                self.state[node.name] = tl.zeros(tl.FP32, **self._shape(axes))

    def _bounds(self, axis: str, step: int) -> tuple[Any, Any]:
        """The slices to visit, fewer where a mask bounds them."""
        name = clean(axis)
        stop = tl.cdiv(tl.size(name), step)
        box = dict(self.kernel.bound_by).get(axis)
        if box is None:
            return 0, stop
        mask = self.kernel.body.node[box]
        row = str(mask.attr("row"))
        shift = tl.size(name) - tl.size(clean(row))
        rows = self.kernel.tile[self.kernel.loops[self.kernel.depth_of_axis[row]].symbol]
        stop = tl.minimum_index(stop, tl.cdiv(self.start[row] + (rows + shift), step))
        window = int(mask.attr("window"))
        if not window:
            return 0, stop
        return tl.maximum_index(0, self.start[row] + shift - (window - 1)) // step, stop

    def _length(self, axis: str) -> int:
        """The tile length of an axis."""
        index = self.kernel.depth_of_axis.get(axis)
        if index is None:
            return self.kernel.body.size[axis]
        return self.kernel.tile[self.kernel.loops[index].symbol]

    def _point(self, axis: str) -> bool:
        """Whether an axis is cut to single positions, so that tiles do not carry it."""
        return axis in self.batch

    def _shape(self, axes: tuple[str, ...]) -> dict[str, int]:
        """Tile axes and lengths."""
        return {clean(a): self._length(a) for a in axes if not self._point(a)}

    def _spans(self, axes: tuple[str, ...], rename: Mapping[str, str]) -> list[Any]:
        """The ranges of an array's dimensions at the current position."""
        spans: list[Any] = []
        for axis in axes:
            begin = self.start.get(axis, 0)
            name = clean(rename.get(axis, axis))
            spans.append(begin if self._point(axis) else tl.span(begin, self._length(axis), name))
        return spans

    def _load(self, name: str, rename: Mapping[str, str] | None = None) -> tl.Tile:
        """The current tile of an external array, in its stored type."""
        axes = self.kernel.body.axes_of(name)
        return tl.load(self.arrays[clean(name)], *self._spans(axes, rename or {}))

    def _value(self, name: str) -> tl.Tile:
        """A value in fp32, axes in the box's order."""
        if name in self.tiles:
            return self.tiles[name]
        if name in self.kernel.body.array:
            loaded = self._load(name)
            self.tiles[name] = loaded.cast(tl.FP32) if loaded.dtype is not tl.FP32 else loaded
            return self.tiles[name]
        node = self.kernel.body.node[name]
        if self.kernel.closed_loops(node):
            return self.state[name]
        self.tiles[name] = self._compute(node)
        return self.tiles[name]

    def _compute(self, node: Node) -> tl.Tile:
        """One box on tiles."""
        if node.kind == "const":
            return tl.full(float(node.attr("value")), tl.FP32)
        if node.kind == "mask":
            return self._mask(node)
        if node.kind in ("reduce", "contract"):
            return self._reduce(node)
        values = [self._value(name) for name in node.inputs]
        if node.op == "gelu":
            return _gelu(values[0])
        if node.op not in SIMPLE:
            raise InputError(f"box {node.name!r} ({node.op}) has no tile form")
        return self._ordered(SIMPLE[node.op](*self._aligned(values, node)), node)

    def _aligned(self, values: list[tl.Tile], node: Node) -> list[tl.Tile]:
        """Two-axis operands put in the box's axis order."""
        return [self._ordered(value, node) for value in values]

    def _ordered(self, value: tl.Tile, node: Node) -> tl.Tile:
        """A two-axis tile transposed when its order differs from the box's."""
        wanted = [clean(a) for a in node.axes if clean(a) in value.type.names]
        return value.T if len(wanted) == 2 and list(value.type.names) != wanted else value

    def _mask(self, node: Node) -> tl.Tile:
        """where(column <= row + shift [and within the window], x, fill)."""
        row, column = str(node.attr("row")), str(node.attr("column"))
        shift = tl.size(clean(column)) - tl.size(clean(row))
        rows = tl.coordinate(clean(row), self._length(row), self.start.get(row, 0) + shift)
        columns = tl.coordinate(clean(column), self._length(column), self.start.get(column, 0))
        value = self._value(node.inputs[0])
        fill = float(node.attr("fill", MASKED))
        by_rows = list(value.type.names) == [clean(row), clean(column)]
        result = tl.where(rows >= columns if by_rows else columns <= rows, value, fill)
        if node.attr("window"):
            last = columns + int(node.attr("window"))
            result = tl.where(rows < last if by_rows else last > rows, result, fill)
        return self._ordered(result, node)

    def _covered(self, value: tl.Tile, axes: tuple[str, ...], empty: float) -> tl.Tile:
        """Positions beyond the end of a looped axis replaced by the reduction's identity."""
        for axis in axes:
            if axis in self.start and clean(axis) in value.type.names:
                place = tl.coordinate(clean(axis), self._length(axis), self.start[axis])
                value = tl.where(place < tl.size(clean(axis)), value, empty)
        return value

    def _reduce(self, node: Node) -> tl.Tile:
        """A reduction or contraction of the current slice."""
        if node.kind == "contract":
            product = self._product(node)
            if product is not None:
                return product
            value = self._value(node.inputs[0])
            for name in node.inputs[1:]:
                value = value * self._value(name)
            return self._sum(self._covered(value, node.over, 0.0), node)
        value = self._covered(self._value(node.inputs[0]), node.over, EMPTY[node.op])
        if node.op in ("sum", "mean"):
            total = self._sum(value, node)
            if node.op == "sum" or self.kernel.closed_loops(node):
                return total
            return total * (1.0 / float(np.prod([self._length(a) for a in node.over])))
        along = tl.max_along if node.op == "max" else tl.min_along
        for axis in node.over:
            value = along(value, clean(axis))
        return value

    def _sum(self, value: tl.Tile, node: Node) -> tl.Tile:
        """Sum along all axes the box removes."""
        for axis in node.over:
            if clean(axis) in value.type.names:
                value = tl.sum_along(value, clean(axis))
        return self._ordered(value, node)

    def _product(self, node: Node) -> tl.Tile | None:
        """A matrix product when both operands have two axes and share exactly the summed one."""
        if len(node.inputs) != 2 or len(node.over) != 1:
            return None
        a, b = (self._operand(name, node) for name in node.inputs)
        shared = set(a.type.names) & set(b.type.names)
        if len(a.type.axes) != 2 or len(b.type.axes) != 2 or shared != {clean(node.over[0])}:
            return None
        first = [clean(axis) for axis in node.axes if not self._point(axis)]
        return a @ b if first[0] in a.type.names else b @ a

    def _operand(self, name: str, node: Node) -> tl.Tile:
        """A product's operand in the element type, zero outside the array."""
        if name in self.kernel.body.array:
            return self._load(name)
        return self._covered(self._value(name), node.over, 0.0).cast(self.dtype)

    def _accumulate(self, node: Node) -> None:
        """Fold the current slice into a state, correcting the state first."""
        state = self.state[node.name]
        self.tiles[f"old {node.name}"] = state.copy()
        fresh = self._reduce(node)
        correction = self.kernel.correction_of.get(node.name)
        if correction is not None:
            state[:] = self._corrected(correction, node)
        if node.op in ("max", "min"):
            state[:] = (tl.maximum if node.op == "max" else tl.minimum)(state, fresh)
        elif node.op == "mean":
            seen, here = self._counts(node)
            state += (fresh / here - state) * (here / (seen + here))
            if node is self._means(node)[-1]:
                seen += here
        else:
            state += fresh

    def _means(self, node: Node) -> list[Node]:
        """The means over the same loop, in order."""
        return [n for n in self.kernel.states if n.op == "mean" and n.over == node.over]

    def _counts(self, node: Node) -> tuple[tl.Tile, tl.Tile]:
        """(elements before this slice, elements of this slice) as tiles without axes."""
        key = f"here {node.over}"
        if key not in self.tiles:
            (axis,) = node.over
            ones = tl.full(1.0, tl.FP32, **{clean(axis): self._length(axis)})
            self.tiles[key] = tl.sum_along(self._covered(ones, node.over, 0.0), clean(axis))
        return self.seen[min(self.kernel.closed_loops(node))], self.tiles[key]

    def _corrected(self, correction: Correction, node: Node) -> tl.Tile:
        """matrix·old state + shift with the bases' old and new values."""
        names = tuple(name for name, _ in correction.symbols)
        values: dict[str, tl.Tile] = {}
        for symbol, value in correction.symbols:
            if value in correction.bases:
                values[f"old_{symbol}"] = self.tiles[f"old {value}"]
                values[f"new_{symbol}"] = self.state[value]
            else:
                values[symbol] = self._value(value)
        row = correction.targets.index(node.name)
        total: Any = self.state[node.name]
        for text, target in zip(correction.matrix[row], correction.targets, strict=True):
            if text == "0" or (text == "1" and target == node.name):
                continue
            if target != node.name:
                raise InputError(
                    f"box {node.name!r}: a correction of rank > 1 has no tile form yet"
                )
            entry = _expression(parse(text, names), values)
            total = entry + total if correction.join == "add" else total * entry
        if correction.shift[row] != "0":
            total = total + _expression(parse(correction.shift[row], names), values)
        return total

    def _scan(self, node: Node) -> tl.Tile:
        """Chunked causal contraction: q·state + tril(q kᵀ) v, then state += kᵀ v."""
        time = str(node.attr("time"))
        q, k, v = node.inputs
        past = {time: f"{time}_past"}
        if any(name not in self.kernel.body.array for name in node.inputs):
            raise InputError(f"box {node.name!r}: its operands must be arrays to have a tile form")
        query, key, value = self._load(q), self._load(k, past), self._load(v, past)
        scores = query @ key
        now = tl.coordinate(clean(time), self._length(time))
        before = tl.coordinate(clean(past[time]), self._length(time))
        state = self.state[node.name]
        out = tl.where(now >= before, scores, 0.0).cast(self.dtype) @ value
        out += query @ state.cast(self.dtype)
        state += key @ value
        return self._ordered(out, node)

    def _store(self, name: str) -> None:
        """Write the current tile of an output; what lies outside is dropped."""
        tile = self._value(name)
        axes = self.kernel.body.axes_of(name)
        tl.store(self.arrays[clean(name)], *self._spans(axes, {}), tile=tile)


def _gelu(x: tl.Tile) -> tl.Tile:
    """GELU, tanh form, as in `ops`."""
    inner = (x + x * x * x * 0.044715) * float(np.sqrt(2.0 / np.pi))
    return x * 0.5 * (tl.tanh(inner) + 1.0)


def _expression(expression: Any, values: Mapping[str, tl.Tile]) -> Any:
    """A correction entry on tiles."""
    if expression.is_Symbol:
        return values[str(expression)]
    if expression.is_number:
        return float(expression)
    parts = [_expression(part, values) for part in expression.args]
    if expression.is_Add or expression.is_Mul:
        result = next(p for p in parts if isinstance(p, tl.Tile))
        rest = [p for p in parts if p is not result]
        for part in rest:
            result = result + part if expression.is_Add else result * part
        return result
    if expression.is_Pow and expression.exp == 2:
        return parts[0] * parts[0]
    if expression.is_Pow and expression.exp == -1:
        return tl.reciprocal(parts[0])
    if str(expression.func) == "exp":
        return tl.exp(parts[0])
    raise InputError(f"a correction uses {expression.func}, which has no tile form")
