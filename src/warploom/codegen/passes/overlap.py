"""The first matmul of the next task beside the stores of the present one.

Between two tasks a group has nothing for the tensor core: it waits for its last matmul, stores,
looks up the next task, waits for its operands and only then starts its first matmul. With
`overlap_next_task` it starts that matmul before the stores (its registers are free by then, its
operands are there where the rings hold two tasks) and waits for it after them.

Parts of a task no longer end their loop early (`Loop.until`): what they would leave out changes
nothing, and takes slots that come before those of the next task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Section, Straight
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.steps import (
    Ahead,
    Issue,
    Join,
    OpStep,
    Release,
    Step,
    TurnPass,
    TurnWait,
    Wait,
)
from warploom.errors import InputError
from warploom.tile import Op

OPTION = "overlap_next_task"
PLAN = f"launch plan: {OPTION}"


def overlap_next_task(block: BlockProgram) -> BlockProgram:
    """With the launch plan's `overlap_next_task`, groups start their next task's first matmul.

    *requires*  one loop, one iteration started ahead; the matmul does not add to anything, nothing
                touches its result from the last matmul of a task on, and rings have a slot more
                than is held there
    *before -> after*  `Issue last, Join, stores; [next task] Wait q, Wait k, Issue first, Join` ->
                       `Issue last, Ahead, Join, stores, Join`, where `Ahead` is
                       `[next task] Wait q, Wait k, Issue first`
    *keeps*  the order of waits and releases of every ring, and of all ops but the matmul that
             moves; it is started in the turn of the last matmul, so that a task has one turn less

    Raises `InputError` where the sections do not have the form that is needed.
    """
    if not block.launch.overlap_next_task:
        return block
    roles = tuple(_overlapped(block, role) if role.computes else role for role in block.roles)
    return replace(block, roles=roles)


def _overlapped(block: BlockProgram, role: Role) -> Role:
    loop, before, after = _parts(role.sections)
    outer = [s for part in before for s in part.steps if isinstance(s, Wait)]
    lead, first, rest = _opening(loop)
    _check_free(block.placement, first, (*before, *after), loop)
    tail = loop.epilogue[0]
    last = max(place for place, step in enumerate(tail) if isinstance(step, Issue))
    joined = [replace(s, count=s.count + 1) if isinstance(s, Join) else s for s in tail[last + 1 :]]
    for wait in (*outer, *lead):
        _check_ring(block, wait.ring, loop, _steps(joined, after))
    assert first.op.dst is not None
    done = Join(0, (first.op.dst.name,))
    one = replace(
        loop,
        prologue=(rest,),
        epilogue=((*tail[: last + 1], Ahead(), *joined),),
        none=(*loop.none, Ahead()),
    )
    rest_of = [tuple(s for s in part.steps if not isinstance(s, Wait)) for part in before]
    early = [Straight(steps) for steps in rest_of if steps]
    sections = (*early, one, *after, Straight((done,)))
    return replace(role, sections=sections, ahead=(*outer, *lead, first))


def _check_ring(block: BlockProgram, name: str, loop: Pipeline, held: Sequence[Step]) -> None:
    """Raise when the next task's slot of a ring cannot be there beside those still held."""
    count = sum(isinstance(step, Release) and step.ring == name for step in held)
    depth = block.ring(name).depth
    if depth <= count:
        raise InputError(
            f"{PLAN} waits for the next slot of ring {name} while {count} of its {depth} are "
            f"held; give it depth {count + 1}"
        )
    spread = {
        step.stage
        for step in loop.steady
        if isinstance(step, Issue) and block.ring(name) in block.rings_read(step.op)
    }
    if len(spread) > 1:
        raise InputError(f"{PLAN}, but matmuls read ring {name} stages apart")


def _parts(sections: Sequence[Section]) -> tuple[Pipeline, list[Straight], list[Straight]]:
    loops = [place for place, section in enumerate(sections) if isinstance(section, Pipeline)]
    if len(loops) != 1:
        raise InputError(f"{PLAN} needs one loop a task, the program has {len(loops)}")
    loop = sections[loops[0]]
    assert isinstance(loop, Pipeline)
    if loop.depth != 1 or loop.skip or loop.empty:
        raise InputError(
            f"{PLAN} needs one iteration started ahead, loop {loop.loop.index} has {loop.depth}"
        )
    before = [s for s in sections[: loops[0]] if isinstance(s, Straight)]
    after = [s for s in sections[loops[0] + 1 :] if isinstance(s, Straight)]
    odd = [s for s in _steps((), [*before, *after]) if isinstance(s, Issue | Join)]
    if odd:
        raise InputError(f"{PLAN}, but the program has matmuls outside of its loop")
    return loop, before, after


def _opening(loop: Pipeline) -> tuple[list[Wait], Issue, tuple[Step, ...]]:
    """The waits before the first matmul of a task, that matmul, and what follows without its
    join and its turn."""
    opening = [s for s in loop.prologue[0] if not isinstance(s, TurnWait | TurnPass)]
    place, first = next((n, s) for n, s in enumerate(opening) if isinstance(s, Issue))
    lead = [step for step in opening[:place] if isinstance(step, Wait)]
    rest = [step for step in opening[place + 1 :] if not isinstance(step, Join)]
    joins = len(opening) - place - 1 - len(rest)
    if len(lead) < place or joins != 1 or any(isinstance(step, Issue) for step in rest):
        raise InputError(
            f"{PLAN} needs loop {loop.loop.index} to begin with the waits for one "
            "matmul and that matmul"
        )
    if len(first.op.srcs) != 2:
        raise InputError(
            f"{first.op.where}: {OPTION}, but the first matmul of a task adds to a tile"
        )
    return lead, first, tuple(rest)


def _check_free(
    placement: Placement, first: Issue, straight: Sequence[Straight], loop: Pipeline
) -> None:
    """Raise when something touches the matmul's result while the next task's may be under way."""
    assert first.op.dst is not None
    if any(not placement.is_shared(var) for var in first.op.srcs):
        raise InputError(f"{first.op.where}: {OPTION}, but the first matmul reads registers")
    tail = loop.epilogue[0]
    last = max(place for place, step in enumerate(tail) if isinstance(step, Issue))
    for step in _steps(tail[last:], straight):
        if isinstance(step, OpStep) and first.op.dst in _touched(placement, step.op):
            raise InputError(
                f"{step.op.where}: {OPTION}, but {step.op.label} touches {first.op.dst.name} after "
                "the last matmul of a task"
            )


def _touched(placement: Placement, op: Op) -> list[object]:
    return [*placement.fusion.sources(op), *([] if op.dst is None else [op.dst])]


def _steps(first: Sequence[Step], straight: Sequence[Straight]) -> list[Step]:
    return [*first, *(step for part in straight for step in part.steps)]
