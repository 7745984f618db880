"""Loops that every second task of a block walks backwards.

Blocks that take neighbouring tasks walk over one contracted axis in step, and so do their next
tasks. Walked backwards, those begin with what was read last, which L2 still has.

*requires*  a static walk over the tasks; loops that carry only sums from one iteration to the next
            and use their index only in loads that feed a matmul
*before -> after*  iteration i of an odd task's loop copies the tiles of start + stop - 1 - i
*keeps*  what is summed; the order of a sum, and so its rounding, is the reverse in odd tasks
"""

from __future__ import annotations

from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Loop, Op

BACKWARDS = "backwards"  # the C++ variable that is true in every second task


def check_alternate(placement: Placement, plan: LaunchPlan) -> None:
    """Raise `InputError` at the first op for which the direction of a loop would matter."""
    if not plan.alternate:
        return
    if plan.walk != "static" or plan.chain or not plan.persistent:
        raise InputError(
            f"launch plan: alternate with walk={plan.walk!r}, persistent={plan.persistent} and "
            f"chain={plan.chain}: expected a persistent static walk without a chain"
        )
    for loop in placement.program.loops():
        if loop.until is not None:
            raise InputError(
                f"{loop.where}: alternate, but parts may leave loop {loop.index} early"
            )
        for op in loop.body:
            if isinstance(op, Op):
                _check(placement, loop, op)


def mapped(index: str, value: str) -> str:
    """The iteration whose tiles are copied in a loop's iteration `value`, as C++."""
    return f"({BACKWARDS} ? {index}_start + {index}_stop - 1 - {value} : {value})"


def _check(placement: Placement, loop: Loop, op: Op) -> None:
    used = {s for span in op.spans for s in span.start.symbols()}
    used |= {s for span in op.spans if span.stop is not None for s in span.stop.symbols()}
    used |= set() if op.start is None else op.start.symbols()
    if loop.index in used and not (op.dst is not None and placement.is_shared(op.dst)):
        raise InputError(
            f"{op.where}: {op.label} uses the index of loop {loop.index}, which alternate reverses "
            "for copies to shared memory alone"
        )
    if op.dst is None or placement.is_shared(op.dst):
        return
    if _carried(loop, op.dst.name) and not _sums(op):
        raise InputError(
            f"{op.where}: {op.label} changes {op.dst.name}, which loop {loop.index} carries on, "
            "and is no sum: its iterations cannot be reversed"
        )


def _sums(op: Op) -> bool:
    if op.kind == "mma":
        return len(op.srcs) == 3 and op.srcs[2] == op.dst
    return op.kind == "add" and sum(src == op.dst for src in op.srcs) == 1


def _carried(loop: Loop, name: str) -> bool:
    """Whether an iteration reads what the one before left in a tile."""
    for op in loop.body:
        if not isinstance(op, Op):
            continue
        if any(src.name == name for src in op.srcs):
            return True
        if op.dst is not None and op.dst.name == name:
            return False
    return False
