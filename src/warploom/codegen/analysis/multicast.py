"""Which loads of a cluster's blocks are the same: one copy brings the tile to all of them."""

from __future__ import annotations

from warploom.codegen.ir.block import Ring
from warploom.codegen.ir.plan import LaunchPlan
from warploom.tile import Index, Op, Program
from warploom.tile.index import symbol
from warploom.tile.ir import walk


def is_multicast(program: Program, plan: LaunchPlan, op: Op) -> bool:
    """Whether all blocks of a cluster want the same tile at the same time.

    Its ranges are the same in all of them, and so are the bounds of a loop around the load: blocks
    whose loops run over other iterations fill their rings with other tiles. Stacked parts and
    vectors are copied by every block.
    """
    vector = op.dst is not None and len(op.dst.type.axes) == 1
    if plan.cluster[1] == 1 or vector or any(span.others for span in op.spans):
        return False
    used = [span.start for span in op.spans]
    for loop in program.loops():
        if any(inner.id == op.id for inner in walk(loop.body)):
            used += [loop.start, loop.stop]
    return all(_same_in_cluster(program, plan, value) for value in used)


def crosses_blocks(program: Program, plan: LaunchPlan, ring: Ring) -> bool:
    """Whether some tile of a ring is multicast, so that its slots are free when all blocks say so.

    Consumers then arrive at the empty barriers of every block of the cluster.
    """
    return any(
        is_multicast(program, plan, load) for buffer in ring.buffers for load in buffer.loads
    )


def _same_in_cluster(program: Program, plan: LaunchPlan, value: Index) -> bool:
    """Whether an expression has one value in all blocks of a cluster, as its form shows.

    The blocks' positions on the axis are q * blocks + rank, so position // blocks is the same.
    """
    axis, blocks = plan.cluster
    if value.op == "symbol":
        read = next((read for read in program.every_read() if read.name == value.name), None)
        places = () if read is None else read.at
        return value.name != axis and all(_same_in_cluster(program, plan, at) for at in places)
    if value.op == "//" and value.args[0] == symbol(axis):
        by = value.args[1]
        return by.op == "const" and by.value % blocks == 0
    return all(_same_in_cluster(program, plan, arg) for arg in value.args)
