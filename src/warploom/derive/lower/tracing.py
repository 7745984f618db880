"""One trace of a kernel in the tile language: the nest, its states, each box on tiles.

`lower.lower` sets it up; this is the walk. Accumulation is fp32; positions beyond the end of an
axis are replaced by the identity of the reduction that reads them, in a loop of its own over the
last slices, so that whole slices are not masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from warploom import tile as tl
from warploom.derive.formula.graph import Node
from warploom.derive.kernel.chunk import at_most_one, of_channels
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.lemmas.streaming import COUNT, Correction, parse
from warploom.derive.lower.boxes import EMPTY, clean, expression, merge_largest
from warploom.derive.lower.channels import Channels
from warploom.derive.lower.gates import channel_gates, earlier, own, weights
from warploom.derive.lower.tilevalues import TileValues
from warploom.errors import InputError

Segment = tuple[Any, Any, bool, bool]
"""Slices (begin, end) of a stream loop, whether they may pass the end, whether a mask cuts them."""


class Lowering(TileValues):
    """The walk over the nest: loops opened, states folded, outputs stored."""

    def run(self) -> None:
        """The grid, then the nest."""
        self.enter_grid([each for each in self.kernel.loops if each.kind != "stream"])
        products = [n for n in self.kernel.body.nodes if n.kind in ("contract", "scan_contract")]
        alone = products and all(self._is_one_slice(axis) for axis in self.kernel.stream_index)
        for _ in tl.loop(1) if alone else (0,):  # a matmul stands in a loop
            self._inside(self.kernel.outer - 1)

    def enter_grid(self, loops: Sequence[Loop]) -> None:
        """One grid axis a loop."""
        extents = {
            grid_name(each): tl.cdiv(tl.size(clean(each.axis)), self.kernel.tile[each.symbol])
            for each in loops
        }
        indices = tl.grid(**extents) if extents else ()
        for loop, index in zip(loops, indices, strict=True):
            if loop.kind == "split":
                self.start[part_name(loop.axis)] = index
            self.start[loop.axis] = index * self.kernel.tile[loop.symbol]

    def _inside(self, depth: int) -> None:
        """What happens inside loop `depth`, inner loop included."""
        inner = depth + 1
        if inner < len(self.kernel.loops):
            self._open(inner)
            self._hoist(depth)
            self._stream(inner)
        for node in self.kernel.body.nodes:
            if node.kind == "const" or self.kernel.work_depth(node) != depth:
                continue
            if self.kernel.closed_loops(node):
                self._accumulate(node)
            elif node in self.kernel.scans:
                self.value(node.name)
        if inner < len(self.kernel.loops):
            for node in self.kernel.states:
                if min(self._streams_closed(node)) == inner:
                    self.tiles |= {key: self._finished(node, key) for key in self.keys(node)}
        if self.kernel.splits and depth == self.kernel.outer - 1:
            self._store_parts()
            return
        for name in self.kernel.body.outputs:
            if self.kernel.result_depth[name] == depth and not self.kernel.splits:
                self.store(name)

    def _stream(self, index: int) -> None:
        """All slices of a stream loop, then the states it closes."""
        loop = self.kernel.loops[index]
        step = self.kernel.tile[loop.symbol]
        outside, before = dict(self.tiles), self.start.get(loop.axis)
        if self._is_one_slice(loop.axis):
            # The part is one slice: no loop, and what lies beyond the end is masked.
            self.tail.add(loop.axis)
            self.masked = True
            self._inside(index)
            self.tail.discard(loop.axis)
            self.tiles = outside
            return
        for low, high, tail, masked in self._segments(index, step):
            self.tail.add(loop.axis) if tail else self.tail.discard(loop.axis)
            self.masked = masked
            for here in tl.loop(low, high):
                self.start[loop.axis] = here * step
                self._inside(index)
                self.tiles = dict(outside)
        self.tail.discard(loop.axis)
        self.start.pop(loop.axis)
        if before is not None:
            self.start[loop.axis] = before

    def _is_one_slice(self, axis: str) -> bool:
        """Whether a streamed axis is split into parts of one slice."""
        tile = self.kernel.tile
        return axis in self.kernel.splits and tile[f"s_{axis}"] == tile[f"w_{axis}"]

    def _streams_closed(self, node: Node) -> list[int]:
        """The stream loops a state closes (never empty here: a split axis is streamed too)."""
        closed = [j for j in self.kernel.closed_loops(node) if j >= self.kernel.outer]
        return closed or [len(self.kernel.loops)]

    def _hoist(self, depth: int) -> None:
        """Compute before the inner loop what does not vary in it."""
        body = self.kernel.body
        given = [array for array in body.inputs if clean(array.name) in self.arrays]
        plain = {array.name for array in given}
        for array in given:
            loose = self.unrolled & set(array.axes)
            viewed = any(body.node[u].kind == "view" for u in body.consumers[array.name])
            if self.kernel.result_depth[array.name] <= depth and not loose and not viewed:
                self.raw(array.name)
        for node in body.nodes:
            if node.kind in ("map", "const") and set(node.inputs) <= plain:
                plain.add(node.name)
                loose = self.unrolled & set(node.axes)
                if node.kind == "map" and self.kernel.result_depth[node.name] <= depth:
                    _ = None if loose else self.value(node.name)

    def _open(self, index: int) -> None:
        """Initial states of the loop about to run."""
        closing = [n for n in self.kernel.states if min(self._streams_closed(n)) == index]
        for node in closing:
            monoid = node.op if node.kind == "reduce" else "sum"
            for key in self.keys(node):
                self.state[key] = tl.full(EMPTY[monoid], tl.FP32, **self.shape(node.axes))
        if any(self._tells(node) for node in closing):
            self.seen[index] = tl.full(0.0, tl.FP32)
        for node in self.kernel.scans:
            if self.kernel.depth_of_axis[self.kernel.scan_axis(node)] == index:
                shape = self.shape(_carried(self.kernel, node))
                self.state[node.name] = tl.zeros(tl.FP32, **shape)
                if node.kind == "scan_contract" and of_channels(self.kernel.body, node):
                    time = str(node.attr("time"))
                    names = clean(time), earlier(time), own(time)
                    tile = next(iter(shape.items()))
                    decaying = at_most_one(self.kernel.body, node.inputs[3])
                    self.channels[node.name] = Channels(
                        self.length(time), tile, names, decaying, self.dtype
                    )

    def _counted(self, node: Node) -> bool:
        """Whether a correction reads how many elements have gone by."""
        correction = self.kernel.correction_of.get(node.name)
        if correction is None:
            return False
        return any(COUNT in text for text in (*correction.shift, *sum(correction.matrix, ())))

    def _segments(self, index: int, step: int) -> list[Segment]:
        """The slices to visit: whole ones without masks, then those that a mask or the end cuts."""
        axis = self.kernel.loops[index].axis
        size = tl.size(clean(axis))
        begin, stop, whole = tl.maximum_index(0, 0), tl.cdiv(size, step), size // step
        if axis in self.kernel.splits:
            part, width = self.start[part_name(axis)], self.kernel.tile[f"w_{axis}"]
            begin = part * (width // step)
            stop = tl.minimum_index(stop, begin + width // step)
            whole = tl.minimum_index(whole, stop)
        box = dict(self.kernel.bound_by).get(axis)
        if box is None:
            if not any(self._covers(node, axis) for node in self.kernel.states):
                return [(begin, stop, False, True)]
            return [(begin, whole, False, True), (whole, stop, True, True)]
        mask = self.kernel.body.node[box]
        row = str(mask.attr("row"))
        rows = self.kernel.tile[self.kernel.loops[self.kernel.depth_of_axis[row]].symbol]
        first = self.start[row] + (size - tl.size(clean(row)))
        stop = tl.minimum_index(stop, tl.cdiv(tl.maximum_index(first + rows, 0), step))
        whole = tl.minimum_index(whole, tl.maximum_index(first + 1, 0) // step)
        window = int(mask.attr("window"))
        if not window:
            return [(begin, whole, False, False), (whole, stop, True, True)]
        begin = tl.maximum_index(first - (window - 1), 0) // step
        clear = tl.cdiv(tl.maximum_index(first + (rows - window), 0), step)
        clear = tl.minimum_index(tl.maximum_index(clear, begin), stop)
        whole = tl.maximum_index(whole, clear)
        return [(begin, clear, True, True), (clear, whole, False, False), (whole, stop, True, True)]

    def _covers(self, node: Node, axis: str) -> bool:
        """Whether a reduction of a stream must mask what lies beyond its end: a product of loaded
        arrays need not, what lies outside of an array is loaded as zero."""
        if axis not in node.over:
            return False
        return node.kind != "contract" or not all(self.is_loaded(name) for name in node.inputs)

    # --- states ----------------------------------------------------------------------------------

    def _accumulate(self, node: Node) -> None:
        """Fold the current slice into a state, correcting the state first."""
        if node.op == "topk":
            keys = self.keys(node)
            fresh = merge_largest([self.state[key] for key in keys], self.top(node))
            for key, tile in zip(keys, fresh, strict=True):
                self.state[key][:] = tile
            return
        state = self.state[node.name]
        self.tiles[f"old {node.name}"] = state.copy()
        correction = self.kernel.correction_of.get(node.name)
        if correction is not None:
            state[:] = self._corrected(correction, node)
        self._fold(node, state, self.reduced(node))

    def _fold(self, node: Node, state: tl.Tile, fresh: tl.Tile) -> None:
        """state ⊕ fresh, in place."""
        last = [n for n in self.kernel.states if self._tells(n) and n.over == node.over]
        if node.op in ("max", "min"):
            state[:] = (tl.maximum if node.op == "max" else tl.minimum)(state, fresh)
        elif node in self.running_means:
            seen, here = self._counts(node)
            state += (fresh / here - state) * (here / (seen + here))
        else:
            state += fresh
        if last and node is last[-1]:
            seen, here = self._counts(node)
            seen += here

    @cached_property
    def running_means(self) -> frozenset[Node]:
        """The means whose value counts while the stream runs: bases of a correction, corrected
        ones, and those of a split. Others are sums, divided once at the end."""
        read = {b for c in self.kernel.corrections for b in (*c.bases, *c.targets)}
        split = set(self.kernel.parts)
        return frozenset(
            n for n in self.kernel.states if n.op == "mean" and (n.name in read or n in split)
        )

    def _finished(self, node: Node, key: str) -> tl.Tile:
        """A state when its loop has closed."""
        if node.op != "mean" or node in self.running_means:
            return self.state[key]
        count: tl.Tile | float = 1.0
        for axis in node.over:
            whole = tl.number(tl.size(clean(axis))) if axis in self.kernel.depth_of_axis else None
            count = float(self.kernel.body.size[axis]) * count if whole is None else whole * count
        return self.state[key] / count

    def _tells(self, node: Node) -> bool:
        """Whether a state needs to know how many elements have gone by."""
        return node in self.running_means or self._counted(node)

    def _counts(self, node: Node) -> tuple[tl.Tile, tl.Tile]:
        """(elements before this slice, elements of this slice) as tiles without axes."""
        key = f"here {node.over}"
        if key not in self.tiles:
            (axis,) = node.over
            length = self.length(axis)
            if axis in self.tail:
                left = tl.size(clean(axis)) - self.start[axis]
                here = tl.number(tl.minimum_index(left, length))
            else:
                here = tl.full(float(length), tl.FP32)
            self.tiles[key] = here
        return self.seen[min(self._streams_closed(node))], self.tiles[key]

    def _corrected(self, correction: Correction, node: Node) -> tl.Tile:
        """matrix·old state + shift with the bases' old and new values."""
        values: dict[str, tl.Tile] = {}
        for symbol, value in correction.symbols:
            if value in correction.bases:
                values[f"old_{symbol}"] = self.tiles[f"old {value}"]
                values[f"new_{symbol}"] = self.state[value]
            else:
                values[symbol] = self.value(value)
        if self._counted(node):
            values[COUNT] = self._counts(node)[0]
        return self.moved(correction, node, self.state[node.name], values)

    def moved(
        self,
        correction: Correction,
        node: Node,
        total: tl.Tile,
        values: Mapping[str, tl.Tile],
        memo: str = "fix",
    ) -> tl.Tile:
        """One row of a correction applied; entries that several states share are computed once."""
        names = tuple(name for name, _ in correction.symbols)
        row = correction.targets.index(node.name)
        for text, target in zip(correction.matrix[row], correction.targets, strict=True):
            if text == "0" or (text == "1" and target == node.name):
                continue
            if target != node.name:
                raise InputError(
                    f"box {node.name!r}: a correction of rank > 1 has no tile form yet"
                )
            key = f"{memo} {text} {correction.symbols}"
            if key not in self.tiles:
                self.tiles[key] = expression(parse(text, names), values)
            entry = self.tiles[key]
            total = total + entry if correction.join == "add" else total * entry
        if correction.shift[row] != "0":
            total = total + expression(parse(correction.shift[row], names), values)
        return total

    def scanned(self, node: Node) -> tl.Tile:
        """The present slice of a scan, its state moved on."""
        return self._chunk(node) if node.kind == "scan_contract" else self._step(node)

    def _step(self, node: Node) -> tl.Tile:
        """One step of a scan along time: h = a·h + b (or h + b)."""
        values = [self.value(name) for name in node.inputs]
        if Kernel.scan_axis(node) not in self.points:
            raise InputError(f"box {node.name!r}: a scan is lowered one step at a time")
        state = self.state[node.name]
        drive = self.ordered(values[-1], node)
        state[:] = state * values[0] + drive if node.op == "affine_scan" else state + drive
        return state

    def _chunk(self, node: Node) -> tl.Tile:
        """Chunked causal contraction: q · state + (q kᵀ under weights) v, then the state moved on.

        All tiles stand on their side (see `chunks`)."""
        time = str(node.attr("time"))
        if node.name in self.channels:
            q, k, v = (self._along(name, time, clean(time)) for name in node.factors)
            chunk, gates = self.channels[node.name], channel_gates(self, node)
            return self.ordered(chunk.step(self.state[node.name], q, k, v, gates), node)
        now, past = clean(time), earlier(time)
        query, key, value = (
            self._along(name, time, axis)
            for name, axis in zip(node.factors, (now, past, past), strict=True)
        )
        state, kind = self.state[node.name], self.dtype
        out = state.cast(kind) @ query
        scores = key @ query
        weighed = weights(self, node)
        rows = (tl.coordinate(axis, self.length(time)) for axis in (past, now))
        if weighed is None:
            seen = tl.where(next(rows) <= next(rows), scores, 0.0)
            added = value
        else:
            seen = tl.where(next(rows) <= next(rows), scores * weighed.between(), 0.0)
            added = weighed.added(value, kind)
            state *= weighed.whole
            out *= weighed.before.rename(weighed.axis, now)
        out += value @ seen.cast(kind)
        state += added @ key
        return self.ordered(out, node)

    def _along(self, name: str, time: str, axis: str) -> tl.Tile:
        """An operand of a product with its rows along `axis`, in the element type."""
        if name in self.kernel.body.array:
            return self.load_tile(name, {time: axis})
        tile = self.value(name).cast(self.dtype)
        return tile if axis == clean(time) else tile.rename(clean(time), axis)

    # --- stores ----------------------------------------------------------------------------------

    def store(self, name: str) -> None:
        """Write the current tile of an output; what lies outside is dropped."""
        axes = self.kernel.body.axes_of(name)
        target = self.arrays[clean(name)]
        loose = [a for a in axes if a in self.unrolled]
        for here in range(self.kernel.body.size[loose[0]]) if loose else (0,):
            self.position |= {loose[0]: here} if loose else {}
            tile = self.value(name)
            tl.store(target, *self.spans(axes), tile=tile.cast(target.dtype))

    def _store_parts(self) -> None:
        """Write the states of this core's part for the merge."""
        for node in self.kernel.parts:
            (axis,) = self.kernel.splits
            for key in self.at_keys(node):
                spans = [self.start[part_name(axis)], *self.spans(node.axes)]
                tl.store(self.arrays[partial(node.name)], *spans, tile=self.state[key])


def grid_name(loop: Loop) -> str:
    """The name of a loop's grid axis."""
    return part_name(loop.axis) if loop.kind == "split" else clean(loop.axis)


def part_name(axis: str) -> str:
    """The axis that counts the parts of a split axis."""
    return f"{clean(axis)}_parts"


def partial(name: str) -> str:
    """The array of a state's parts."""
    return f"{clean(name)}_partial"


def _carried(kernel: Kernel, node: Node) -> tuple[str, ...]:
    """The axes of a scan's running state."""
    time = kernel.scan_axis(node)
    if node.kind == "scan":
        return tuple(a for a in node.axes if a != time)
    _, k, v = (kernel.body.axes_of(name) for name in node.factors)
    return tuple(dict.fromkeys(a for a in (*v, *k) if a != time))
