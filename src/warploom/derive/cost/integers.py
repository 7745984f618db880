"""Integer tiles: divisibility, ragged tails, waves and limits that the continuous model ignores.

For each axis only the smallest tile of every trip count can be best (a larger one costs the same
trips and more memory), which leaves about 2·sqrt(axis) candidates. All combinations are scored at
once on a numpy grid; when there are too many, the grid is thinned and the winner refined by
coordinate descent over all candidates. The few best are re-scored with the exact counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.derive.cost.cost import FULL, Accounting, memory, traffic
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError

GRID = 120_000
"""Most combinations scored at once."""
Score = Callable[[Kernel, Mapping[str, Any]], Any]
"""(kernel, values by symbol: arrays or numbers, axes padded to whole tiles) -> cost, lower wins."""


@dataclass(frozen=True)
class Choice:
    """The chosen tiles and their score."""

    tiles: Mapping[str, int]
    score: float


def candidates(size: int, multiple: int = 1) -> list[int]:
    """The smallest legal tile for each trip count of an axis, ascending.

    Legal: a multiple of `multiple`, or the whole axis.
    """
    tiles = {size, min(size, multiple)}
    tile = -(-size // multiple) * multiple - multiple
    while tile >= multiple:
        trips = -(-size // tile)
        least = math.ceil(size / trips)
        tile = -(-least // multiple) * multiple
        tiles.add(tile)
        tile -= multiple
    return sorted(tiles)


def padded_score(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """Values moved when ragged last tiles are padded to whole ones."""
    return traffic(kernel).grid(values)


def choose(
    kernel: Kernel,
    capacity: float,
    multiples: Mapping[str, int] | None = None,
    score: Score = padded_score,
    accounting: Accounting = FULL,
) -> Choice:
    """The best integer tiles at `capacity` values; `multiples` gives a divisor for each axis.

    Raises `InputError` when no legal combination fits, naming the smallest one and its size.
    """
    wanted = multiples or {}
    options = [
        candidates(kernel.body.size[each.axis], wanted.get(each.axis, 1)) for each in kernel.loops
    ]
    if not options:
        values = _values(kernel, [])
        needed = float(max(c.grid(values) for c in memory(kernel, accounting)))
        if needed > capacity:
            raise _does_not_fit(kernel, {}, needed, capacity)
        return Choice({}, float(score(kernel, values)))
    thin = [_thinned(option, _share(options)) for option in options]
    best, looked = _grid_best(kernel, thin, capacity, score, accounting)
    if best is None:
        smallest = [option[0] for option in options]
        needed = _needed(kernel, smallest, accounting)
        if needed > capacity:
            named = {each.symbol: t for each, t in zip(kernel.loops, smallest, strict=True)}
            raise _does_not_fit(kernel, named, needed, capacity)
        best = (tuple(smallest), float(score(kernel, _values(kernel, smallest))))
    improved = True
    while improved and thin != options:
        improved = False
        for axes in _neighbourhoods(len(options)):
            near = [
                _around(options[i], best[0][i]) if i in axes else [best[0][i]]
                for i in range(len(options))
            ]
            found, count = _grid_best(kernel, near, capacity, score, accounting)
            looked += count
            if found is not None and found[1] < best[1] * (1 - 1e-9):
                best, improved = found, True
    tiles = {each.symbol: int(t) for each, t in zip(kernel.loops, best[0], strict=True)}
    return Choice(tiles, best[1])


def _neighbourhoods(count: int) -> list[tuple[int, ...]]:
    """All pairs of axes are searched together: tiles trade memory against each other."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    return pairs or [(0,)]


def _around(option: list[int], chosen: int) -> list[int]:
    """All candidates of an axis when few, otherwise those within a factor of four."""
    return option if len(option) <= 300 else [t for t in option if chosen / 4 <= t <= chosen * 4]


def _share(options: list[list[int]]) -> int:
    """How many candidates each axis may keep so that the grid stays small."""
    total = math.prod(len(option) for option in options)
    if total <= GRID:
        return max(len(option) for option in options)
    return max(4, int(GRID ** (1 / len(options))))


def _thinned(option: list[int], keep: int) -> list[int]:
    """A logarithmic selection that keeps both ends."""
    if len(option) <= keep:
        return option
    kept: set[int] = set()
    for wanted in np.geomspace(option[0], option[-1], keep):
        place = bisect_left(option, wanted)
        near = option[max(0, place - 1) : place + 1]
        kept.add(min(near, key=lambda tile: abs(math.log(tile / wanted))))
    return sorted(kept)


def _grid_best(
    kernel: Kernel, options: list[list[int]], capacity: float, score: Score, accounting: Accounting
) -> tuple[tuple[tuple[int, ...], float] | None, int]:
    """The best feasible combination of a grid, ties to the least memory."""
    arrays = np.meshgrid(*[np.array(o, float) for o in options], indexing="ij", sparse=True)
    values = _values(kernel, list(arrays))
    shape = tuple(len(option) for option in options)
    needed: Any = 0.0
    for column in memory(kernel, accounting):
        needed = np.maximum(needed, column.grid(values))
    needed = np.broadcast_to(needed, shape)
    cost = np.where(needed <= capacity, np.broadcast_to(score(kernel, values), shape), np.inf)
    low = float(cost.min())
    if not np.isfinite(low):
        return None, cost.size
    ties = np.where(cost <= low * (1 + 1e-12), needed, np.inf)
    where = np.unravel_index(int(ties.argmin()), shape)
    return (tuple(options[i][int(w)] for i, w in enumerate(where)), low), cost.size


def _values(kernel: Kernel, tiles: list[Any]) -> dict[str, Any]:
    """Sizes by symbol, looped axes padded to whole tiles."""
    values: dict[str, Any] = {axis: float(size) for axis, size in kernel.body.sizes}
    for loop, tile in zip(kernel.loops, tiles, strict=True):
        size = float(kernel.body.size[loop.axis])
        values[loop.symbol] = tile
        padded = np.ceil(size / np.asarray(tile)) * tile
        values[loop.axis] = np.maximum(values[loop.axis], padded)
    return values


def _needed(kernel: Kernel, tiles: list[int], accounting: Accounting) -> float:
    """The largest column of one combination."""
    values = _values(kernel, [float(t) for t in tiles])
    return float(max(column.grid(values) for column in memory(kernel, accounting)))


def _does_not_fit(
    kernel: Kernel, tiles: Mapping[str, int], needed: float, capacity: float
) -> InputError:
    """The refusal of a size that cannot fit."""
    axes = ", ".join(f"{name}={tile}" for name, tile in tiles.items()) or "no loops"
    return InputError(
        f"kernel {kernel.name} cannot fit: its smallest legal tiles ({axes}) hold {needed:.0f} "
        f"values, the level holds {capacity:.0f}; the nearest level that works has {needed:.0f}"
    )
