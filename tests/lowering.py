"""A program under a policy as a block program: what tests of lowering and printing begin with."""

from dataclasses import replace

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.passes.lower import lower
from warploom.tile import Program


def with_slots(schedule: KernelSchedule, slots: int) -> KernelSchedule:
    """The schedule with so many slots of every ring, whether they fit or not."""
    loops = {
        index: replace(loop, ring_depth=dict.fromkeys(loop.ring_depth, slots))
        for index, loop in schedule.loops.items()
    }
    return replace(schedule, loops=loops)


def lowered(program: Program, policy: Policy, arch: str = "sm_90a") -> BlockProgram:
    """The block program of the schedule that `schedule_for` chooses."""
    return lower(program, schedule_for(program, policy, arch=arch))
