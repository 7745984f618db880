"""What a kernel costs: values moved, values resident, operations by pipe.

Two forms of each. *Symbolic*: posynomials in axis sizes and tile sizes, for closed forms and the
geometric program. *Exact*: integers for given tiles, ragged tails and masks included; these must
equal what `execute.Run` counts (acceptance test T7), which shares no code with this module.

Formula (handbook 2.3, with the loop order made explicit): an array loaded at depth D crosses
|tile| x (all trips of loops 0..D) = |array| x Π trips of the loops 0..D whose axis it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from warploom.diagram.evaluate import scan_state_axes
from warploom.diagram.external import sympy
from warploom.diagram.graph import Node
from warploom.diagram.kernel import Kernel, Loop
from warploom.diagram.ops import op
from warploom.diagram.posynomial import ZERO, Posynomial, constant, product, total, variable
from warploom.diagram.streaming import parse


@dataclass(frozen=True)
class Accounting:
    """What counts as resident (handbook trap 9: the paper leaves the score tile out).

    `intermediates`: tiles between boxes. `statistics`: running values smaller than the widest one
    (maxima, normalisers). `buffers`: copies of each streamed input slice (2 = double buffered).
    """

    intermediates: bool = True
    statistics: bool = True
    buffers: int = 1


FULL = Accounting()
PAPER = Accounting(intermediates=False, statistics=False)


# --- symbolic -------------------------------------------------------------------------------------


def extent(kernel: Kernel, axis: str, depth: int = 99) -> Posynomial:
    """How much of an axis a tile at `depth` spans: its tile variable, or all of it."""
    for index in range(len(kernel.loops) - 1, -1, -1):
        if kernel.loops[index].axis == axis and index <= depth:
            return variable(kernel.loops[index].symbol)
    return variable(axis)


def tile_of(kernel: Kernel, value: str, depth: int = 99) -> Posynomial:
    """The number of values in one tile of a box's output or of an array."""
    views = [kernel.body.node[u] for u in kernel.body.consumers[value] if _is_view(kernel, u)]
    if value in kernel.body.array and views:
        return _window_tile(kernel, value, views[0], depth)
    return product(extent(kernel, axis, depth) for axis in kernel.body.axes_of(value))


def _is_view(kernel: Kernel, name: str) -> bool:
    """Whether a box is a view."""
    return kernel.body.node[name].kind == "view"


def _window_tile(kernel: Kernel, value: str, view: Node, depth: int) -> Posynomial:
    """The source tile of a window: Σ stride·(extent - 1) + 1 along a reindexed axis (the halo).

    A negative constant would leave the posynomials; it is dropped, which overcounts by less than
    one stride a tile. The exact count has no such term.
    """
    factors: list[Posynomial] = []
    mapping = dict(view.attr("map"))
    for axis in kernel.body.axes_of(value):
        looped = {name for name, _ in mapping[axis] if name in kernel.depth_of_axis}
        offset = 1.0
        part = ZERO
        for name, stride in mapping[axis]:
            offset -= stride
            if name in looped:
                part = part + extent(kernel, name, depth).scaled(stride)
            else:
                offset += stride * kernel.body.size[name]
        factors.append(part + constant(max(offset, 0.0)))
    return product(factors)


def transfers(kernel: Kernel) -> dict[str, Posynomial]:
    """Values moved by the whole dispatch, array by array, in tile and axis sizes."""
    moved: dict[str, Posynomial] = {}
    for array in kernel.body.inputs:
        depth = kernel.result_depth[array.name]
        late = array.name in kernel.after_merge
        moved[array.name] = _crossings(kernel, array.name, depth, stored=late)
    for name in kernel.body.outputs:
        depth = kernel.outer - 1 if kernel.splits else kernel.result_depth[name]
        moved[f"{name} (store)"] = _crossings(kernel, name, depth, stored=True)
    for node in kernel.parts:
        parts = product(_trips(loop) for loop in kernel.loops if loop.kind == "split")
        whole = product(variable(axis) for axis in node.axes)
        moved[f"{node.name} (partial)"] = (whole * parts).scaled(2.0)
    return moved


