"""Running a kernel as its nest says, on numpy, and counting every value that crosses.

This is the referee of the cost formulas: it moves slices explicitly, keeps state across stream
steps, applies corrections, merges split parts, and adds up what it loads and stores. It shares no
code with `cost.py`; `tests/derive/test_transfers.py` holds the two to agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warploom.derive.formula.evaluate import (
    align,
    apply_box,
    check_arrays,
    scan,
    scan_contract,
    view_range,
)
from warploom.derive.formula.graph import Node
from warploom.derive.formula.ops import MONOIDS, top_k
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lemmas.streaming import COUNT, Correction, evaluate_entry

Value = Any


@dataclass
class Traffic:
    """Values that crossed between the memories, by array."""

    loaded: Counter[str] = field(default_factory=Counter[str])
    stored: Counter[str] = field(default_factory=Counter[str])

    @property
    def total(self) -> int:
        """Everything that crossed."""
        return self.loaded.total() + self.stored.total()


def run_kernels(
    kernels: Sequence[Kernel], arrays: Mapping[str, Value]
) -> tuple[dict[str, Value], list[Traffic]]:
    """Run kernels in order, each reading the arrays and the outputs of those before it."""
    memory = dict(arrays)
    traffic: list[Traffic] = []
    for kernel in kernels:
        run = Run(kernel, memory)
        memory.update(run.execute())
        traffic.append(run.traffic)
    return memory, traffic


class Run:
    """One execution of one kernel. `execute` returns the kernel's outputs."""

    def __init__(self, kernel: Kernel, arrays: Mapping[str, Value]) -> None:
        self.kernel = kernel
        self.body = kernel.body
        self.arrays = check_arrays(kernel.body, arrays)
        self.traffic = Traffic()
        self.range: dict[str, tuple[int, int]] = {a: (0, n) for a, n in self.body.sizes}
        self.scopes: list[dict[str, Value]] = [{}]
        self.state: dict[str, Value] = {}
        self.count: dict[str, float] = {}
        self.carry: dict[str, Value] = {}
        self.outputs = {
            name: np.full([self.body.size[a] for a in self.body.axes_of(name)], np.nan)
            for name in self.body.outputs
        }
        self.parts: dict[tuple[int, ...], list[tuple[dict[str, Value], dict[str, float]]]] = {}

    def execute(self) -> dict[str, Value]:
        """All loops; then, when an axis was split, the merge."""
        self._run(-1)
        if self.kernel.splits:
            self._merge_parts()
        return self.outputs

    def _run(self, depth: int) -> None:
        """The body inside loop `depth`: the inner loop first, then what happens at this depth."""
        if depth + 1 < len(self.kernel.loops):
            self._loop(depth + 1)
        for node in self.kernel.scans:
            if self.kernel.depth_of_axis[self.kernel.scan_axis(node)] == depth:
                self._value(node.name)
        for node in self.kernel.states:
            if max(self.kernel.closed_loops(node)) == depth:
                self._accumulate(node)
        if self.kernel.splits and depth == self.kernel.outer - 1:
            self._save_part()
            return
        for name in self.body.outputs:
            if self.kernel.result_depth[name] == depth and not self.kernel.splits:
                self._store(name)

    def _loop(self, index: int) -> None:
        """Every slice of one loop."""
        loop = self.kernel.loops[index]
        low, high = self.range[loop.axis]
        inner_low, inner_high = self._bounds(loop.axis, low, high)
        if loop.kind == "stream":
            for node in self.kernel.states:
                streams = [j for j in self.kernel.closed_loops(node) if j >= self.kernel.outer]
                if streams and min(streams) == index:
                    self.state.pop(node.name, None)
            for node in self.kernel.scans:
                if self.kernel.scan_axis(node) == loop.axis:
                    self.carry.pop(node.name, None)
        step = self.kernel.tile[loop.symbol]
        for start in range(low, high, step):
            stop = min(start + step, high)
            if stop <= inner_low or start >= inner_high:
                continue
            self.range[loop.axis] = (start, stop)
            self.scopes.append({})
            if loop.kind != "stream" and index == self.kernel.outer - 1:
                self.state.clear()
                self.carry.clear()
            self._run(index)
            self.scopes.pop()
        self.range[loop.axis] = (low, high)

    def _bounds(self, axis: str, low: int, high: int) -> tuple[int, int]:
        """The part of a stream a mask leaves to visit for the current rows."""
        name = dict(self.kernel.bound_by).get(axis)
        if name is None or self.kernel.loops[self.kernel.depth_of_axis[axis]].kind != "stream":
            return low, high
        mask = self.body.node[name]
        first, last = self.range[str(mask.attr("row"))]
        shift = self.body.size[axis] - self.body.size[str(mask.attr("row"))]
        window = int(mask.attr("window"))
        return (max(low, first + shift - window + 1) if window else low), min(high, last + shift)

    def _value(self, name: str) -> Value:
        """A value at the current position: cached in the scope of the loop it varies with."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        node = self.body.node.get(name)
        if node is not None and self.kernel.closed_loops(node):
            return self.state[name]
        value = self._load(name) if node is None else self._compute(node)
        here = len(self.scopes) - 2
        running = [j for j in self.kernel.taint[name] if j <= here]
        depth = min(max([self.kernel.result_depth[name], *running]), here)
        self.scopes[depth + 1][name] = value
        return value

    def _load(self, name: str) -> Value:
        """Bring in the current tile of an external array, and count it."""
        axes = self.body.axes_of(name)
        tile = self.arrays[name][tuple(slice(*self.range[a]) for a in axes)]
        self.traffic.loaded[name] += tile.size
        return tile

    def _compute(self, node: Node) -> Value:
        """One box on tiles."""
        if node.kind == "view" and node.inputs[0] in self.body.array:
            return self._load_view(node)
        operands = [(self._value(name), self.body.axes_of(name)) for name in node.inputs]
        start = {axis: span[0] for axis, span in self.range.items()}
        if node in self.kernel.scans:
            step = scan if node.kind == "scan" else scan_contract
            out, self.carry[node.name] = step(node, operands, self.carry.get(node.name))
            return out
        if node.kind == "view":
            start |= {f"{a}#": e - s for a, (s, e) in self.range.items()}
        return apply_box(node, operands, self.body.size, start)

    def _load_view(self, node: Node) -> Value:
        """Load what a window needs of its source (halo included) and reindex it."""
        source = node.inputs[0]
        axes = self.body.axes_of(source)
        spans = [view_range(node, axis, self.range) for axis in axes]
        tile = self.arrays[source][tuple(slice(*span) for span in spans)]
        self.traffic.loaded[source] += tile.size
        start = {axis: span[0] for axis, span in self.range.items()}
        start |= {f"{a}#": e - s for a, (s, e) in self.range.items()}
        start |= {f"{a}@source": span[0] for a, span in zip(axes, spans, strict=True)}
        return apply_box(node, [(tile, axes)], self.body.size, start)

    def _accumulate(self, node: Node) -> None:
        """Fold the current slice into a reduction's state, correcting the state first."""
        name = node.name
        before = {k: self.state.get(k) for k in self._family(name)}
        weights = {k: self.count.get(k, 0.0) for k in before}
        if before[name] is None:
            operands = [(self._value(source), self.body.axes_of(source)) for source in node.inputs]
            self._keep_old(node, None)
            self.state[name] = apply_box(node, operands, self.body.size, {})
            self.count[name] = self._elements(node)
            return
        self._keep_old(node, before[name])
        operands = [(self._value(source), self.body.axes_of(source)) for source in node.inputs]
        fresh = apply_box(node, operands, self.body.size, {})
        old = before[name]
        correction = self.kernel.correction_of.get(name)
        if correction is not None:
            old = self._corrected(correction, name, before, weights[name])
        amount = self._elements(node)
        self.state[name] = combine(node, old, self.count[name], fresh, amount)
        self.count[name] += amount

    def _family(self, name: str) -> tuple[str, ...]:
        """The reductions corrected together with this one."""
        correction = self.kernel.correction_of.get(name)
        return correction.targets if correction else (name,)

    def _keep_old(self, node: Node, value: Value) -> None:
        """Remember a reduction's value before this slice: corrections compare old and new."""
        self.scopes[-1][f"old {node.name}"] = value
        self.scopes[-1][f"weight {node.name}"] = self.count.get(node.name, 0.0)

    def _corrected(
        self, correction: Correction, name: str, before: Mapping[str, Value], weight: float
    ) -> Value:
        """The old state of `name` moved from the old bases to the new ones."""
        old_bases = {b: self.scopes[-1][f"old {b}"] for b in correction.bases}
        new_bases = {b: self.state[b] for b in correction.bases}
        old = {t: self.scopes[-1].get(f"old {t}", before.get(t)) for t in correction.targets}
        return self._move(correction, name, old, old_bases, new_bases, weight)

    def _move(
        self,
        correction: Correction,
        name: str,
        old: Mapping[str, Value],
        old_bases: Mapping[str, Value],
        new_bases: Mapping[str, Value],
        weight: float,
    ) -> Value:
        """matrix·old + shift at given base values."""
        axes = self.body.axes_of(name)
        values: dict[str, Value] = {COUNT: weight}
        for symbol, value in correction.symbols:
            source = self.body.axes_of(value)
            if value in old_bases:
                values[f"old_{symbol}"] = align(old_bases[value], source, axes)
                values[f"new_{symbol}"] = align(new_bases[value], source, axes)
            else:
                values[symbol] = align(self._value(value), source, axes)
        row = correction.targets.index(name)
        total: Value = evaluate_entry(correction, correction.shift[row], values)
        for text, target in zip(correction.matrix[row], correction.targets, strict=True):
            if text == "0":
                continue
            entry = evaluate_entry(correction, text, values)
            state = align(old[target], self.body.axes_of(target), axes)
            total = total + (entry + state if correction.join == "add" else entry * state)
        return total

    def _elements(self, node: Node) -> float:
        """How many elements the current slice reduces."""
        count = 1
        for axis in node.over:
            low, high = self.range[axis]
            count *= high - low
        return float(count)

    def _store(self, name: str) -> None:
        """Write the current tile of an output, and count it."""
        self._write(name, self._value(name))

    def _write(self, name: str, value: Value) -> None:
        axes = self.body.axes_of(name)
        self.outputs[name][tuple(slice(*self.range[a]) for a in axes)] = value
        self.traffic.stored[name] += value.size

    def _save_part(self) -> None:
        """Write this core's partial states to memory; the merge reads them back."""
        key = tuple(self.range[each.axis][0] for each in self.kernel.loops if each.kind == "group")
        kept = {node.name: self.state[node.name] for node in self.kernel.parts}
        for name, value in kept.items():
            self.traffic.stored[f"{name} (partial)"] += value.size
        where = {
            each.axis: self.range[each.axis] for each in self.kernel.loops if each.kind == "group"
        }
        self.parts.setdefault(key, []).append((kept, dict(self.count)))
        self.scopes[0][f"where {key}"] = where

    def _merge_parts(self) -> None:
        """For each group: read all partial states, merge them pairwise, finish and store."""
        for key, saved in self.parts.items():
            parts = saved
            self.range.update(self.scopes[0][f"where {key}"])
            for part, _ in parts:
                for name, value in part.items():
                    self.traffic.loaded[f"{name} (partial)"] += value.size
            while len(parts) > 1:
                paired = [self._merge(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
                parts = paired + ([parts[-1]] if len(parts) % 2 else [])
            self.state, self.count = parts[0]
            self.scopes = [self.scopes[0], {}]
            for name in self.body.outputs:
                self._write(name, self._finish(name, self.scopes[-1]))

    def _finish(self, name: str, cache: dict[str, Value]) -> Value:
        """A value computed from merged states only."""
        if name in self.state:
            return self.state[name]
        if name not in cache:
            node = self.body.node.get(name)
            if node is None:
                cache[name] = self._load(name)
            else:
                operands = [(self._finish(s, cache), self.body.axes_of(s)) for s in node.inputs]
                start = {axis: span[0] for axis, span in self.range.items()}
                cache[name] = apply_box(node, operands, self.body.size, start)
        return cache[name]

    def _merge(
        self,
        left: tuple[dict[str, Value], dict[str, float]],
        right: tuple[dict[str, Value], dict[str, float]],
    ) -> tuple[dict[str, Value], dict[str, float]]:
        """Two partial states into one: both moved to the joined bases, then combined."""
        state: dict[str, Value] = {}
        count: dict[str, float] = {}
        for node in self.kernel.parts:
            name = node.name
            sides: list[Value] = []
            for part, weights in (left, right):
                value = part[name]
                correction = self.kernel.correction_of.get(name)
                if correction is not None:
                    value = self._move(correction, name, part, part, state, weights[name])
                sides.append(value)
            state[name] = combine(node, sides[0], left[1][name], sides[1], right[1][name])
            count[name] = left[1][name] + right[1][name]
        return state, count


def combine(node: Node, left: Value, left_count: float, right: Value, right_count: float) -> Value:
    """Two results of one reduction into one."""
    if node.op == "topk":
        axis = node.axes.index(str(node.attr("axis")))
        return top_k(np.concatenate([left, right], axis), axis, int(node.attr("k")))
    monoid = MONOIDS[node.op if node.kind == "reduce" else "sum"]
    return monoid.combine(left, left_count, right, right_count)
