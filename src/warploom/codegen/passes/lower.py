"""Lowering: a tile program and its kernel schedule to the block program that is emitted.

`scheduled` states the schedule as a block program, and `PASSES` follow from top to bottom. The
schedule says when and where every op runs; the rest follows from it by rule and without choice.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.spec import verify
from warploom.codegen.passes.early_end import early_end
from warploom.codegen.passes.group_syncs import group_syncs
from warploom.codegen.passes.joins import joins
from warploom.codegen.passes.meetings import meetings
from warploom.codegen.passes.overlap import overlap_next_task
from warploom.codegen.passes.pingpong import number_turns, take_turns
from warploom.codegen.passes.pipeline import pipeline
from warploom.codegen.passes.scheduled import scheduled
from warploom.codegen.passes.shares import shares
from warploom.codegen.passes.slots import early_release, loader_slots, task_slots, waits
from warploom.errors import CheckFailed
from warploom.tile import Program

Pass = Callable[[BlockProgram], BlockProgram]
Observer = Callable[[str, BlockProgram], None]

START = "scheduled"  # what stands before the first pass
PASSES: dict[str, Pass] = {
    "loader_slots": loader_slots,
    "waits": waits,
    "task_slots": task_slots,
    "number_turns": number_turns,
    "pipeline": pipeline,
    "early_release": early_release,
    "take_turns": take_turns,
    "shares": shares,
    "meetings": meetings,
    "joins": joins,
    "early_end": early_end,
    "overlap_next_task": overlap_next_task,
    "group_syncs": group_syncs,
}


def lower(
    program: Program, schedule: KernelSchedule, observe: Observer | None = None
) -> BlockProgram:
    """The block program; raises `InputError` where the schedule does not fit the program.

    `observe` is given what `scheduled` and every pass return, with its name.
    """
    block = scheduled(program, schedule)
    if observe is not None:
        observe(START, block)
    for name, change in PASSES.items():
        block = change(block)
        if observe is not None:
            observe(name, block)
    return block


def verified(name: str, block: BlockProgram) -> None:
    """Check what holds after the pass of that name; raises `CheckFailed`, which names it.

    An observer of `lower`.
    """
    names = [START, *PASSES]
    try:
        verify(block, names[: names.index(name) + 1])
    except CheckFailed as error:
        raise CheckFailed(f"after {name}: {error}") from None