def _crossings(kernel: Kernel, value: str, depth: int, stored: bool = False) -> Posynomial:
    """Tile size times trips, cancelled loop by loop so that no g/g is left."""
    axes = _driving_axes(kernel, value)
    loops = [
        each
        for i, each in enumerate(kernel.loops)
        if i <= depth and not (stored and each.kind == "split")
    ]
    window = axes != set(kernel.body.axes_of(value))
    result = tile_of(kernel, value, depth) if window else constant(1.0)
    for axis in () if window else kernel.body.axes_of(value):
        result = result * variable(axis)
    for loop in loops:
        if loop.axis not in axes or window:
            result = result * _trips(loop)
    return _shortened(kernel, result, loops)


def _driving_axes(kernel: Kernel, value: str) -> set[str]:
    """The loop axes that move a value's tile: its own, or those of the view that reads it."""
    axes = set(kernel.body.axes_of(value))
    if value in kernel.body.array:
        for user in kernel.body.consumers[value]:
            if _is_view(kernel, user):
                axes |= set(kernel.body.node[user].axes)
    return axes


def _trips(loop: Loop) -> Posynomial:
    """How often a loop runs, without the ceiling."""
    return variable(loop.axis) * variable(loop.symbol, -1)


def _shortened(kernel: Kernel, whole: Posynomial, loops: list[Loop]) -> Posynomial:
    """Masks as loop bounds: the streamed axis shrinks to what the rows can see.

    Causal, ends aligned: summed over row groups of g the visited length is
    (q/g)(x - q/2) + q/2, that is x·(q/g)·(1 - q/2x) + q/2. A window of w: (q/g)·w + q.
    """
    for axis, box in kernel.bound_by:
        inside = [each for each in loops if each.axis == axis]
        mask = kernel.body.node[box]
        row = str(mask.attr("row"))
        rows = [each for each in loops if each.axis == row]
        if not inside or not rows:
            continue
        q, x = kernel.body.size[row], kernel.body.size[axis]
        window = int(mask.attr("window"))
        back = variable(rows[0].symbol) * variable(axis, -1)
        if window:
            factor = variable(axis, -1).scaled(min(window, x)) + back
        else:
            factor = constant(1 - q / (2 * x)) + back.scaled(0.5)
        whole = whole * factor
    return whole


def traffic(kernel: Kernel) -> Posynomial:
    """All values moved by the dispatch."""
    return total(transfers(kernel).values())


def columns(kernel: Kernel, accounting: Accounting = FULL) -> dict[str, Posynomial]:
    """Resident values at each box: inputs, states, and what is live between boxes.

    Input slices of a step are resident together. A map writes over an input that dies at it.
    """
    inner = len(kernel.loops) - 1
    inputs = ZERO
    for array in kernel.body.inputs:
        depth = kernel.result_depth[array.name]
        streamed = depth >= kernel.outer
        copies = accounting.buffers if streamed else 1
        inputs = inputs + tile_of(kernel, array.name).scaled(copies)
    held = [product(extent(kernel, a) for a in node.axes) for node in kernel.states]
    sizes = [set(node.axes) for node in kernel.states]
    if not accounting.statistics:
        held = [h for h, mine in zip(held, sizes, strict=True) if not any(mine < s for s in sizes)]
    held += [_scan_state(kernel, node) for node in kernel.scans]
    resident = inputs + total(held)
    found: dict[str, Posynomial] = {}
    live: dict[str, Posynomial] = {}
    waiting = {name: len(users) for name, users in kernel.body.consumers.items()}
    state_names = {node.name for node in kernel.states}
    if not accounting.intermediates:
        return {"resident": resident}
    for node in kernel.body.nodes:
        if node.kind == "const" or (node.name not in state_names and _after(kernel, node, inner)):
            continue
        dying = _release(kernel, node, waiting, live)
        reused = node.kind in ("map", "mask") and tile_of(kernel, node.name) in dying
        if node.name not in state_names:
            size = tile_of(kernel, node.name)
            if reused:
                dying.remove(size)
            live[node.name] = size
        found[node.name] = resident + total(live.values()) + total(dying)
    return {name: column for name, column in found.items() if column.terms} or {
        "resident": resident
    }


def _after(kernel: Kernel, node: Node, inner: int) -> bool:
    """Whether a box runs after a stream loop has closed: its tile then replaces stream slices."""
    return kernel.work_depth(node) < inner and bool(kernel.taint[node.name])


