"""What a role does, step by step, over a few tasks whose loops have a given number of iterations.

Nothing here knows how the passes made a block program: the events are what its form says
(`ir.block`), and `ir.spec` holds them against what the tile program says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Scheduled, with_turns
from warploom.codegen.ir.steps import Ahead, Issue, Join, Step
from warploom.tile import Loop

TASKS = 2


@dataclass(frozen=True)
class Event:
    """A step of an iteration of a task: in loop `loop`, or outside of loops where that is None.

    `ahead`: done ahead of its task; `void`: a matmul whose result nobody may read.
    """

    step: Step
    task: int
    loop: Loop | None = None
    iteration: int = 0
    ahead: bool = False
    void: bool = False


def events(block: BlockProgram, role: Role, trips: int, left: int = 0) -> Iterator[Event]:
    """The events of `TASKS` tasks; each loop has `trips` iterations, and `left` that a group leaves
    out where its part is done. Loops must be pipelines."""
    if role.ahead:
        yield from _ahead(block, role, 0, trips)
        yield Event(Join(), 0)  # before its first task a group waits for what it started
    for task in range(TASKS):
        for event in _task(block, role, task, trips, left):
            if isinstance(event.step, Ahead):
                yield from _ahead(block, role, task + 1, trips)
            else:
                yield event


def _ahead(block: BlockProgram, role: Role, task: int, trips: int) -> Iterator[Event]:
    """What is done ahead of a task: nothing but a void matmul where there is no such task."""
    loop = next(s.loop for s in role.sections if isinstance(s, Pipeline))
    inside = block.filled_in(loop)
    for step in role.ahead:
        if isinstance(step, Issue):
            yield Event(step, task, loop, ahead=True, void=task == TASKS or not trips)
        elif task < TASKS and (trips or step.ring not in inside):
            yield Event(step, task, ahead=True)


def _task(block: BlockProgram, role: Role, task: int, trips: int, left: int) -> Iterator[Event]:
    for section in role.sections:
        assert not isinstance(section, Scheduled), "loops must be pipelines"
        if not isinstance(section, Pipeline):
            yield from (Event(step, task) for step in section.steps)
            continue
        depth, loop = section.depth, section.loop
        parts: list[tuple[tuple[Step, ...], int]] = []
        if trips >= depth:
            parts += [(steps, number) for number, steps in enumerate(section.prologue)]
            parts += [(section.steady, newest) for newest in range(depth, trips)]
            parts += [(steps, trips + number) for number, steps in enumerate(section.epilogue)]
        else:
            parts += [(section.plain, newest) for newest in range(trips)]
        parts += [(section.none, 0)] if not trips else []
        parts += [(section.skip, trips + number) for number in range(left)]
        parts += [(section.empty, 0)] if left and not trips else []
        for steps, newest in parts:
            for step, done in with_turns(block.placement, steps):
                iteration = newest - step.stage
                if done is None or block.placement.does(done, role.part, iteration):
                    yield Event(step, task, loop, iteration)
