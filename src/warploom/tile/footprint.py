"""Which task stores which elements: what no task writes, and what several tasks do.

Places of stores follow from the grid, the sizes and the numbers that tasks read, so nothing is
computed: the question is answered for the program, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.tile.evaluate import Value, bounds
from warploom.tile.interpret import iteration_symbols, points, sizes, task_symbols
from warploom.tile.ir import Loop, Op, Program, walk

STORES = ("store", "store_add")
NOBODY = -1


@dataclass(frozen=True)
class Overlap:
    """Elements of an array that one task stores and another stores too, or adds to.

    `first` is the first of them that was met, `tasks` the points of the grid that write it.
    """

    array: str
    count: int
    first: tuple[int, ...]
    tasks: tuple[Mapping[str, int], Mapping[str, int]]


@dataclass(frozen=True)
class Footprint:
    """Where a program writes one array: `written` has its shape."""

    array: str
    written: NDArray[np.bool_]
    overlap: Overlap | None


def footprints(program: Program, arrays: Mapping[str, Value]) -> dict[str, Footprint]:
    """The footprint of every array that `program` stores to; `arrays` as `interpret` takes them.

    Elements that tasks only add to (`store_add`) are written, and do not overlap: sums have no
    order of tasks.
    """
    names = dict.fromkeys(op.array.name for op in program.ops() if op.array and op.kind in STORES)
    owners = {name: _Owners(arrays[name].shape) for name in names}
    symbols = sizes(program, arrays)
    tasks = list(points(program, symbols))
    for number, point in enumerate(tasks):
        known = task_symbols(program, arrays, {**symbols, **point})
        for op, at in _stores(program.body, arrays, known):
            assert op.array is not None
            box = bounds(op.spans, arrays[op.array.name].shape, at)
            if box is not None:
                owners[op.array.name].write(box[0], number, op.kind == "store_add")
    return {name: owner.footprint(name, tasks) for name, owner in owners.items()}


def _stores(
    body: Sequence[Op | Loop], arrays: Mapping[str, Value], symbols: dict[str, int]
) -> Iterator[tuple[Op, dict[str, int]]]:
    """Every store a task performs, with the symbols it is performed under."""
    for item in body:
        if isinstance(item, Op):
            if item.kind in STORES:
                yield item, symbols
        elif any(op.kind in STORES for op in walk(item.body)):
            for at in range(item.start.evaluate(symbols), item.stop.evaluate(symbols)):
                inside = iteration_symbols(item, arrays, symbols, at)
                yield from _stores(item.body, arrays, inside)


class _Owners:
    """Which task stored each element of one array, and which added to it last."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.stored = np.full(shape, NOBODY, np.int32)
        self.added: NDArray[np.int32] | None = None
        self.twice: NDArray[np.bool_] | None = None
        self.first: tuple[tuple[int, ...], int, int] | None = None

    def write(self, box: tuple[slice | int, ...], task: int, adds: bool) -> None:
        stored = self.stored[box]
        clash = (stored != NOBODY) & (stored != task)
        self._note(box, clash, stored, task)
        if adds and self.added is None:
            self.added = np.full(self.stored.shape, NOBODY, np.int32)
        if self.added is not None:
            if adds:
                self.added[box] = task
                return
            added = self.added[box]
            self._note(box, (added != NOBODY) & (added != task), added, task)
        self.stored[box] = np.where(clash, stored, task)

    def _note(self, box: tuple[slice | int, ...], clash: Any, other: Any, task: int) -> None:
        if not np.any(clash):
            return
        if self.twice is None:
            self.twice = np.zeros(self.stored.shape, bool)
        self.twice[box] |= clash
        if self.first is None:
            inner = np.argwhere(clash)[0]
            moved = iter(inner)
            place = tuple(
                part if isinstance(part, int) else int(part.start + next(moved)) for part in box
            )
            self.first = (place, int(np.asarray(other)[tuple(inner)]), task)

    def footprint(self, array: str, tasks: Sequence[Mapping[str, int]]) -> Footprint:
        written = self.stored != NOBODY
        if self.added is not None:
            written |= self.added != NOBODY
        if self.first is None or self.twice is None:
            return Footprint(array, written, None)
        place, one, other = self.first
        count = int(self.twice.sum())
        return Footprint(array, written, Overlap(array, count, place, (tasks[one], tasks[other])))
