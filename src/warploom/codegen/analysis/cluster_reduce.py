"""Blocks of a cluster that add up their tiles through shared memory: who gets what, and its room.

Every block pushes part r of its tile into the shared memory of block r and adds up what the others
pushed to it (`cuda.emit_cluster_reduce`). Threads exchange their own registers, so that a part of
the columns of a tile is a part of every thread's registers.
"""

from __future__ import annotations

from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op, Program
from warploom.tile.interpret import cluster_reductions

QUAD_COLUMNS = 8  # columns that a thread holds in four registers: 16 bytes
WORD = 4  # bytes of a register
BARRIERS = 2  # of a group: its parts are there; what was pushed to it has been read


def check_cluster_reductions(placement: Placement, plan: LaunchPlan) -> None:
    """Raise `InputError` where the launch plan or a tile does not suit the cluster's reductions."""
    for op in cluster_reductions(placement.program):
        axis, parts = str(op.start), int(op.value or 0)
        if plan.cluster != (axis, parts):
            raise InputError(
                f"{op.where}: {parts} tasks along {axis} add up their tiles, so they must be a "
                f"cluster: expected cluster=({axis!r}, {parts}) in the launch plan, it has "
                f"{plan.cluster}"
            )
        kind = placement.oriented(op.srcs[0].type)
        width = op.dst.type.size(op.axis) if op.dst is not None else 0
        if len(kind.axes) != 2 or op.axis != kind.names[1] or width % QUAD_COLUMNS:
            raise InputError(
                f"{op.where}: {op.srcs[0].type} cut in {parts} along {op.axis!r}: expected the "
                f"axis over the columns of the registers, and parts of a multiple of {QUAD_COLUMNS}"
            )
    if len(counts := {shares(op) for op in cluster_reductions(placement.program)}) > 1:
        raise InputError(
            f"program {placement.program.name}: its cluster reductions have {sorted(counts)} "
            "parts, expected the same number in all"
        )


def shares(op: Op) -> int:
    """The blocks that get a part of the sum: the first ones of the cluster."""
    assert op.dst is not None
    return op.srcs[0].type.size(op.axis) // op.dst.type.size(op.axis)


def exchange_bytes(placement: Placement) -> int:
    """Bytes of shared memory in which one group gets the parts of other blocks."""
    found = [
        (op, placement.local(op.dst.type))
        for op in cluster_reductions(placement.program)
        if op.dst is not None
    ]
    return max(
        (int(op.value or 0) * kind.shape[0] * kind.shape[1] * WORD for op, kind in found), default=0
    )


def reduces_in_cluster(program: Program) -> bool:
    """Whether blocks of a cluster add up tiles."""
    return bool(cluster_reductions(program))
