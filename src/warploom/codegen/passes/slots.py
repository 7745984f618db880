"""Where slots are waited for, filled and given back.

`loader_slots` is the producer's side. `waits` is the consumers' in loops, where a ring takes a slot
every iteration; `task_slots` and `early_release` are theirs for rings filled once a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from warploom.codegen.ir.block import (
    At,
    BlockProgram,
    Pipeline,
    Role,
    Scheduled,
    Section,
    Straight,
    ops_of,
    steps_of,
)
from warploom.codegen.ir.steps import Acquire, Fill, OpStep, Publish, Release, Wait


def loader_slots(block: BlockProgram) -> BlockProgram:
    """Every slot is acquired before the first copy into it and published after the last.

    *requires*  `Fill`s alone in the producer
    *before -> after*  `Fill a; Fill b` -> `Acquire ring; Fill a; Fill b; Publish ring`, all at the
                       time of the ring's first copy, and rings in the order of theirs; warps that
                       turn what was loaded take its slot for just as long: `Fill a` ->
                       `Acquire ring; Wait source; Fill a; Release source; Publish ring`
    *keeps*  the groups
    """

    def change(role: Role, section: Section) -> list[Section]:
        if role.computes:
            return [section]
        if isinstance(section, Scheduled):
            timed = [(at.time, at.step) for at in section.steps if isinstance(at.step, Fill)]
            slots = _slots(block, timed)
            return [replace(section, steps=_turned(block, slots) if role.transposes else slots)]
        fills = [step for step in steps_of(section) if isinstance(step, Fill)]
        return [Straight(tuple(at.step for at in _slots(block, list(enumerate(fills)))))]

    return block.rewritten(change)


def _slots(block: BlockProgram, fills: Sequence[tuple[int, Fill]]) -> tuple[At, ...]:
    result: list[At] = []
    for ring in block.rings:
        own = [(time, fill) for time, fill in fills if fill.ring == ring.name]
        if own:
            steps = [Acquire(ring.name), *(fill for _, fill in own), Publish(ring.name)]
            result += [At(min(time for time, _ in own), step) for step in steps]
    return tuple(sorted(result, key=lambda at: at.time))


def _turned(block: BlockProgram, slots: Sequence[At]) -> tuple[At, ...]:
    """The steps of warps that turn, with the slot that each operand is made of."""
    result: list[At] = []
    for at in slots:
        ring = block.rings_read(at.step.op)[0].name if isinstance(at.step, Fill) else ""
        result += [At(at.time, Wait(ring)), at, At(at.time, Release(ring))] if ring else [at]
    return tuple(result)


def waits(block: BlockProgram) -> BlockProgram:
    """Each slot of a loop is waited for before its first reader in time.

    *requires*  loops as `Scheduled`, with the times of their matmuls
    *before -> after*  `Issue reader` -> `Wait ring; Issue reader`, both at the reader's time
    *keeps*  the producer, and every other step and time
    """

    def change(role: Role, section: Section) -> list[Section]:
        if not role.computes or not isinstance(section, Scheduled):
            return [section]
        return [replace(section, steps=waited(block, section))]

    return block.rewritten(change)


def waited(block: BlockProgram, section: Scheduled) -> tuple[At, ...]:
    """The steps of a loop with a wait before the first reader in time of each ring it fills."""
    local = block.filled_in(section.loop)
    first: dict[str, tuple[int, int]] = {}
    for place, at in enumerate(section.steps):
        for ring in block.rings_read(at.step.op) if isinstance(at.step, OpStep) else ():
            if ring.name in local:
                first[ring.name] = min(first.get(ring.name, (at.time, place)), (at.time, place))
    result: list[At] = []
    for place, at in enumerate(section.steps):
        due = [name for name, reader in first.items() if reader == (at.time, place)]
        result += [At(at.time, Wait(name)) for name in due]
        result.append(at)
    return tuple(result)


def task_slots(block: BlockProgram) -> BlockProgram:
    """Rings filled once a task are waited for before the first section that reads them and given
    back after the last one; where stores go through a slot, after the last store.

    *requires*  all readers of rings in their sections
    *before -> after*  `section` -> `Wait ring`, `section`, `Release ring`
    *keeps*  the producer, and every section
    """
    roles = tuple(
        replace(role, sections=_once_a_task(block, role)) if role.computes else role
        for role in block.roles
    )
    return replace(block, roles=roles)


def _once_a_task(block: BlockProgram, role: Role) -> tuple[Section, ...]:
    result: list[Section] = []
    held: set[str] = set()
    for number, section in enumerate(role.sections):
        inside = block.filled_in(section.loop) if isinstance(section, Scheduled) else set[str]()
        reads = [ring.name for op in ops_of(section) for ring in block.rings_read(op)]
        new = [name for name in dict.fromkeys(reads) if name not in held | inside]
        held.update(new)
        later = {name for other in role.sections[number + 1 :] for name in _needs(block, other)}
        done = sorted(held - later)
        held.difference_update(done)
        before, after = [Wait(name) for name in new], [Release(name) for name in done]
        result += [Straight(tuple(before))] if before else []
        result.append(section)
        result += [Straight(tuple(after))] if after else []
    return tuple(result)


def _needs(block: BlockProgram, section: Section) -> set[str]:
    """The rings whose slots a section uses."""
    found = {ring.name for op in ops_of(section) for ring in block.rings_read(op)}
    over = block.launch.store_over
    stores = any(op.kind.startswith("store") for op in ops_of(section))
    if stores and over in block.placement.shared:
        found.add(block.home(over)[0].name)
    return found


def early_release(block: BlockProgram) -> BlockProgram:
    """With the launch plan's `early_release`, a task's slot goes before the matmuls that end its
    last loop, where none of them reads it.

    *requires*  pipelines without joins; the releases of a task right behind its loop
    *before -> after*  `epilogue: Issue last`, `Release ring` ->
                       `epilogue: Release ring; Issue last`
    *keeps*  one release a task: a loop without iterations has it in `none`
    """
    if not block.launch.early_release:
        return block
    roles = tuple(
        replace(role, sections=_released_early(block, role.sections)) for role in block.roles
    )
    return replace(block, roles=roles)


def _released_early(block: BlockProgram, sections: Sequence[Section]) -> tuple[Section, ...]:
    result = list(sections)
    for place, (loop, after) in enumerate(pairwise(sections)):
        if not (isinstance(loop, Pipeline) and loop.depth == 1 and isinstance(after, Straight)):
            continue
        behind = {
            ring.name
            for step in loop.steady
            if isinstance(step, OpStep) and step.stage > 0
            for ring in block.rings_read(step.op)
        }
        early = tuple(s for s in after.steps if isinstance(s, Release) and s.ring not in behind)
        result[place] = replace(loop, epilogue=((*early, *loop.epilogue[0]),), none=early)
        result[place + 1] = Straight(tuple(step for step in after.steps if step not in early))
    return tuple(s for s in result if not isinstance(s, Straight) or s.steps)
