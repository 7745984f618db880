"""A group waits for its own matmuls before it touches what they read or write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.analysis.hazards import (
    EMPTY,
    Effects,
    Queue,
    effects_of,
    insert_joins,
    join_all,
    join_down,
    join_read,
    next_iteration,
)
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Scheduled, Section, Straight
from warploom.codegen.ir.steps import Issue, Join, Run, Step
from warploom.tile import Op


def joins(block: BlockProgram) -> BlockProgram:
    """Started matmuls are waited for as late as possible on every path (`analysis.hazards`).

    *requires*  pipelines without joins
    *before -> after*  `Issue u; Issue v; Run f(u)` -> `Issue u; Issue v; Join <= 1; Run f(u)`
    *keeps*  every step and its order, but for starts of matmuls that the launch plan wants behind
             a wait (`start_behind_wait`); no matmul is unfinished where a section begins or ends
    """
    effects, behind = effects_of(block), block.launch.start_behind_wait

    def change(role: Role, section: Section) -> list[Section]:
        if not role.computes:
            return [section]
        match section:
            case Straight():
                steps, queues = insert_joins(effects, section.steps, EMPTY)
                return [Straight((*steps, *join_all(effects, queues)[0]))]
            case Pipeline():
                joined = _joined(effects, section)
                return [replace(joined, steady=_behind_waits(joined.steady)) if behind else joined]
            case Scheduled():
                return [section]

    return block.rewritten(change)


def _joined(effects: Effects, section: Pipeline) -> Pipeline:
    queues, prologue = EMPTY, list[tuple[Step, ...]]()
    for steps in section.prologue:
        start, queues = insert_joins(effects, steps, queues)
        prologue.append(start)
        queues = next_iteration(queues)
    if prologue:
        # Nothing more in flight on entry than after any later iteration: ptxas follows matmuls
        # by number only where every way into the loop agrees.
        usual = max(len(queue) for queue in _steady(effects, section, EMPTY)[2])
        down, queues = join_down(effects, queues, usual)
        prologue[-1] = (*prologue[-1], *down)
    steady, entries, exits = _steady(effects, section, queues)
    queues, epilogue = entries, list[tuple[Step, ...]]()
    for steps in section.epilogue:
        tail, queues = insert_joins(effects, steps, queues)
        epilogue.append(tail)
        queues = next_iteration(queues)
    if not epilogue:
        last = join_all(effects, queues | next_iteration(exits))[0]
        return replace(section, steady=steady, epilogue=(last,) if last else ())
    epilogue[-1] = (*epilogue[-1], *join_all(effects, queues)[0])
    plain, left = insert_joins(effects, section.plain, EMPTY)
    return replace(
        section,
        prologue=tuple(prologue),
        steady=steady,
        epilogue=tuple(epilogue),
        plain=(*plain, *join_all(effects, left)[0]),
    )


def _steady(
    effects: Effects, section: Pipeline, queues: frozenset[Queue]
) -> tuple[tuple[Step, ...], frozenset[Queue], frozenset[Queue]]:
    """One interval with its joins, and the queues possible before and after it."""
    entries, read = queues, _read_outside(effects, section.loop.body)
    while True:
        block, flying = insert_joins(effects, section.steady, entries)
        # ptxas does not follow a matmul over the back edge to the op that reads its result.
        last, exits = join_read(effects, flying, read)
        grown = entries | next_iteration(exits)
        if grown == entries:
            return (*block, *last), entries, exits
        entries = grown


def _behind_waits(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps in which a matmul between what makes its operand and a wait starts behind the wait."""
    result = list(steps)
    for place, (made, start, wait) in enumerate(zip(steps, steps[1:], steps[2:], strict=False)):
        if isinstance(made, Run) and isinstance(start, Issue) and isinstance(wait, Join):
            behind = replace(wait, count=wait.count - 1), start
            result[place + 1 : place + 3] = behind if wait.count else (start, wait)
    return tuple(result)


def _read_outside(effects: Effects, body: Sequence[object]) -> frozenset[str]:
    """Tiles of the loop that an op other than a matmul touches."""
    fusion = effects.placement.fusion
    touched: set[str] = set()
    for op in body:
        if isinstance(op, Op) and op.kind != "mma" and op.id in fusion.kept:
            touched |= {var.name for var in fusion.sources(op)}
            touched |= set() if op.dst is None else {op.dst.name}
    return frozenset(touched)