def _release(
    kernel: Kernel, node: Node, waiting: dict[str, int], live: dict[str, Posynomial]
) -> list[Posynomial]:
    """Drop inputs read for the last time from the live set; their tiles."""
    dying: list[Posynomial] = []
    for name in dict.fromkeys(node.inputs):
        waiting[name] -= 1
        if waiting[name] == 0 and name in live and name not in kernel.body.outputs:
            dying.append(live.pop(name))
    return dying


def _scan_state(kernel: Kernel, node: Node) -> Posynomial:
    """What a scan carries from one slice to the next."""
    if node.kind == "scan":
        return product(extent(kernel, a) for a in node.axes if a not in node.over)
    k, v = (kernel.body.axes_of(name) for name in node.inputs[1:3])
    return product(extent(kernel, a) for a in scan_state_axes(k, v, str(node.attr("time"))))


def memory(kernel: Kernel, accounting: Accounting = FULL) -> tuple[Posynomial, ...]:
    """The distinct columns that no other column contains: the capacity constraints."""
    unique = list(dict.fromkeys(columns(kernel, accounting).values()))
    return tuple(c for c in unique if not any(c is not o and _within(c, o) for o in unique))


def _within(small: Posynomial, large: Posynomial) -> bool:
    """Whether every term of `small` is in `large` with at least its coefficient."""
    have = {term.powers: term.coefficient for term in large.terms}
    return all(have.get(term.powers, 0.0) >= term.coefficient for term in small.terms)


# --- exact ----------------------------------------------------------------------------------------


@cache
def exact_transfers(kernel: Kernel) -> dict[str, int]:
    """Values moved by the dispatch with the kernel's tiles, ragged tails and masks included."""
    moved: dict[str, int] = {}
    for array in kernel.body.inputs:
        late = array.name in kernel.after_merge
        moved[array.name] = _exact(kernel, array.name, kernel.result_depth[array.name], stored=late)
    for name in kernel.body.outputs:
        if kernel.splits:
            moved[f"{name} (store)"] = _exact(kernel, name, kernel.outer - 1, stored=True)
        else:
            moved[f"{name} (store)"] = _exact(kernel, name, kernel.result_depth[name])
    for node in kernel.parts:
        parts = math.prod(
            len(_lengths(kernel, each)) for each in kernel.loops if each.kind == "split"
        )
        moved[f"{node.name} (partial)"] = (
            2 * parts * kernel.body.elements(node.name) * _repeats(kernel, node)
        )
    return moved


def _repeats(kernel: Kernel, node: Node) -> int:
    """Group trips of axes a split state does not carry: each group writes its own copy."""
    return math.prod(
        len(_lengths(kernel, each))
        for each in kernel.loops
        if each.kind == "group" and each.axis not in node.axes
    )


def _lengths(kernel: Kernel, loop: Loop) -> list[int]:
    """Tile lengths of a loop over its whole axis; a stream inside a split restarts in each part."""
    whole = kernel.body.size[loop.axis]
    spans = [whole]
    if loop.kind == "stream" and loop.axis in kernel.splits:
        spans = _cut(whole, kernel.tile[f"w_{loop.axis}"])
    return [part for span in spans for part in _cut(span, kernel.tile[loop.symbol])]


def _cut(whole: int, tile: int) -> list[int]:
    """Full tiles and the ragged last one."""
    full, rest = divmod(whole, tile)
    return [tile] * full + ([rest] if rest else [])


def _exact(kernel: Kernel, value: str, depth: int, stored: bool = False) -> int:
    """Σ over all iterations of loops 0..depth of the tile's size."""
    loops = [
        each
        for i, each in enumerate(kernel.loops)
        if i <= depth and not (stored and each.kind == "split")
    ]
    streamed = {each.axis for each in loops if each.kind == "stream"}
    loops = [each for each in loops if not (each.kind == "split" and each.axis in streamed)]
    views = [u for u in kernel.body.consumers[value] if _is_view(kernel, u)]
    mapping = (
        dict(kernel.body.node[views[0]].attr("map")) if views and value in kernel.body.array else {}
    )
    axes = kernel.body.axes_of(value)
    drives = {axis: mapping.get(axis, ((axis, 1),)) for axis in axes}
    used: set[str] = set()
    count = 1
    for axis in axes:
        count *= _spanned(kernel, drives[axis], loops)
        used |= {name for name, _ in drives[axis]}
    for loop in loops:
        if loop.axis not in used:
            count *= len(_lengths(kernel, loop))
    return _exact_masked(kernel, value, loops, count)


