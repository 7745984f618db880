"""The turns that compute groups take with the tensor core (ping-pong)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.ir.block import At, BlockProgram, Pipeline, Role, Scheduled, Section
from warploom.codegen.ir.steps import Issue, Run, Step, TurnPass, TurnWait, Wait
from warploom.errors import InputError


def number_turns(block: BlockProgram) -> BlockProgram:
    """Matmuls of a loop that follow each other in one group are one turn.

    *requires*  loops as `Scheduled`, with the times of their matmuls in every group
    *before -> after*  `at 0: Issue u; at 9: Issue v` -> `at 0: Issue u, turn 0; at 9: Issue v,
                       turn 2`, where another group has turn 1: turns of an interval are counted
                       over all groups
    *keeps*  every step, its time and its order

    Raises `InputError` where the times do not let the groups take turns one after the other.
    """
    if not block.pingpong:
        return block
    loops = [s.loop.index for s in block.roles[-1].sections if isinstance(s, Scheduled)]
    runs = {index: _runs(block, index) for index in loops}

    def change(role: Role, section: Section) -> list[Section]:
        if not role.computes or not isinstance(section, Scheduled):
            return [section]
        own = runs[section.loop.index]
        steps = tuple(
            At(at.time, replace(at.step, turn=own[at.step.op.id, role.part]))
            if isinstance(at.step, Issue)
            else at
            for at in section.steps
        )
        return [replace(section, steps=steps)]

    return block.rewritten(change)


def _runs(block: BlockProgram, index: str) -> dict[tuple[int, int], int]:
    """Which run of matmuls (op id, part) belongs to; runs go round the compute groups."""
    found: list[tuple[int, int, int]] = []
    for role in block.roles:
        for section in role.sections:
            if role.computes and isinstance(section, Scheduled) and section.loop.index == index:
                found += [
                    (at.time % section.interval, role.part, at.step.op.id)
                    for at in section.steps
                    if isinstance(at.step, Issue)
                ]
    found.sort()
    # An interval has no beginning: a run that goes over its end is one run.
    whole = next((n for n, item in enumerate(found) if item[1] != found[-1][1]), 0)
    if whole and found[0][1] == found[-1][1]:
        found = found[whole:] + found[:whole]
    runs: dict[tuple[int, int], int] = {}
    owners: list[int] = []
    for _, part, op in found:
        if not owners or owners[-1] != part:
            owners.append(part)
        runs[(op, part)] = len(owners) - 1
    parts = block.placement.parts
    expected = owners[:1] if parts == 1 else [(owners[0] + i) % parts for i in range(len(owners))]
    if owners != expected or len(owners) % parts:
        raise InputError(
            f"schedule {block.name}: tensor-core work of the groups comes in the order {owners} "
            "in an interval; taking turns needs each group once, in a fixed round"
        )
    return runs


def take_turns(block: BlockProgram) -> BlockProgram:
    """A group waits for its turn before every run of matmuls and passes it on after it.

    *requires*  pipelines without joins, whose matmuls are numbered by turn
    *before -> after*  `Issue u; Wait k; Issue v; Run w` ->
                       `TurnWait; Issue u; Wait k; Issue v; TurnPass; Run w`
    *keeps*  the steps and their order; a wait within a turn, and an op that changes the sums of the
             next matmul, do not end it
    """
    if not block.pingpong:
        return block

    def change(role: Role, section: Section) -> list[Section]:
        pipeline = isinstance(section, Pipeline)
        return [section.with_iterations(_in_turns) if pipeline else section]

    return block.rewritten(change)


def _in_turns(steps: Sequence[Step]) -> tuple[Step, ...]:
    result: list[Step] = []
    present: int | None = None
    for number, step in enumerate(steps):
        turn = None
        if isinstance(step, Issue):
            turn = step.turn
        elif isinstance(step, Wait) or _prepares(step, steps[number:]):
            turn = present
        if present is not None and turn != present:
            result.append(TurnPass())
        if turn is not None and turn != present:
            result.append(TurnWait())
        present = turn
        result.append(replace(step, turn=None) if isinstance(step, Issue) else step)
    return (*result, *([] if present is None else [TurnPass()]))


def _prepares(step: Step, rest: Sequence[Step]) -> bool:
    """Whether a step changes the sums that the very next matmul adds to: they keep one turn."""
    following = next((s.op for s in rest if isinstance(s, Issue)), None)
    if not isinstance(step, Run) or step.op.dst is None or following is None:
        return False
    return following.dst == step.op.dst
