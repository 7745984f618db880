"""Groups that write one operand in shared memory meet before they write it and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Scheduled, Section, Straight
from warploom.codegen.ir.steps import Meet, Run, Step


def meetings(block: BlockProgram) -> BlockProgram:
    """Where every group leaves its part of an operand in shared memory, all groups meet twice: when
    all matmuls that read it have ended, and when all parts are written.

    *requires*  pipelines without joins
    *before -> after*  `Run f(u); Issue g(u)` -> `Meet u; Run f(u); Meet u; Issue g(u)`
    *keeps*  every other step and its order
    """
    common = block.placement.common
    if not common:
        return block

    def met(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        for step in steps:
            writes = isinstance(step, Run) and step.op.dst is not None
            if writes and step.op.dst.name in common:
                meet = Meet(step.op.dst.name, step.stage)
                result += [meet, step, meet]
            else:
                result.append(step)
        return tuple(result)

    def change(role: Role, section: Section) -> list[Section]:
        match section:
            case Straight():
                return [Straight(met(section.steps))]
            case Pipeline():
                return [
                    replace(
                        section,
                        prologue=tuple(map(met, section.prologue)),
                        steady=met(section.steady),
                        epilogue=tuple(map(met, section.epilogue)),
                        plain=met(section.plain),
                    )
                ]
            case Scheduled():
                return [section]

    return block.rewritten(change)