def _spanned(kernel: Kernel, terms: tuple[tuple[str, int], ...], loops: list[Loop]) -> int:
    """Σ over the tiles of the driving axes of Σ stride·(length - 1) + 1."""
    combinations: list[int] = [1]
    for name, stride in terms:
        looped = [each for each in loops if each.axis == name]
        lengths = _lengths(kernel, looped[0]) if looped else [kernel.body.size[name]]
        combinations = [done + stride * (n - 1) for done in combinations for n in lengths]
    return sum(combinations)


def _exact_masked(kernel: Kernel, value: str, loops: list[Loop], count: int) -> int:
    """Replace the (rows x columns) part of a count by what the mask's bounds visit."""
    for axis, box in kernel.bound_by:
        mask = kernel.body.node[box]
        row = str(mask.attr("row"))
        row_loop = next((each for each in loops if each.axis == row), None)
        if row_loop is None or not any(each.axis == axis for each in loops):
            continue
        axes = kernel.body.axes_of(value)
        visits = visited(kernel, axis, box)
        plain, seen = 0, 0
        column_loop = next(each for each in loops if each.axis == axis)
        all_lengths = _lengths(kernel, column_loop)
        for rows, lengths in visits:
            weight = rows if row in axes else 1
            plain += weight * (sum(all_lengths) if axis in axes else len(all_lengths))
            seen += weight * (sum(lengths) if axis in axes else len(lengths))
        count = count // plain * seen
    return count


