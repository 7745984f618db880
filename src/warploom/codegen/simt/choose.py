"""A schedule of a program without a matmul, from the sizes of its tiles.

A thread has 16 neighbouring bytes of a line and as many lines as its registers take: what it holds
of one column is counted in words. Rows are over as few threads as hold them, so that reductions
stay in warps; what 512 threads do not hold goes over a cluster, and rings take what they need to
keep some iterations under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from warploom.codegen.ir.plan import MOST_BLOCKS
from warploom.codegen.simt.ahead import ahead
from warploom.codegen.simt.exchanges import needs_one_block
from warploom.codegen.simt.forms import Layout, forms_of
from warploom.codegen.simt.schedule import WARP, WIDEST_BYTES, SimtSchedule
from warploom.tile import Loop, Op, Program, TileType
from warploom.tile.ir import walk
from warploom.tile.ops import OPS

WORDS = 96  # of a thread's registers for what it holds of its columns
AT_WORK = 2  # words of a column for what is being computed
MOST_LANES = 512  # of a block: more threads have too few registers each
RING_BYTES = 400  # of a thread: registers for `WORDS` leave an SM about 512 of them
STAGES = 4


def simt(program: Program, threads: int | None = None, lanes: int | None = None) -> SimtSchedule:
    """A schedule from the program's sizes; `threads` and `lanes` override the sizes' choice."""
    types = [op.dst.type for op in program.ops() if op.dst is not None and op.dst.type.axes]
    if not types:
        return SimtSchedule("simt", threads or WARP, lanes or 1, 1)
    widest = max(prod(kind.shape) for kind in types)
    # A vector counts as columns only when nothing larger says where they are.
    cols = max(kind.shape[-1] for kind in types if len(kind.axes) > 1 or widest == kind.shape[0])
    size = min(array.dtype.bytes for array in program.arrays)
    vector = min(WIDEST_BYTES // size, cols & -cols)
    held = max(vector, int(WORDS / _words(program, widest)))
    wanted = _power(-(-widest // held))
    along = lanes or min(_power(-(-cols // vector)), max(WARP, _power(-(-cols // held))))
    chosen = threads or min(max(wanted, 4 * WARP, min(along, MOST_LANES)), MOST_LANES)
    blocks = along // min(along, chosen)
    made = SimtSchedule("simt", chosen, min(along, chosen), vector)
    if blocks > 1 and _shares_columns(program, made):
        made = replace(made, cluster=min(blocks, MOST_BLOCKS))
    return replace(made, stages=_stages(program, made))


def _shares_columns(program: Program, schedule: SimtSchedule) -> bool:
    """Whether several blocks can share the columns of a program."""
    forms, layout = forms_of(program), Layout(schedule)
    reduces = any(OPS[op.kind].group == "reduce" for op in program.ops())
    return reduces and not any(needs_one_block(op, layout, forms) for op in program.ops())


def _stages(program: Program, schedule: SimtSchedule) -> int:
    """Stages of the loops' rings, as many as keep within a block's share of shared memory."""
    layout = Layout(replace(schedule, stages=2))
    bytes_ = sum(ahead(program, layout, forms_of(program), 0).stages.values())
    return max(1, min(STAGES, RING_BYTES * schedule.threads // bytes_)) if bytes_ else 1


def _words(program: Program, widest: int) -> float:
    """Words that a thread holds of each of its columns: loads as they are in memory, and whole ones
    for what loops use that was made outside of them."""

    def wide(kind: TileType) -> bool:
        return bool(kind.axes) and prod(kind.shape) * 2 > widest

    count = float(AT_WORK)
    for op in program.ops():
        if op.kind == "load" and op.dst is not None and wide(op.dst.type):
            count += op.dst.type.dtype.bytes / 4
    return count + sum(wide(kind) for kind in _carried(program).values())


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
