"""Groups that write one operand in shared memory meet before they write it and afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.steps import Meet, Run, Step
from warploom.codegen.passes.everywhere import every_sequence


def meetings(block: BlockProgram) -> BlockProgram:
    """Where every group leaves its part of an operand in shared memory, all groups meet twice: when
    all matmuls that read it have ended, and when all parts are written.

    *requires*  pipelines without joins
    *before -> after*  `Run f(u); Issue g(u)` -> `Meet u; Run f(u); Meet u; Issue g(u)`
    *keeps*  every other step and its order
    """
    common = block.placement.common

    def met(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        for step in steps:
            dst = step.op.dst if isinstance(step, Run) else None
            around = [Meet(dst.name, step.stage)] if dst is not None and dst.name in common else []
            result += [*around, step, *around]
        return tuple(result)

    return every_sequence(block, met) if common else block