def visited(kernel: Kernel, axis: str, box: str) -> list[tuple[int, list[int]]]:
    """For each row tile: (rows, lengths of the column slices its mask lets it visit)."""
    mask = kernel.body.node[box]
    row = str(mask.attr("row"))
    row_loop = kernel.loops[kernel.depth_of_axis[row]]
    step = kernel.tile[kernel.loops[kernel.depth_of_axis[axis]].symbol]
    q, x, window = kernel.body.size[row], kernel.body.size[axis], int(mask.attr("window"))
    result: list[tuple[int, list[int]]] = []
    first = 0
    for rows in _cut(q, kernel.tile[row_loop.symbol]):
        last = min(x, first + rows + x - q)
        low = max(0, first + x - q - window + 1) if window else 0
        starts = range(low // step * step, last, step)
        result.append((rows, [min(step, x - start) for start in starts]))
        first += rows
    return result


def exact_traffic(kernel: Kernel) -> int:
    """All values moved by the dispatch, exactly."""
    return sum(exact_transfers(kernel).values())


def padded_traffic(kernel: Kernel) -> int:
    """All values moved when ragged tiles are padded to full ones (handbook 2.3, first form)."""
    whole: dict[str, int] = {}
    for loop in kernel.loops:
        if loop.kind == "group" or loop.axis not in whole:
            tile = kernel.tile[loop.symbol]
            whole[loop.axis] = -(-kernel.body.size[loop.axis] // tile) * tile
    return exact_traffic(kernel.resized(whole))


def resident(kernel: Kernel, accounting: Accounting = FULL) -> float:
    """The largest column for the kernel's tiles, in values."""
    values: dict[str, float] = {**kernel.body.size, **kernel.tile}
    return max(column.value(values) for column in columns(kernel, accounting).values())


def widest_column(kernel: Kernel, accounting: Accounting = FULL) -> tuple[str, float]:
    """(box at which most is resident, how much)."""
    values: dict[str, float] = {**kernel.body.size, **kernel.tile}
    sizes = {name: column.value(values) for name, column in columns(kernel, accounting).items()}
    return max(sizes.items(), key=lambda item: item[1])


# --- compute --------------------------------------------------------------------------------------


def operations(kernel: Kernel) -> dict[str, Posynomial]:
    """Operations of the dispatch by pipe: "tensor" (FLOP), "special" and "fp" (results)."""
    work: dict[str, Posynomial] = {"tensor": ZERO, "special": ZERO, "fp": ZERO}
    for node in kernel.body.nodes:
        pipe = pipe_of(kernel, node)
        if pipe == "none":
            continue
        work[pipe] = work[pipe] + _box_work(kernel, node)
    for name, correction in kernel.correction_of.items():
        node = kernel.body.node[name]
        index = max(kernel.closed_loops(node))
        loops = kernel.loops[: index + 1]
        steps = product(_trips(each) for each in loops if each.axis not in node.axes)
        size = product(variable(axis) for axis in node.axes)
        row = correction.matrix[correction.targets.index(name)]
        active = sum(entry != "0" for entry in row)
        work["fp"] = work["fp"] + (size * steps).scaled(2.0 * active)
        if name == _first_with(kernel, correction.matrix):
            base = kernel.body.node[correction.bases[0]]
            rows = product(variable(axis) for axis in base.axes)
            special = _special_in(correction.matrix, correction.symbols)
            if special:
                work["special"] = work["special"] + (rows * steps_of(base, loops)).scaled(special)
    return work


def steps_of(node: Node, loops: tuple[Loop, ...]) -> Posynomial:
    """Trips of the loops whose axis a box lacks."""
    return product(_trips(each) for each in loops if each.axis not in node.axes)


def _first_with(kernel: Kernel, matrix: tuple[tuple[str, ...], ...]) -> str:
    """The first reduction that uses a correction matrix: equal matrices are computed once."""
    return next(name for name, c in kernel.correction_of.items() if c.matrix == matrix)


def _special_in(matrix: tuple[tuple[str, ...], ...], symbols: tuple[tuple[str, str], ...]) -> int:
    """Special-function results in one correction matrix."""
    names = tuple(name for name, _ in symbols)
    count = 0
    for row in matrix:
        for entry in row:
            expression = parse(entry, names)
            functions = expression.atoms(*_functions())
            count += len(functions)
    return count


def _functions() -> tuple[type, ...]:
    """The sympy classes that run on the special-function unit."""
    return (sympy().exp, sympy().log)


def pipe_of(kernel: Kernel, node: Node) -> str:
    """The pipe of a box: a contraction is tensor-core work when both operands have a free axis
    that a matrix product needs; otherwise it is a weighted sum on the FP cores."""
    spec = op(node.op)
    if node.kind != "contract":
        return spec.pipe
    frames = [set(kernel.body.axes_of(name)) - set(node.over) for name in node.inputs]
    if len(frames) == 2 and frames[0] - frames[1] and frames[1] - frames[0]:
        return "tensor"
    return "fp"


def _box_work(kernel: Kernel, node: Node) -> Posynomial:
    """Operations of one box, repeated by every loop that re-runs it."""
    depth = kernel.work_depth(node)
    axes = dict.fromkeys((*node.axes, *node.over))
    base = product(variable(axis) for axis in axes)
    factor = op(node.op).flops
    if node.kind == "contract":
        factor = float(len(node.inputs))
    if node.op == "topk":
        factor = 1.0 + math.log2(max(int(node.attr("k")), 1))
    if node.kind == "scan_contract":
        return _scan_contract_work(kernel, node)
    loops = list(kernel.loops[: depth + 1])
    repeats = product(_trips(each) for each in loops if each.axis not in axes)
    return _shortened(kernel, (base * repeats).scaled(factor), loops if set(axes) else [])


def _scan_contract_work(kernel: Kernel, node: Node) -> Posynomial:
    """Chunked causal contraction, chunk c of time t: c(d + e) + 2de products a step."""
    time = str(node.attr("time"))
    q, k, v = (kernel.body.axes_of(name) for name in node.inputs)
    chunk = extent(kernel, time)
    batch = product(variable(a) for a in q if a in v)
    inner = product(variable(a) for a in k if a not in v)
    value = product(variable(a) for a in v if a not in k)
    rest = product(variable(a) for a in q if a not in v and a not in k)
    per_step = chunk * (inner + value) * rest + inner * value * rest + inner * value
    return (batch * per_step).scaled(2.0)


def numbers(kernel: Kernel, part: Posynomial) -> float:
    """A posynomial at the kernel's sizes and tiles."""
    return part.value({**kernel.body.size, **kernel.tile})


def values_at(kernel: Kernel, tiles: Mapping[str, float]) -> dict[str, float]:
    """Axis sizes and the given tile sizes as one mapping."""
    return {**{axis: float(size) for axis, size in kernel.body.size.items()}, **tiles}
