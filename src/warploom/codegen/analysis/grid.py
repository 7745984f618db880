"""Which positions of the grid the blocks of clusters take, and whether all of them are tasks."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op, Program, cdiv
from warploom.tile.index import symbol

TASK_SLOTS = 2  # tasks handed over ahead of the compute groups (the dynamic order)


def cluster_axis(program: Program, plan: LaunchPlan) -> int:
    """The position of the clustered grid axis, or -1; raises when there is no such axis."""
    axis, blocks = plan.cluster
    if blocks == 1:
        return -1
    names = [name for name, _ in program.grid]
    if axis not in names:
        raise InputError(f"launch plan: cluster along {axis!r}, the grid has {names}")
    return names.index(axis)


def inside(program: Program, plan: LaunchPlan, symbols: Mapping[str, int]) -> bool:
    """Whether a position is one of the grid: where a cluster does not divide its axis, the last
    cluster has blocks beyond it, which copy for the others and store nothing."""
    clustered = cluster_axis(program, plan)
    if clustered < 0:
        return True
    name, extent = program.grid[clustered]
    return symbols[name] < extent.evaluate(symbols)


def stores_beyond(program: Program, plan: LaunchPlan, op: Op) -> bool:
    """Whether a store of a block beyond the grid must be held back: its ranges do not say so
    themselves, by lying outside of the array for all of these blocks."""
    clustered = cluster_axis(program, plan)
    if clustered < 0 or op.array is None:
        return False
    name, extent = program.grid[clustered]
    return not any(
        span.start == symbol(name) * step and extent == cdiv(symbol(dim), step)
        for span, dim in zip(op.spans, op.array.dims, strict=True)
        for step in {span.size or 1, 1}
    )
