"""Shared memory in which the warps of a compute group exchange what their registers hold.

Every group has a region of its own, as large as its neediest op. An op that uses it synchronises
the group, writes, synchronises again and reads: the first barrier ends the reads of the op before.
"""

from __future__ import annotations

from warploom.codegen.analysis.register_tiles import COLUMN_GROUP
from warploom.codegen.ir.place import Placement
from warploom.tile import Op, TileType
from warploom.tile.ops import BLOCK, OPS

WARPS = 4
WORD = 4  # bytes of a value, whatever its element type


def pitch(cols: int) -> int:
    """Words from one row of an exchanged tile to the next: rows begin in different banks."""
    return cols + 1


def crosses_rows(placement: Placement, op: Op) -> bool:
    """Whether an op runs along rows, which are spread over the warps."""
    return OPS[op.kind].group in ("reduce", "scan") and op.axis in placement.rows


def exchanges(placement: Placement, op: Op) -> bool:
    """Whether an op reads elements that other threads hold: gathers, parts that are no whole groups
    of 8 columns, vectors that come from rows to columns or back."""
    if op.kind == "gather":
        return True
    if op.kind == "rename" and op.dst is not None:
        return placement.lies(op.axis) != placement.lies(_renamed(op))
    if op.kind != "slice" or op.dst is None:
        return False
    start, size = int(op.value or 0), op.dst.type.size(op.axis)
    return op.axis not in placement.cols or bool((start | size) % COLUMN_GROUP)


def _renamed(op: Op) -> str:
    assert op.dst is not None
    return op.dst.type.names[op.srcs[0].type.names.index(op.axis)]


def words(placement: Placement, op: Op) -> int:
    """Words of the region that one group needs for an op."""
    if op.id not in placement.fusion.kept or not op.srcs:
        return 0
    kind = placement.oriented(placement.local(op.srcs[0].type))
    if op.kind == "lower_inverse":
        return BLOCK * BLOCK // 2 * 10 // 16  # blocks up to the diagonal, two elements a word
    if crosses_rows(placement, op):
        rows, cols = (*kind.shape, 1)[:2]
        blocks = rows // 64 if op.kind == "cumsum" else 1
        return WARPS * cols * blocks * (2 if op.kind == "argmax" else 1)
    if exchanges(placement, op) and not over_lanes(placement, op):
        return _whole(kind)
    return 0


def over_lanes(placement: Placement, op: Op) -> bool:
    """Whether an op reads a vector of which every warp has all."""
    axes = op.srcs[0].type.names if op.srcs else ()
    return len(axes) == 1 and placement.lies(axes[0]) == "lanes"


def lane_words(placement: Placement) -> tuple[int, int]:
    """Of a group's region: words before the warps' own parts, and words of each of them."""
    found = [
        op.srcs[0].type.shape[0]
        for op in placement.program.ops()
        if op.id in placement.fusion.kept and over_lanes(placement, op) and exchanges(placement, op)
    ]
    return -(-_most(placement) // 4) * 4, -(-max(found, default=0) // 4) * 4


def _whole(kind: TileType) -> int:
    return kind.shape[0] * pitch(kind.shape[1]) if len(kind.axes) == 2 else kind.shape[0]


def region_bytes(placement: Placement) -> int:
    """Bytes of one group's region: 0 for a kernel that exchanges nothing."""
    before, each = lane_words(placement)
    return (before + WARPS * each) * WORD


def _most(placement: Placement) -> int:
    return max((words(placement, op) for op in placement.program.ops()), default=0)
