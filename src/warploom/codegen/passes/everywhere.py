"""A change of straight runs of steps, made wherever a consumer has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Scheduled, Section, Straight
from warploom.codegen.ir.steps import Step


def every_sequence(
    block: BlockProgram, change: Callable[[Sequence[Step]], tuple[Step, ...]]
) -> BlockProgram:
    """The block program with every run of steps of a consumer that does ops replaced."""

    def changed(role: Role, section: Section) -> list[Section]:
        match section:
            case Straight() if role.computes:
                return [Straight(change(section.steps))]
            case Pipeline() if role.computes:
                return [section.with_iterations(change)]
            case Straight() | Pipeline() | Scheduled():
                return [section]

    return block.rewritten(changed)
