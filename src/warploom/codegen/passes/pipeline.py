"""Modulo-scheduled loops: one interval of the steady state, and how it begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.hazards import EMPTY, Effects, effects_of, insert_joins
from warploom.codegen.ir.block import At, BlockProgram, Pipeline, Role, Scheduled, Section
from warploom.codegen.ir.steps import OpStep, Release, RingStep, Step, Wait
from warploom.codegen.passes.order import check_order
from warploom.codegen.passes.slots import waited
from warploom.errors import InputError


def pipeline(block: BlockProgram) -> BlockProgram:
    """Loops start iterations ahead, as many as their schedule's times say.

    *requires*  loops as `Scheduled`, with waits and releases
    *before -> after*  `at 0: Issue u; at 900: Run f(u)`, an iteration every 500 cycles ->
                       `prologue: Issue u; steady: Issue u, Run f(u) (iteration -1);
                       epilogue: Run f(u) (iteration -1)`
    *keeps*  every step once an iteration, and the order that the program's meaning needs

    Raises `InputError` where the times exchange ops that touch one tile, release a slot before its
    last reader is started, or hold more slots than a ring has.
    """
    effects = effects_of(block)

    def change(role: Role, section: Section) -> list[Section]:
        if not isinstance(section, Scheduled):
            return [section]
        steady = _one_interval(section, effects)
        if role.computes:
            _check_order(block, section, steady)
            _check_slots(block, role, section, steady)
        depth = max(step.stage for step in steady)
        return [
            Pipeline(
                section.loop,
                depth,
                tuple(tuple(s for s in steady if s.stage <= number) for number in range(depth)),
                tuple(steady),
                tuple(tuple(s for s in steady if s.stage > number) for number in range(depth)),
                _one_by_one(block, section) if depth else (),
            )
        ]

    return block.rewritten(change)


def _one_interval(section: Scheduled, effects: Effects) -> list[RingStep | OpStep]:
    """The steps of one interval, from the op on at which the role's iteration begins.

    An interval has no beginning; the role's own first op is one, unless matmuls are unfinished
    there and another op has fewer: ptxas follows matmuls over the back edge of a loop only when
    nothing reads their results, and serialises them otherwise (C7514). What one group hands to the
    others in an iteration stays together: they meet for all of it.
    """
    handed = effects.placement.handed

    def begin_at(start: int) -> list[RingStep | OpStep]:
        def key(at: At) -> tuple[int, bool]:
            return (at.time - start) % section.interval, isinstance(at.step, Release)

        order = sorted(section.steps, key=key)
        stages = [(at.time - start) // section.interval for at in order]
        return [at.step.at(stage - min(stages)) for at, stage in zip(order, stages, strict=True)]

    def rank(start: int) -> tuple[bool, int, int, int]:
        steps = begin_at(start)
        unfinished = max(len(queue) for queue in insert_joins(effects, steps, EMPTY)[1])
        ops = (step for step in steps if isinstance(step, OpStep) and step.op.dst)
        stages = {step.stage for step in ops if step.op.dst and step.op.dst.name in handed}
        return len(stages) > 1, unfinished, max(step.stage for step in steps), start

    times = [at.time for at in section.steps if not isinstance(at.step, Release)]
    if rank(min(times))[:2] == (False, 0):
        return begin_at(min(times))
    return begin_at(min(times, key=rank))


def _one_by_one(block: BlockProgram, section: Scheduled) -> tuple[Step, ...]:
    """An iteration that ends before the next begins: in program order, slots go at the end."""
    steps = [at.step for at in section.steps if not isinstance(at.step, Wait | Release)]
    steps += [at.step for at in section.steps if isinstance(at.step, Release)]
    ordered = tuple(At(0, step) for step in steps)
    again = waited(block, Scheduled(section.loop, section.interval, ordered))
    return tuple(at.step for at in again)


def _check_order(block: BlockProgram, section: Scheduled, steady: Sequence[Step]) -> None:
    ops = [at.step.op for at in section.steps if isinstance(at.step, OpStep)]
    stage = {s.op.id: s.stage for s in steady if isinstance(s, OpStep)}
    rank = {s.op.id: place for place, s in enumerate(steady) if isinstance(s, OpStep)}
    check_order(block.placement, ops, stage, rank)


def _check_slots(
    block: BlockProgram, role: Role, section: Scheduled, steady: Sequence[Step]
) -> None:
    # Waiting for an iteration's slot while `held` older ones are unreleased needs one more.
    for name in sorted(block.taken_in(role, section.loop)):
        at = {
            type(step): (step.stage, place)
            for place, step in enumerate(steady)
            if isinstance(step, Wait | Release) and step.ring == name
        }
        (first, wait), (last, release) = at[Wait], at[Release]
        held = last - first - (1 if release < wait else 0)
        read = [
            (step.stage, place)
            for place, step in enumerate(steady)
            if isinstance(step, OpStep) and block.ring(name) in block.rings_read(step.op)
        ]
        if max(read) > (last, release):
            raise InputError(
                f"schedule of loop {section.loop.index}: ring {name} is released before its last "
                "reader is started; release it later"
            )
        depth = block.ring(name).depth
        if depth < held + 1:
            raise InputError(
                f"schedule of loop {section.loop.index}: ring {name} has depth {depth}, but {held} "
                "of its slots are still held when the next is waited for, so it would deadlock; "
                f"give it depth {held + 1} or release earlier"
            )
