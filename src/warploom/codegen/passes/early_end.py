"""What a group does in iterations that do not change its part of the tiles (`Loop.until`)."""

from __future__ import annotations

from dataclasses import replace

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Section
from warploom.codegen.ir.steps import Release, Step, TurnPass, TurnWait, Wait
from warploom.errors import InputError


def early_end(block: BlockProgram) -> BlockProgram:
    """A group whose part is done leaves its loop, and takes and gives back what others count on.

    *requires*  pipelines with their turns
    *before -> after*  `steady: TurnWait, Wait k, Issue u, TurnPass, Run f(u), Release k` ->
                       the same, and `skip: TurnWait, TurnPass, Wait k, Release k`; `empty` has the
                       turns that prologue and epilogue would have taken beyond that
    *keeps*  every other step; as many slots and turns a task as without

    Raises `InputError` where the groups would take different numbers of turns.
    """

    def change(role: Role, section: Section) -> list[Section]:
        if not role.computes or not isinstance(section, Pipeline):
            return [section]
        if block.placement.until(section.loop) is None:
            return [section]
        return [_left_out(block, section)]

    return block.rewritten(change)


def _left_out(block: BlockProgram, section: Pipeline) -> Pipeline:
    loop = section.loop
    if section.depth > 1 and block.pingpong:
        raise InputError(
            f"{loop.where}: loop {loop.index} ends early for a part, so its groups pass on "
            f"different numbers of turns with {section.depth} iterations started ahead; start "
            "at most one ahead, or take no turns"
        )
    local = block.filled_in(loop)
    turns = [step for step in section.steady if isinstance(step, TurnWait | TurnPass)]
    slots: list[Step] = []
    for step in section.steady:
        if isinstance(step, Wait) and step.ring in local:
            slots += [step.at(0), Release(step.ring)]
    around = [step for steps in (*section.prologue, *section.epilogue) for step in steps]
    extra = [step for step in around if isinstance(step, TurnWait | TurnPass)]
    empty = tuple(extra[len(turns) * section.depth :])
    return replace(section, skip=(*turns, *slots), empty=empty)
