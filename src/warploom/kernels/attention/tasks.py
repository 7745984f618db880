"""The list of tasks of a mixed batch, made on the GPU: which sequence and row tile each task is.

Arrays: `bounds: [batch + 1]`, where the tokens of each sequence begin; `tiles: [tasks, 2]`. A task
finds its sequence as the number of sequences whose tiles end before it. Tasks that are not needed
are of sequence `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile import (
    FP32,
    INT32,
    Array,
    Program,
    array,
    cdiv,
    coordinate,
    cumsum,
    grid,
    load,
    minimum,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)

MOST = 1024  # sequences
AT_A_TIME = 4096  # tasks times sequences that a block looks at


@dataclass(frozen=True)
class TaskListConfig:
    """Rows of a tile, a power of 2; packed rows of a token; sequences that there is room for."""

    height: int = 64
    group: int = 1
    room: int = 64

    def __post_init__(self) -> None:
        """Refuse what does not fit a block."""
        if not 1 <= self.room <= MOST or self.height & (self.height - 1) or self.group < 1:
            raise InputError(
                f"list of tasks of {self.room} sequences in tiles of {self.height} rows: expected "
                f"at most {MOST} sequences and a power of 2"
            )

    @property
    def tasks(self) -> int:
        """Tasks that a block lists."""
        return AT_A_TIME // self.room


def task_list(config: TaskListConfig | None = None) -> Program:
    """The program of a configuration."""
    arrays = {"bounds": array(INT32, "bounds"), "tiles": array(INT32, "tasks pair")}
    return trace(_task_list, arrays, name="task_list", config=config or TaskListConfig())


def task_list_schedule(config: TaskListConfig) -> SimtSchedule:
    """Laid over threads by sizes."""
    return simt(task_list(config))


def _task_list(bounds: Array, tiles: Array, config: TaskListConfig) -> None:
    (block,) = grid(blocks=cdiv(size("tasks"), config.tasks))
    first = load(bounds, span(0, config.room))
    rows = (load(bounds, span(1, config.room)) - first) * config.group + (config.height - 1)
    # Exact: a number of rows below 2^24 by a power of 2.
    needed = (rows.cast(FP32) * (1.0 / config.height)).cast(INT32)
    last = size("bounds") - 1
    needed = where(coordinate("bounds", config.room, 0) < last, needed, 0)
    ends = zeros(INT32, tasks=config.tasks, bounds=config.room) + cumsum(needed, "bounds")
    task = coordinate("tasks", config.tasks, block * config.tasks)
    before = ends <= task
    sequence = minimum(sum_along(before.cast(INT32), "bounds"), last)
    begin = sum_along(where(before, needed, 0), "bounds")
    place = span(block * config.tasks, config.tasks)
    store(tiles, place, 0, tile=sequence)
    store(tiles, place, 1, tile=task - begin)
