"""What threads of a group exchange lies in shared memory before a meeting that there is anyway."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.exchanges import words
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.steps import FencedGroupSync, GroupSync, Leave, PanelSync, Run, Step
from warploom.codegen.passes.everywhere import every_sequence
from warploom.tile import Op

MEETINGS = GroupSync | FencedGroupSync | PanelSync


def leaves(block: BlockProgram) -> BlockProgram:
    """With the launch plan's `early_exchanges`, a vector is left for an exchange before a meeting.

    *requires*  group_syncs
    *before -> after*  `GroupSync; Run f(u); FencedGroupSync; Run rename(v)` ->
                       `GroupSync; Run f(u); Leave rename(v); FencedGroupSync; Run rename(v)`
    *keeps*  every other step and its order; where one run of steps has no two such meetings, or
             other ops exchange through the same memory, everything
    """
    placement = block.placement
    every = [op for op in placement.program.ops() if words(placement, op)]
    if not block.launch.early_exchanges or len(every) != 1 or every[0].kind != "rename":
        return block
    (op,) = every
    missing = False

    def changed(steps: Sequence[Step]) -> tuple[Step, ...]:
        nonlocal missing
        result = list(steps)
        for number in reversed([n for n, one in enumerate(steps) if _does(one, op)]):
            place = _place(steps[:number], op)
            missing |= place is None
            if place is not None:
                result.insert(place, Leave(op, steps[number].stage))
        return tuple(result)

    found = every_sequence(block, changed)
    return block if missing else found


def _does(step: Step, op: Op) -> bool:
    return isinstance(step, Run) and step.op == op


def _place(before: Sequence[Step], op: Op) -> int | None:
    """Where the vector is left: before the last meeting, with another one since the last exchange
    or since the run of steps began; None where the vector is made later or there are none."""
    source = op.srcs[0].name
    made = [n for n, one in enumerate(before) if isinstance(one, Run) and _writes(one, source)]
    read = [n for n, one in enumerate(before) if _does(one, op)]
    since = max(read, default=-1)
    meetings = [n for n, one in enumerate(before) if isinstance(one, MEETINGS) and n > since]
    if len(meetings) < 2 or max(made, default=-1) > meetings[-1]:
        return None
    return meetings[-1]


def _writes(step: Run, name: str) -> bool:
    return step.op.dst is not None and step.op.dst.name == name
