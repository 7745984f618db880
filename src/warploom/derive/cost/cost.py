"""What a kernel costs: values moved, values resident, operations by pipe.

Two forms of each. *Symbolic*: posynomials in axis sizes and tile sizes, for closed forms and the
geometric program. *Exact*: integers for given tiles, ragged tails and masks included; these must
equal what `execute.Run` counts, which shares no code with this module.

Formula: an array loaded at depth D crosses
|tile| x (all trips of loops 0..D) = |array| x Π trips of the loops 0..D whose axis it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from warploom.derive.cost.posynomial import ZERO, Posynomial, constant, product, total, variable
from warploom.derive.formula.evaluate import scan_state_axes
from warploom.derive.formula.graph import Node
from warploom.derive.kernel.kernel import Kernel, Loop

ASKED_AGAIN = 256  # kernels whose costs are kept: the search asks once for every grid of tiles


@dataclass(frozen=True)
class Accounting:
    """What counts as resident (the paper, 2412.03317, leaves the score tile out).

    `intermediates`: tiles between boxes. `statistics`: running values smaller than the widest one
    (maxima, normalisers). `buffers`: copies of each streamed input slice (2 = double buffered).
    `places`: (shared, register) weights of a value on a GPU. Loaded tiles lie in shared memory,
    computed ones in registers, and each must fit on its own: the weights scale both to the one
    capacity that columns are compared with. None: one memory holds everything.
    """

    intermediates: bool = True
    statistics: bool = True
    buffers: int = 1
    places: tuple[float, float] | None = None


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
    views = [kernel.body.node[u] for u in kernel.body.consumers[value] if is_view(kernel, u)]
    if value in kernel.body.array and views:
        return _window_tile(kernel, value, views[0], depth)
    return product(extent(kernel, axis, depth) for axis in kernel.body.axes_of(value))


def is_view(kernel: Kernel, name: str) -> bool:
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


@lru_cache(ASKED_AGAIN)
def transfers(kernel: Kernel) -> Mapping[str, Posynomial]:
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
        parts = product(trips_of(kernel, each) for each in kernel.loops if each.kind == "split")
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
            result = result * trips_of(kernel, loop)
    return shortened(kernel, result, loops)


def _driving_axes(kernel: Kernel, value: str) -> set[str]:
    """The loop axes that move a value's tile: its own, or those of the view that reads it."""
    axes = set(kernel.body.axes_of(value))
    if value in kernel.body.array:
        for user in kernel.body.consumers[value]:
            if is_view(kernel, user):
                axes |= set(kernel.body.node[user].axes)
    return axes


def trips_of(kernel: Kernel, loop: Loop) -> Posynomial:
    """How often a loop runs, without the ceiling; a stream inside a split runs over one part."""
    inside = loop.kind == "stream" and loop.axis in kernel.splits
    return variable(f"w_{loop.axis}" if inside else loop.axis) * variable(loop.symbol, -1)


def shortened(kernel: Kernel, whole: Posynomial, loops: list[Loop]) -> Posynomial:
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


@lru_cache(ASKED_AGAIN)
def traffic(kernel: Kernel) -> Posynomial:
    """All values moved by the dispatch."""
    return total(transfers(kernel).values())


@lru_cache(ASKED_AGAIN)
def columns(kernel: Kernel, accounting: Accounting = FULL) -> Mapping[str, Posynomial]:
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
    states = total(held)
    shared, inside = accounting.places or (1.0, 1.0)
    resident = inputs + states if accounting.places is None else states.scaled(inside)
    found: dict[str, Posynomial] = {}
    live: dict[str, Posynomial] = {}
    waiting = {name: len(users) for name, users in kernel.body.consumers.items()}
    state_names = {node.name for node in kernel.states}
    if not accounting.intermediates:
        return {"resident": resident}
    if accounting.places is not None and inputs.terms:
        found["shared memory"] = inputs.scaled(shared)
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
        operands = _operands(kernel, node) if accounting.places is not None else ZERO
        between = total(live.values()) + total(dying) + operands
        found[node.name] = resident + between.scaled(inside)
    return {name: column for name, column in found.items() if column.terms} or {
        "resident": resident
    }


def _operands(kernel: Kernel, node: Node) -> Posynomial:
    """Computed operands of a matrix product, once more at half width: registers hold the fp32
    tile and its 16-bit copy while the product is set up. Of a chunk, what its rows weigh each
    other by, and the weighed keys."""
    if node.kind == "scan_contract":
        rows = extent(kernel, str(node.attr("time")))
        return rows * rows + tile_of(kernel, node.factors[1]).scaled(0.5)
    if node.kind != "contract" or len(node.inputs) < 2:
        return ZERO
    made = [tile_of(kernel, name) for name in node.inputs if name in kernel.body.node]
    return total(made).scaled(0.5)


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


@lru_cache(ASKED_AGAIN)
def memory(kernel: Kernel, accounting: Accounting = FULL) -> tuple[Posynomial, ...]:
    """The distinct columns that no other column contains: the capacity constraints."""
    unique = list(dict.fromkeys(columns(kernel, accounting).values()))
    return tuple(c for c in unique if not any(c is not o and _within(c, o) for o in unique))


def _within(small: Posynomial, large: Posynomial) -> bool:
    """Whether every term of `small` is in `large` with at least its coefficient."""
    have = {term.powers: term.coefficient for term in large.terms}
    return all(have.get(term.powers, 0.0) >= term.coefficient for term in small.terms)


def resident(kernel: Kernel, accounting: Accounting = FULL) -> float:
    """The largest column for the kernel's tiles, in values."""
    values: dict[str, float] = {**kernel.body.size, **kernel.tile}
    return max(column.value(values) for column in columns(kernel, accounting).values())


def numbers(kernel: Kernel, part: Posynomial) -> float:
    """A posynomial at the kernel's sizes and tiles."""
    return part.value({**kernel.body.size, **kernel.tile})
