"""The sequential meaning of a diagram: every box on whole arrays, in float64.

This is the reference that derivations are checked against, so it does nothing clever: no fusion,
no tiles, no running state. `apply_box` also serves the tiled executor, which passes the offsets of
its slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.formula.ops import MASKED, MONOIDS, op, top_k
from warploom.errors import InputError

Value = Any


def evaluate(diagram: Diagram, arrays: Mapping[str, Value]) -> dict[str, Value]:
    """All outputs of the diagram on whole arrays.

    `arrays[name]` has the axes of the input in their declared order. Raises `InputError` for a
    missing array or a shape that disagrees with the axis sizes.
    """
    values = check_arrays(diagram, arrays)
    for node in diagram.nodes:
        operands = [(values[name], diagram.axes_of(name)) for name in node.inputs]
        values[node.name] = apply_box(node, operands, diagram.size, {})
    return {name: values[name] for name in diagram.outputs}


def check_arrays(diagram: Diagram, arrays: Mapping[str, Value]) -> dict[str, Value]:
    """The inputs as float64 arrays; raises `InputError` naming array, axis and both sizes."""
    values: dict[str, Value] = {}
    for array in diagram.inputs:
        if array.name not in arrays:
            raise InputError(f"{diagram.name}: input {array.name!r} is missing")
        value = np.asarray(arrays[array.name], dtype=np.float64)
        want = tuple(diagram.size[axis] for axis in array.axes)
        if value.shape != want:
            raise InputError(
                f"{diagram.name}: input {array.name!r} has shape {value.shape}, but its axes "
                f"{','.join(array.axes)} have sizes {want}"
            )
        values[array.name] = value
    return values


def random_inputs(diagram: Diagram, seed: int = 0, scale: float = 1.0) -> dict[str, Value]:
    """Normally distributed float64 inputs of the right shapes."""
    rng = np.random.default_rng(seed)
    return {
        array.name: scale * rng.standard_normal([diagram.size[axis] for axis in array.axes])
        for array in diagram.inputs
    }


def shrunk_sizes(diagram: Diagram, limit: int) -> dict[str, int]:
    """Small, uneven axis lengths; axes tied by a view or fixed by an attribute stay consistent."""
    sizes = {
        axis: min(size, limit - 2 * (i % 3) - 1) for i, (axis, size) in enumerate(diagram.sizes)
    }
    rows = {str(n.attr("row")): str(n.attr("column")) for n in diagram.nodes if n.kind == "mask"}
    for row, column in rows.items():
        sizes[row] = min(sizes[row], sizes[column])
    for node in diagram.nodes:
        if node.op == "topk":
            sizes[str(node.attr("axis"))] = int(node.attr("k"))
        if node.kind == "view":
            small = {a: min(sizes[a], 7) for a in node.axes}
            sizes |= small
            for source, terms in node.attr("map"):
                if [t[0] for t in terms] != [source]:
                    sizes[source] = 1 + sum(s * (sizes[a] - 1) for a, s in terms)
    return sizes


def apply_box(
    node: Node,
    operands: Sequence[tuple[Value, tuple[str, ...]]],
    size: Mapping[str, int],
    start: Mapping[str, int],
    carry: Value = None,
) -> Value:
    """One box on arrays that may be slices.

    `size` holds whole axis lengths (a mask aligns its ends with them), `start` the offset of the
    slice along an axis (0 when absent), `carry` the state of a scan before this slice.
    """
    spec = op(node.op)
    if spec.kind == "const":
        return np.asarray(node.attr("value"), np.float64)
    if spec.kind == "map":
        aligned = [align(value, axes, node.axes) for value, axes in operands]
        assert spec.apply is not None
        return np.asarray(spec.apply(*aligned), np.float64)
    if spec.kind == "contract":
        return _einsum(operands, node.axes)
    if spec.kind == "reduce":
        return _reduce(node, *operands[0])
    if spec.kind == "view":
        return _view(node, *operands[0], size, start)
    if spec.kind == "mask":
        return _mask(node, *operands[0], size, start)
    if spec.kind == "scan":
        return scan(node, operands, carry)[0]
    return scan_contract(node, operands, carry)[0]


def align(value: Value, axes: Sequence[str], target: Sequence[str]) -> Value:
    """Transpose to the order of `target` and put length 1 where an axis is absent."""
    order = [axes.index(axis) for axis in target if axis in axes]
    shaped = np.transpose(value, order) if order else np.asarray(value)
    index = tuple(slice(None) if axis in axes else np.newaxis for axis in target)
    return shaped[index]


def _einsum(operands: Sequence[tuple[Value, tuple[str, ...]]], out: Sequence[str]) -> Value:
    """Product of all operands summed over the axes that `out` lacks."""
    letters: dict[str, int] = {}
    arguments: list[Any] = []
    for value, axes in operands:
        arguments += [value, [letters.setdefault(axis, len(letters)) for axis in axes]]
    arguments.append([letters[axis] for axis in out])
    return np.asarray(np.einsum(*arguments, optimize=len(operands) > 2))


def _reduce(node: Node, value: Value, axes: tuple[str, ...]) -> Value:
    """A reduction over the axes of `over`, the result in the node's own axis order."""
    if node.op == "topk":
        (axis,) = node.over
        kept = top_k(value, axes.index(axis), int(node.attr("k")))
        renamed = tuple(str(node.attr("axis")) if name == axis else name for name in axes)
        return align(kept, renamed, node.axes)
    for axis in node.over:
        position = axes.index(axis)
        value = MONOIDS[node.op].reduce(value, position)
        axes = axes[:position] + axes[position + 1 :]
    return align(value, axes, node.axes)


