"""The kernels of a backward pass of attention, in order, by head size."""

from __future__ import annotations

from dataclasses import replace

from warploom.autosched.schedules import Policy
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import GRID, SimtSchedule
from warploom.kernels.attention.backward import (
    backward,
    backward_policy,
    finish,
    prepare,
    settle,
    tail,
)
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.backward_passes import BLOCKS, one_pass, pass_policy
from warploom.tile import Program

Kernel = tuple[Program, Policy | SimtSchedule, tuple[str, ...]]
# Of sums in fragments: neighbours of a warp read neighbours in memory. By the sizes alone, a thread
# has eight columns, which lie in four places (H200, heads of 128: 78.6 to 48.5 us; 64: 49.1, 48.4).
FRAGMENTS = SimtSchedule("fragments", 256, 8, 2, replace(GRID, resident=4), aligned=True)


def parts(config: BackwardConfig) -> tuple[str, ...]:
    """The names of its kernels."""
    if config.long:
        return ("prepare", *BLOCKS)
    return ("prepare", "main", *(("tail", "settle") if config.cut else ()), "finish")


def kernel(config: BackwardConfig, part: str) -> Kernel:
    """One of `parts`: program, policy of its schedule, and what the compiler may do.

    Index arithmetic of tasks may spill a few words; loops do not.
    """
    spills = ("spills", "stack")
    if part == "main":
        return backward(config), backward_policy(config), spills
    if part in BLOCKS:
        return one_pass(config, part), pass_policy(config, part), spills
    if part == "tail":
        return tail(config), backward_policy(config), spills
    if part == "settle":
        return settle(config), Policy(), ()
    if part == "prepare":
        program = prepare(config)
        return program, Policy() if config.long else _from_the_end(program, simt(program)), ()
    program = finish(config)
    return program, _from_the_end(program, FRAGMENTS if config.fragments else simt(program)), ()


def _from_the_end(program: Program, schedule: SimtSchedule) -> SimtSchedule:
    """The last tasks first: L2 still has of the first heads what comes before the main kernel, and
    of the last ones what that leaves."""
    order = tuple(name for name, _ in program.grid)
    return replace(schedule, launch=replace(schedule.launch, reverse=order))
