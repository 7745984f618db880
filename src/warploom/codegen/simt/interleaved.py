"""Loads and stores of what lies at 0 and at 1 of an array's last dimension: one access for both.

Elements that are neighbours in memory are then in two tiles: pairs of a rotation, a gate beside
what it gates. Where lines are promised (`SimtSchedule.aligned`), the two loads are one of a line
twice as long, and so are the two stores; the launch checks that the array's last dimension has
just these two elements, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.simt.forms import COL, TILE, Layout
from warploom.codegen.simt.schedule import WIDEST_BYTES
from warploom.tile import Loop, Op, Program

Pair = tuple[Op, Op]


def interleaved(program: Program, layout: Layout, forms: Mapping[str, str]) -> dict[int, Pair]:
    """The pairs by the number of each op: the one at 0, the one at 1. Of a block's one task."""
    schedule, body = layout.schedule, [op for op in program.body if isinstance(op, Op)]
    plain = schedule.aligned and schedule.vector > 1 and not schedule.launch.persistent
    if not plain or schedule.staged or any(isinstance(item, Loop) for item in program.body):
        return {}
    found: dict[int, Pair] = {}
    for place, op in enumerate(body):
        other = next((one for one in body[place + 1 :] if _beside(op, one)), None)
        if other is None or not _alone(op, other, body[place + 1 : body.index(other)]):
            continue
        assert op.array is not None
        var = op.srcs[0] if op.dst is None else op.dst
        line = 2 * schedule.vector * op.array.dtype.bytes
        if forms[var.name] in (TILE, COL) and line <= WIDEST_BYTES:
            found |= dict.fromkeys((op.id, other.id), (op, other))
    return found


def _beside(one: Op, other: Op) -> bool:
    """Whether the second op is at 1 where the first one is at 0."""
    if one.array is None or one.kind not in ("load", "store") or other.kind != one.kind:
        return False
    same = (one.array, one.spans[:-1], one.value) == (other.array, other.spans[:-1], other.value)
    last = [op.spans[-1] for op in (one, other)]
    alone = len(one.spans) > 1 and one.spans[-2].size is not None
    return (
        same
        and alone
        and not one.array.fragments
        and all(span.size is None and not span.start.symbols() for span in last)
        and [span.start.evaluate({}) for span in last] == [0, 1]
    )


def _alone(one: Op, other: Op, between: Sequence[Op]) -> bool:
    """Whether what lies between two ops knows nothing of their array and of what the first takes:
    loads are then made at the first, stores at the second."""
    taken = {var.name for var in one.srcs}
    written = {op.dst.name for op in between if op.dst is not None}
    touched = any(op.array == one.array for op in between)
    types = [(op.srcs[0] if op.dst is None else op.dst).type for op in (one, other)]
    return not touched and not taken & written and types[0] == types[1]
