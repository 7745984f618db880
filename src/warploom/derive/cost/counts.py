"""Exact counts: the values a tiled kernel moves, ragged tails, halos and masks included.

These integers must equal what `execute.Run` counts; none of it is shared.
"""

from __future__ import annotations

import math
from functools import cache

from warploom.derive.cost.cost import is_view
from warploom.derive.formula.graph import Node
from warploom.derive.kernel.kernel import Kernel, Loop


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
            len(tile_lengths(kernel, each)) for each in kernel.loops if each.kind == "split"
        )
        moved[f"{node.name} (partial)"] = (
            2 * parts * kernel.body.elements(node.name) * _repeats(kernel, node)
        )
    return moved


def _repeats(kernel: Kernel, node: Node) -> int:
    """Group trips of axes a split state does not carry: each group writes its own copy."""
    return math.prod(
        len(tile_lengths(kernel, each))
        for each in kernel.loops
        if each.kind == "group" and each.axis not in node.axes
    )


def tile_lengths(kernel: Kernel, loop: Loop) -> list[int]:
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
    views = [u for u in kernel.body.consumers[value] if is_view(kernel, u)]
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
            count *= len(tile_lengths(kernel, loop))
    return _exact_masked(kernel, value, loops, count)


def _spanned(kernel: Kernel, terms: tuple[tuple[str, int], ...], loops: list[Loop]) -> int:
    """Σ over the tiles of the driving axes of Σ stride·(length - 1) + 1."""
    combinations: list[int] = [1]
    for name, stride in terms:
        looped = [each for each in loops if each.axis == name]
        lengths = tile_lengths(kernel, looped[0]) if looped else [kernel.body.size[name]]
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
        all_lengths = tile_lengths(kernel, column_loop)
        for rows, lengths in visits:
            weight = rows if row in axes else 1
            plain += weight * (sum(all_lengths) if axis in axes else len(all_lengths))
            seen += weight * (sum(lengths) if axis in axes else len(lengths))
        count = count // plain * seen
    return count


def visited(kernel: Kernel, axis: str, box: str) -> list[tuple[int, list[int]]]:
    """For each row tile: (rows, lengths of the column slices its mask lets it visit)."""
    row = str(kernel.body.node[box].attr("row"))
    rows = tile_lengths(kernel, kernel.loops[kernel.depth_of_axis[row]])
    step = kernel.tile[kernel.loops[kernel.depth_of_axis[axis]].symbol]
    x = kernel.body.size[axis]
    return [
        (count, [min(step, x - start) for start in starts])
        for count, starts in zip(rows, visited_starts(kernel, axis, box), strict=True)
    ]


def visited_starts(kernel: Kernel, axis: str, box: str) -> list[range]:
    """For each row tile: where the column slices begin that its mask lets it visit."""
    mask = kernel.body.node[box]
    row = str(mask.attr("row"))
    row_loop = kernel.loops[kernel.depth_of_axis[row]]
    step = kernel.tile[kernel.loops[kernel.depth_of_axis[axis]].symbol]
    q, x, window = kernel.body.size[row], kernel.body.size[axis], int(mask.attr("window"))
    result: list[range] = []
    first = 0
    for rows in tile_lengths(kernel, row_loop):
        last = min(x, first + rows + x - q)
        low = max(0, first + x - q - window + 1) if window else 0
        result.append(range(low // step * step, last, step))
        first += rows
    return result


def exact_traffic(kernel: Kernel) -> int:
    """All values moved by the dispatch, exactly."""
    return sum(exact_transfers(kernel).values())
