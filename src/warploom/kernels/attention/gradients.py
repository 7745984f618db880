"""The kernels of a backward pass of attention, in order, by head size."""

from __future__ import annotations

from warploom.autosched.schedules import Policy
from warploom.kernels.attention.backward import (
    backward,
    backward_policy,
    finish,
    prepare,
)
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.backward_passes import BLOCKS, one_pass, pass_policy
from warploom.tile import Program

Kernel = tuple[Program, Policy, tuple[str, ...]]


def parts(config: BackwardConfig) -> tuple[str, ...]:
    """The names of its kernels."""
    if config.long:
        return ("prepare", *BLOCKS)
    return ("prepare", "main", "finish")


def kernel(config: BackwardConfig, part: str) -> Kernel:
    """One of `parts`: program, policy of its schedule, and what the compiler may do.

    Index arithmetic of tasks may spill a few words; loops do not.
    """
    spills = ("spills", "stack")
    if part == "main":
        return backward(config), backward_policy(config), spills
    if part in BLOCKS:
        return one_pass(config, part), pass_policy(config, part), spills
    return (prepare if part == "prepare" else finish)(config), Policy(), ()
