"""A schedule of a program without a matmul, from the sizes of its tiles.

A thread has 16 neighbouring bytes of a line and as many lines as its registers take: what it holds
of one column is counted in words. Blocks are small as long as that leaves a thread enough columns:
several on an SM are in different phases, so that some load while others compute. What 512 threads
do not hold goes over a cluster. Where a loop carries sums along, its loads run ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from warploom.codegen.analysis.stores import STORES
from warploom.codegen.ir.plan import MOST_BLOCKS
from warploom.codegen.simt.ahead import ahead
from warploom.codegen.simt.exchanges import needs_one_block
from warploom.codegen.simt.forms import Layout, forms_of
from warploom.codegen.simt.schedule import GRID, WARP, WIDEST_BYTES, SimtSchedule
from warploom.tile import Loop, Op, Program, TileType
from warploom.tile.ir import walk

WORDS = 96  # of a thread's registers for what it holds of its columns
MOST_WORDS = 192  # where blocks stay smaller for it
AT_WORK = 2  # words of a column for what is being computed
DRAWING = 2  # and for random bits
CARRYING = 0.25  # and where a loop carries others along
PAIRED = 32  # columns of a thread where two rows are loaded, or one is not loaded early
MOST_RESIDENT = 16  # blocks of an SM that a schedule asks for
RESIDENT = 768  # threads of an SM that registers must do for: 80 of each
SMALL = 128  # threads of a block, unless rows need more
FEW_LANES = 256  # of a block, beyond which more blocks share the columns
MOST_LANES = 512  # of a block: more threads have too few registers each
RING_BYTES = 1 << 15  # of a ring that has more stages than two, beside other blocks of an SM
MOST_RING = 200 << 10  # of a ring that has two, or of a block that is alone
STAGES = 4


def simt(program: Program) -> SimtSchedule:
    """A schedule from the program's sizes."""
    types = [op.dst.type for op in program.ops() if op.dst is not None and op.dst.type.axes]
    if not types:
        return SimtSchedule("simt", WARP, 1, 1)
    widest = max(prod(kind.shape) for kind in types)
    # A vector counts as columns only when nothing larger says where they are.
    cols = max(kind.shape[-1] for kind in types if len(kind.axes) > 1 or widest == kind.shape[0])
    size = min(array.dtype.bytes for array in program.arrays)
    vector = min(WIDEST_BYTES // size, cols & -cols)
    carried = _carried(program)
    words = _words(program, carried, cols)
    few, many = (max(vector, int(most / words)) for most in (WORDS, MOST_WORDS))
    most = MOST_LANES if carried else SMALL
    stored = {op.array for op in program.ops() if op.array and op.kind in STORES}
    in_place = any(op.kind == "load" and op.array in stored for op in program.ops())
    wide = _wide_loads(program, cols, 2)
    if not carried and (len(wide) > 1 or in_place):
        many = min(many, PAIRED)
    along = max(min(most, _power(-(-cols // few))), _power(-(-cols // many)), WARP)
    along = min(_power(-(-cols // vector)), along)
    one_block = _needs_one_block(program)
    lanes = min(along, MOST_LANES if carried or one_block else FEW_LANES)
    wanted = min(max(_power(-(-widest // few)), SMALL), lanes * _power(-(-widest // cols)))
    chosen = max(WARP, min(wanted, MOST_LANES))
    launch = GRID
    # A transposed tile is held twice: what a matmul's sums are turned from takes all registers.
    turned = any(op.kind == "transpose" for op in program.ops())
    if vector > 1 and not carried and len(wide) == 1 and not turned:
        launch = replace(GRID, resident=max(1, min(MOST_RESIDENT, RESIDENT // chosen)))
    made = SimtSchedule("simt", chosen, min(chosen, lanes), vector, launch)
    return _shared(program, made, along // made.lanes, 1 if one_block else MOST_BLOCKS)


def _needs_one_block(program: Program) -> bool:
    """Whether elements move between columns, so that the columns cannot go over a cluster."""
    forms, layout = forms_of(program), Layout(SimtSchedule("simt", WARP, 1, 1))
    return any(needs_one_block(op, layout, forms) for op in program.ops())


def _shared(program: Program, made: SimtSchedule, blocks: int, most: int) -> SimtSchedule:
    """The schedule with its columns over so many blocks, or more where the ring is too large."""
    for cluster in (1, 2, 4, 8):
        if min(blocks, most) <= cluster <= most:
            given = replace(made, cluster=cluster)
            stages = _stages(program, given)
            if stages:
                return replace(given, stages=stages)
    return replace(made, cluster=min(blocks, most), launch=GRID)


def _stages(program: Program, schedule: SimtSchedule) -> int:
    """Stages of the rings of loops: two, and more of small ones or of a block that is alone on its
    SM; 0 where two are too large."""
    layout = Layout(replace(schedule, stages=2))
    bytes_ = sum(ahead(program, layout, forms_of(program), 0).stages.values())
    if 2 * bytes_ > MOST_RING:
        return 0
    room = MOST_RING if schedule.threads == MOST_LANES else RING_BYTES
    return max(2, min(STAGES, room // bytes_)) if bytes_ else 1


def _words(program: Program, carried: Mapping[str, TileType], cols: int) -> float:
    """Words that a thread holds of each of its columns: loads as they are in memory, and whole ones
    for what loops use that was made outside of them."""

    words = sum(kind.dtype.bytes / 4 for kind in _wide_loads(program, cols))
    words += sum(_is_wide(kind, cols) for kind in carried.values())
    words += DRAWING * any(op.kind == "philox" for op in program.ops())
    return AT_WORK + words + (CARRYING if carried else 0)


def _is_wide(kind: TileType, cols: int) -> bool:
    """Whether a tile has most of so many columns."""
    return bool(kind.axes) and kind.shape[-1] * 2 > cols


def _wide_loads(program: Program, cols: int, least_axes: int = 1) -> list[TileType]:
    """The type of every range of an array that is loaded and has most of the columns."""
    loads = {
        (op.array, op.spans): op.dst.type
        for op in program.ops()
        if op.kind == "load" and op.dst is not None
    }
    return [k for k in loads.values() if len(k.axes) >= least_axes and _is_wide(k, cols)]


def _carried(program: Program) -> Mapping[str, TileType]:
    """Variables of loops that are made outside of them."""
    found: dict[str, TileType] = {}
    for loop in (item for item in program.body if isinstance(item, Loop)):
        inside = list(walk(loop.body))
        made = Counter(op.dst.name for op in inside if op.dst is not None)
        outside = {op.dst.name for op in program.body if isinstance(op, Op) and op.dst is not None}
        for op in inside:
            for var in (*op.srcs, *((op.dst,) if op.dst else ())):
                if var.name in outside or made[var.name] == 0:
                    found[var.name] = var.type
    return found


def _power(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
