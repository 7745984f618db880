"""Pseudocode of a kernel: loops, loads, state, corrections, placement and pipe of every line.

Generated from the nest alone: a value appears at the loop depth where it is known, a state is
initialised before the loop it accumulates over, a correction stands where its sum is updated.
"""

from __future__ import annotations

from collections.abc import Iterator

from warploom.derive.cost.work import pipe_of
from warploom.derive.formula.graph import Node
from warploom.derive.formula.ops import MONOIDS, op
from warploom.derive.kernel.kernel import Kernel, Loop

UNIT: dict[str, str] = {
    "tensor": "tensor core",
    "special": "special function",
    "fp": "fp lanes",
    "none": "",
}
COALESCED = 128
"""Bytes one coalesced access moves."""


def pseudocode(kernel: Kernel, hardware: bool = False, element: float = 2.0) -> str:
    """The kernel as text; `hardware` adds placement, pipe, buffering and coalescing remarks."""
    lines: list[str] = [f"kernel {kernel.name}({', '.join(a.name for a in kernel.body.inputs)}):"]
    lines += _block(kernel, -1, hardware, element)
    if kernel.splits:
        lines += _merge(kernel, hardware)
    return "\n".join(lines)


def _block(kernel: Kernel, depth: int, hardware: bool, element: float) -> Iterator[str]:
    """Everything inside loop `depth`."""
    pad = "  " * (depth + 2)
    for array in kernel.body.inputs:
        if kernel.result_depth[array.name] == depth and array.name not in kernel.after_merge:
            yield _load(kernel, array.name, pad, depth, hardware, element)
    inner = depth + 1
    here = [n for n in kernel.body.nodes if _is_here(kernel, n, depth)]
    early = [n for n in here if not any(j >= depth for j in _needs(kernel, n))]
    if inner < len(kernel.loops):
        for node in early:
            yield _compute(kernel, node, pad, hardware)
        yield from _states(kernel, inner, pad)
        yield _loop(kernel, kernel.loops[inner], pad, hardware)
        yield from _block(kernel, inner, hardware, element)
        here = [n for n in here if n not in early]
    for node in here:
        if kernel.closed_loops(node):
            yield from _update(kernel, node, pad, hardware)
        else:
            yield _compute(kernel, node, pad, hardware)
    if kernel.splits and depth == kernel.outer - 1:
        yield f"{pad}save partial {', '.join(node.name for node in kernel.parts)}"
        return
    for name in kernel.body.outputs:
        if kernel.result_depth[name] == depth and not kernel.splits:
            yield f"{pad}save {name}[{_shape(kernel, kernel.body.axes_of(name))}]"


def _is_here(kernel: Kernel, node: Node, depth: int) -> bool:
    """Whether a box is written inside loop `depth` (constants never are)."""
    if node.kind == "const" or kernel.work_depth(node) != depth:
        return False
    return node.name not in kernel.after_merge


def _needs(kernel: Kernel, node: Node) -> frozenset[int]:
    """The loops whose running or finished states a box reads, its own state included."""
    own = frozenset(kernel.closed_loops(node))
    return own.union(kernel.taint[node.name])


def _loop(kernel: Kernel, loop: Loop, pad: str, hardware: bool) -> str:
    """The header of one loop, with its tile when chosen."""
    step = kernel.tile.get(loop.symbol)
    size = f"{loop.symbol}={step}" if step else loop.symbol
    bound = dict(kernel.bound_by).get(loop.axis)
    limit = (
        f"0..{loop.axis}" if bound is None else f"the slices {bound} lets through of 0..{loop.axis}"
    )
    if loop.kind == "stream":
        note = "   # stream: double buffered" if hardware else ""
        return f"{pad}for {loop.axis}0 in {limit} step {size}:{note}"
    word = "parallel for" if loop.kind == "group" else "parallel for (split)"
    return f"{pad}{word} {loop.axis}0 in {limit} step {size}:"


def _load(kernel: Kernel, name: str, pad: str, depth: int, hardware: bool, element: float) -> str:
    """One load with its tile shape."""
    axes = kernel.body.axes_of(name)
    text = f"{pad}load {name}[{_shape(kernel, axes)}]"
    if not hardware:
        return text
    place = "shared memory" if depth >= kernel.outer else "registers or shared memory"
    row = _extent(kernel, axes[-1]) if axes else 1
    whole = (
        "coalesced" if row * element >= COALESCED else f"{row * element:.0f} B rows, not coalesced"
    )
    return f"{text}   # {place}, {whole}"


def _states(kernel: Kernel, index: int, pad: str) -> Iterator[str]:
    """Initial values of the states whose outermost loop is `index`."""
    for node in kernel.states:
        streams = [j for j in kernel.closed_loops(node) if kernel.loops[j].kind == "stream"]
        if streams and min(streams) == index:
            zero = "-inf (k times)" if node.op == "topk" else f"{MONOIDS[_monoid(node)].identity:g}"
            yield f"{pad}{node.name}[{_shape(kernel, node.axes)}] = {zero}"
    for node in kernel.scans:
        if kernel.depth_of_axis[kernel.scan_axis(node)] == index:
            yield f"{pad}{node.name}.state = 0"


