"""The list of tasks of a mixed batch, made on the GPU: which sequence and row tile each task is.

Arrays: `bounds: [batch + 1]`, where the tokens of each sequence begin; `lengths: [batch]`, its
keys; `tiles: [tasks, 5]`: of every task the sequence, its first token, the end of the sequence's
tokens, and how many tokens and keys the sequence has. A task finds its sequence as the number of
sequences whose tiles end before it. Tasks that are not needed have no tokens and no keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile import (
    FP32,
    INT32,
    Array,
    Program,
    Tile,
    array,
    cdiv,
    coordinate,
    cumsum,
    grid,
    load,
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
    """Tokens of a tile, a power of 2; sequences that there is room for."""

    tokens: int = 64
    room: int = 64

    def __post_init__(self) -> None:
        """Refuse what does not fit a block."""
        if not 1 <= self.room <= MOST or self.tokens < 1 or self.tokens & (self.tokens - 1):
            raise InputError(
                f"list of tasks of {self.room} sequences in tiles of {self.tokens} tokens: "
                f"expected at most {MOST} sequences and a power of 2"
            )

    @property
    def tasks(self) -> int:
        """Tasks that a block lists."""
        return AT_A_TIME // self.room


def task_list(config: TaskListConfig | None = None) -> Program:
    """The program of a configuration."""
    arrays = {"bounds": array(INT32, "bounds"), "lengths": array(INT32, "batch")}
    arrays["tiles"] = array(INT32, "tasks fields")
    return trace(_task_list, arrays, name="task_list", config=config or TaskListConfig())


def task_list_schedule(config: TaskListConfig) -> SimtSchedule:
    """Laid over threads by sizes; what follows is launched meanwhile."""
    return replace(simt(task_list(config)), launch=LaunchPlan(persistent=False, dependent=True))


def _task_list(bounds: Array, lengths: Array, tiles: Array, config: TaskListConfig) -> None:
    (block,) = grid(blocks=cdiv(size("tasks"), config.tasks))
    every = span(0, config.room, "sequences")
    there = coordinate("sequences", config.room, 0) < size("batch")
    begins = where(there, load(bounds, every), 0)
    counts = where(there, load(bounds, span(1, config.room, "sequences")) - begins, 0)
    # Exact: a number of tokens below 2^24 by a power of 2.
    needed = ((counts + (config.tokens - 1)).cast(FP32) * (1.0 / config.tokens)).cast(INT32)
    whole = zeros(INT32, tasks=config.tasks, sequences=config.room)
    ends = whole + cumsum(needed, "sequences")
    task = coordinate("tasks", config.tasks, block * config.tasks)
    before = ends <= task
    own = (ends - needed <= task) & (task < ends)
    tile = task - sum_along(where(before, whole + needed, 0), "sequences")

    def of_its_sequence(numbers: Tile) -> Tile:
        return sum_along(where(own, whole + numbers, 0), "sequences")

    begin, count = of_its_sequence(begins), of_its_sequence(counts)
    sequence = of_its_sequence(coordinate("sequences", config.room, 0))
    fields = (
        sequence,
        begin + tile * config.tokens,
        begin + count,
        count,
        of_its_sequence(load(lengths, every)),
    )
    place = span(block * config.tasks, config.tasks)
    for number, one in enumerate(fields):
        store(tiles, place, number, tile=one)