def view_range(node: Node, axis: str, spans: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """The half-open span of source axis `axis` that output spans need: the halo of a window.

    For strides s_i and spans [b_i, e_i) it is [Σ s_i b_i, Σ s_i (e_i - 1) + 1).
    """
    terms = dict(node.attr("map"))[axis]
    low = sum(stride * spans[name][0] for name, stride in terms)
    high = sum(stride * (spans[name][1] - 1) for name, stride in terms)
    return low, high + 1


def _view(
    node: Node,
    value: Value,
    axes: tuple[str, ...],
    size: Mapping[str, int],
    start: Mapping[str, int],
) -> Value:
    """Affine reindexing: each source axis is read at a strided sum of output positions.

    `start["axis@source"]`, when given, is where the fetched part of a source axis begins, and
    `start["axis#"]` the length of an output slice.
    """
    lengths = {a: int(start.get(f"{a}#", size[a])) for a in node.axes}
    index: list[Any] = []
    for axis in axes:
        position: Any = -int(start.get(f"{axis}@source", 0))
        for name, stride in dict(node.attr("map"))[axis]:
            along = stride * (np.arange(lengths[name]) + int(start.get(name, 0)))
            position = position + align(along, (name,), node.axes)
        index.append(position)
    return np.asarray(value[tuple(np.broadcast_arrays(*index))])


def keep(node: Node, rows: Value, columns: Value, size: Mapping[str, int]) -> Value:
    """Which (row, column) pairs a mask lets through; both ends of the sequences are aligned."""
    shift = size[str(node.attr("column"))] - size[str(node.attr("row"))]
    allowed = columns <= rows + shift
    if node.attr("window"):
        allowed = allowed & (columns > rows + shift - int(node.attr("window")))
    return allowed


def _mask(
    node: Node,
    value: Value,
    axes: tuple[str, ...],
    size: Mapping[str, int],
    start: Mapping[str, int],
) -> Value:
    """Fill what the mask excludes."""
    row, column = str(node.attr("row")), str(node.attr("column"))
    low, left = start.get(row, 0), start.get(column, 0)
    rows = _positions(low, value.shape[axes.index(row)])
    columns = _positions(left, value.shape[axes.index(column)])
    allowed = keep(node, align(rows, (row,), axes), align(columns, (column,), axes), size)
    return align(np.where(allowed, value, node.attr("fill", MASKED)), axes, node.axes)


def _positions(first: int, count: int) -> Value:
    """first, first + 1, ... as an array."""
    return np.arange(first, first + count, dtype=np.int64)


def scan(
    node: Node, operands: Sequence[tuple[Value, tuple[str, ...]]], carry: Value
) -> tuple[Value, Value]:
    """Inclusive scan along `over`: (all positions, state after the last).

    `cumsum(b)`: h_t = h_{t-1} + b_t; `affine_scan(a, b)`: h_t = a_t h_{t-1} + b_t, h_0 = 0.
    """
    (axis,) = node.over
    aligned = [align(value, axes, node.axes) for value, axes in operands]
    shape = np.broadcast_shapes(*(value.shape for value in aligned))
    position = node.axes.index(axis)
    moved = [np.moveaxis(np.broadcast_to(value, shape), position, 0) for value in aligned]
    state = np.zeros(moved[0].shape[1:]) if carry is None else carry
    steps: list[Value] = []
    for step in zip(*moved, strict=True):
        state = state + step[0] if node.op == "cumsum" else step[0] * state + step[1]
        steps.append(state)
    return np.moveaxis(np.stack(steps), 0, position), state


def scan_contract(
    node: Node, operands: Sequence[tuple[Value, tuple[str, ...]]], carry: Value
) -> tuple[Value, Value]:
    """Chunked causal contraction along time t (`attr time`): (outputs, state after the slice).

    o_t = Σ_{s≤t} (Σ_d q_td (Π_{s<r≤t} g_r) k_sd) v_se w_s: on the slice a product of q and k under
    weights, times v, and q · state for what was before, with state = Σ_s (Π_{r>s} g_r) k_s v_sᵀ
    w_s. The gate g (`attr gated`) is the first operand behind q, k and v, factors w the others.
    Linear attention (Katharopoulos 2020; chunking as in GLA).
    """
    (q, q_axes), (k, k_axes), (v, v_axes) = operands[:3]
    time = str(node.attr("time"))
    past = time + "'"

    def earlier(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(past if a == time else a for a in axes)

    rest = operands[3:]
    gated = bool(node.attr("gated"))
    gate = rest[0] if gated else (np.ones(()), ())
    between, before, far = _carried(*gate, time, q.shape[q_axes.index(time)])
    factors = [(value, earlier(axes)) for value, axes in rest[gated:]]
    past_rows = [(k, earlier(k_axes)), (v, earlier(v_axes)), *factors]
    out = _einsum([(q, q_axes), (between, (time, past, *far)), *past_rows], node.axes)
    state_axes = scan_state_axes(k_axes, v_axes, time)
    update = _einsum([(between[-1], (past, *far)), *past_rows], state_axes)
    if carry is not None:
        held = [(before, (time, *far)), (carry, state_axes)]
        out = out + _einsum([(q, q_axes), *held], node.axes)
        update = update + align(before[-1], far, state_axes) * carry
    return out, update


def _carried(
    gate: Value, axes: tuple[str, ...], time: str, steps: int
) -> tuple[Value, Value, tuple[str, ...]]:
    """(what row i keeps of row j, [i, j, ...], and of the state before the slice, [i, ...], the
    other axes of the gate): products of gates, so that gates may be nothing or negative."""
    far = tuple(a for a in axes if a != time)
    rows = align(gate, axes, (time, *far))
    rows = np.broadcast_to(rows, (steps, *rows.shape[1:]))
    between = np.zeros((steps, steps, *rows.shape[1:]))
    for i, row in enumerate(rows):
        between[i, :i] = row * between[i - 1, :i]
        between[i, i] = 1.0
    return between, np.cumprod(rows, axis=0), far


def scan_state_axes(k: Sequence[str], v: Sequence[str], time: str) -> tuple[str, ...]:
    """The axes of the state Σ_s k_s v_sᵀ: all of both factors but time."""
    return tuple(axis for axis in dict.fromkeys((*k, *v)) if axis != time)


def compare(got: Mapping[str, Value], want: Mapping[str, Value]) -> float:
    """The largest error over all outputs, relative to each output's largest magnitude.

    Raises `InputError` when an output is missing; a NaN counts as infinite error.
    """
    worst = 0.0
    for name, reference in want.items():
        if name not in got:
            raise InputError(f"output {name!r} is missing from the result")
        scale = float(np.max(np.abs(reference), initial=0.0)) or 1.0
        error = float(np.max(np.abs(got[name] - reference), initial=0.0)) / scale
        worst = max(worst, np.inf if np.isnan(error) else error)
    return worst