def _update(kernel: Kernel, node: Node, pad: str, hardware: bool) -> Iterator[str]:
    """One accumulation: its correction, then the slice."""
    unit = f"   # {UNIT[pipe_of(kernel, node)]}" if hardware else ""
    sources = " · ".join(node.inputs)
    slice_axes = ",".join(node.over)
    correction = kernel.correction_of.get(node.name)
    if correction is not None:
        line = correction.readable()[correction.targets.index(node.name)]
        old = line.split(" <- ")[1]
        fresh = f"{_word(node)}_{slice_axes}({sources})"
        yield f"{pad}{node.name} = {_join(node, old, fresh)}{unit}"
        return
    fresh = f"{_word(node)}_{slice_axes}({sources})"
    yield f"{pad}{node.name} = {_join(node, node.name, fresh)}{unit}"


def _join(node: Node, old: str, fresh: str) -> str:
    """Old state and new slice under the reduction's monoid."""
    monoid = _monoid(node)
    if monoid == "sum":
        return f"{old} + {fresh}"
    return f"{monoid}({old}, {fresh})"


def _word(node: Node) -> str:
    """How a reduction is written."""
    return {"sum": "sum", "mean": "mean"}.get(_monoid(node), _monoid(node))


def _monoid(node: Node) -> str:
    """The monoid behind a reduction."""
    return node.op if node.kind == "reduce" else "sum"


def _compute(kernel: Kernel, node: Node, pad: str, hardware: bool) -> str:
    """One box."""
    unit = UNIT[pipe_of(kernel, node)]
    note = f"   # {unit}" if hardware and unit else ""
    over = f" over {','.join(node.over)}" if node.over else ""
    names = [
        f"{kernel.body.node[i].attr('value'):g}" if _is_const(kernel, i) else i for i in node.inputs
    ]
    if node.kind == "scan_contract":
        return "\n".join(_chunk(kernel, node, pad)) + note
    infix = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(node.op)
    body = f" {infix} ".join(names) if infix else f"{op(node.op).name}({', '.join(names)})"
    return f"{pad}{node.name} = {body}{over}{note}"


def _chunk(kernel: Kernel, node: Node, pad: str) -> Iterator[str]:
    """A chunk of a recurrence: what its rows see of each other and the state, the state after."""
    q, k, v = node.factors
    gated = int(node.attr("gated", 0))
    rows = " * ".join(
        f"{kernel.body.node[i].attr('value'):g}" if _is_const(kernel, i) else i
        for i in node.inputs[3 + gated :]
    )
    value = f"({rows} * {v})" if rows else v
    if not gated:
        yield f"{pad}{node.name} = {q}·{node.name}.state + tril({q}·{k}ᵀ)·{value}"
        yield f"{pad}{node.name}.state = {node.name}.state + {k}ᵀ·{value}"
        return
    gate = node.inputs[3]
    yield f"{pad}w[i, j] = Π {gate} of rows j+1..i   # 0 for j > i; row -1 is before the chunk"
    inner = f"Σ_{','.join(node.over)} {q}[i] w[i, j] {k}[j]"
    yield f"{pad}{node.name}[i] = ({q}[i] * w[i, -1])·{node.name}.state + Σ_j ({inner})·{value}[j]"
    last = f"Σ_j (w[last, j] * {k}[j])ᵀ·{value}[j]"
    yield f"{pad}{node.name}.state = w[last, -1] * {node.name}.state + {last}"


def _is_const(kernel: Kernel, name: str) -> bool:
    """Whether a value is a number."""
    return name in kernel.body.node and kernel.body.node[name].kind == "const"


def _merge(kernel: Kernel, hardware: bool) -> Iterator[str]:
    """The second dispatch of a split axis: merge partial states, finish, store."""
    groups = [each for each in kernel.loops if each.kind == "group"]
    yield "merge:" + ("   # one more dispatch" if hardware else "")
    pad = "  "
    for loop in groups:
        yield _loop(kernel, loop, pad, hardware)
        pad += "  "
    late = [a.name for a in kernel.body.inputs if a.name in kernel.after_merge]
    sources = [f"all partial {', '.join(n.name for n in kernel.parts)}", *late]
    yield f"{pad}load {', '.join(sources)}"
    for node in kernel.parts:
        correction = kernel.correction_of.get(node.name)
        moved = (
            " after moving each to the joined " + ", ".join(correction.bases) if correction else ""
        )
        yield f"{pad}{node.name} = {_word(node)} of its parts{moved}"
    for node in kernel.body.nodes:
        if node.name in kernel.finishing and node.kind != "const":
            yield _compute(kernel, node, pad, hardware)
    for name in kernel.body.outputs:
        yield f"{pad}save {name}[{_shape(kernel, kernel.body.axes_of(name))}]"


def _shape(kernel: Kernel, axes: tuple[str, ...]) -> str:
    """Tile extents as text: `g_q=128, d=128`."""
    parts: list[str] = []
    for axis in axes:
        index = kernel.depth_of_axis.get(axis)
        parts.append(axis if index is None else kernel.loops[index].symbol)
    return ",".join(parts)


def _extent(kernel: Kernel, axis: str) -> int:
    """The tile size of an axis, whole when it has no loop or no tile yet."""
    index = kernel.depth_of_axis.get(axis)
    whole = kernel.body.size[axis]
    return whole if index is None else kernel.tile.get(kernel.loops[index].symbol, whole)
