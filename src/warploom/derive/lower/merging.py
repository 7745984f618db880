"""The second program of a split kernel: merge the parts' states, finish and store the outputs.

Each core of a split wrote its states (running maximum, normaliser, output) for its part of the
axis. A part enters as a slice does: both sides are moved to the joined bases by the same correction
that the stream uses, then combined (flash-decoding's reduction, split-K's sum).
"""

from __future__ import annotations

from warploom import tile as tl
from warploom.derive.formula.graph import Node
from warploom.derive.lemmas.streaming import COUNT, Correction
from warploom.derive.lower.boxes import EMPTY, clean, joined, merge_largest
from warploom.derive.lower.tracing import Lowering, part_name, partial


def merge(trace: Lowering) -> None:
    """The merge of one group; `trace` has the arrays of the parts and of the outputs."""
    kernel = trace.kernel
    trace.enter_grid([each for each in kernel.loops if each.kind == "group"])
    (axis,) = kernel.splits
    width = kernel.tile[f"w_{axis}"]
    size = tl.size(clean(axis))
    for node in kernel.parts:
        for key in trace.keys(node):
            trace.state[key] = tl.full(EMPTY[_monoid(node)], tl.FP32, **trace.shape(node.axes))
    seen = tl.full(0.0, tl.FP32)
    before = dict(trace.tiles)
    for part in tl.loop(0, tl.size(part_name(axis))):
        trace.tiles = dict(before)
        here = tl.number(tl.minimum_index(size - part * width, width))
        loaded = {
            key: tl.load(trace.arrays[partial(node.name)], part, *trace.spans(node.axes))
            for node in kernel.parts
            for key in trace.at_keys(node)
        }
        for node in kernel.parts:
            _join(trace, node, loaded, seen, here)
        seen += here
    trace.tiles = before
    for name in kernel.body.outputs:
        trace.store(name)


def _monoid(node: Node) -> str:
    """What combines two results of a reduction."""
    return node.op if node.kind == "reduce" else "sum"


def _join(
    trace: Lowering, node: Node, loaded: dict[str, tl.Tile], seen: tl.Tile, here: tl.Tile
) -> None:
    """One state: both sides moved to the joined bases, then combined."""
    if node.op == "topk":
        keys = trace.keys(node)
        best = merge_largest([trace.state[key] for key in keys], [loaded[key] for key in keys])
        for key, tile in zip(keys, best, strict=True):
            trace.state[key][:] = tile
        return
    state, fresh = trace.state[node.name], loaded[node.name]
    trace.tiles[f"old {node.name}"] = state.copy()
    correction = trace.kernel.correction_of.get(node.name)
    if correction is not None:
        state[:] = _moved(trace, correction, node, state, None, seen)
        fresh = _moved(trace, correction, node, fresh, loaded, here)
    if node.op == "mean":
        state += (fresh - state) * (here / (seen + here))
    else:
        state[:] = joined(_monoid(node), state, fresh)


def _moved(
    trace: Lowering,
    correction: Correction,
    node: Node,
    side: tl.Tile,
    loaded: dict[str, tl.Tile] | None,
    count: tl.Tile,
) -> tl.Tile:
    """One side moved from its own bases to the joined ones."""
    values: dict[str, tl.Tile] = {COUNT: count}
    for symbol, value in correction.symbols:
        if value in correction.bases:
            old = trace.tiles[f"old {value}"] if loaded is None else loaded[value]
            values[f"old_{symbol}"], values[f"new_{symbol}"] = old, trace.state[value]
        else:
            values[symbol] = trace.value(value)
    memo = "state" if loaded is None else "part"
    return trace.moved(correction, node, side, values, memo)
