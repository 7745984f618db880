"""The first matmul of the next task beside the stores of the present one.

Between two tasks a group has nothing for the tensor core: it waits for its last matmul, stores,
looks up the next task, waits for its operands and only then starts its first matmul. With
`overlap_next_task` it starts that matmul before the stores (its registers are free by then, its
operands are there where the rings hold two tasks) and waits for it after them.

*requires*  one loop, one iteration started ahead; the matmul does not add to anything, nothing
            touches its result from the last matmul of a task on, and rings have a slot more than is
            held there
*before -> after*  `Issue last, Join, stores; [next task] Wait q, Wait k, Issue first, Join, ...` ->
                   `Issue last, Ahead, Join, stores, Join; [next task] ...` with
                   `Ahead = next task: Wait q, Wait k, Issue first`
*keeps*  the order of waits and releases of every ring, and of all ops but the matmul that moves;
         it is started in the turn of the last matmul, so that a task has one turn less

Parts of a task no longer end their loop early (`Loop.until`): what they would leave out changes
nothing, and takes slots that come before those of the next task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from warploom.codegen.ir.block import Pipeline, Ring, Straight
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

Sections = tuple[Straight | Pipeline, ...]


def overlap_next_task(
    placement: Placement,
    sections: Sections,
    rings: Sequence[Ring],
    readers: Mapping[str, frozenset[int]],
) -> tuple[tuple[Wait | Issue, ...], Sections]:
    """What a group does ahead of a task, and the rest of its sections.

    `readers` are the matmuls that read a ring. Raises `InputError` where the sections do not have
    the form that is needed.
    """
    loop, before, after = _parts(sections)
    outer = [s for part in before for s in part.steps if isinstance(s, Wait)]
    lead, first, rest = _opening(loop)
    _check_free(placement, first, (*before, *after), loop)
    ahead = (*outer, *lead, first)
    tail = loop.epilogue[0]
    last = max(place for place, step in enumerate(tail) if isinstance(step, Issue))
    joined = [replace(s, count=s.count + 1) if isinstance(s, Join) else s for s in tail[last + 1 :]]
    depth = {ring.name: ring.depth for ring in rings}
    for wait in (*outer, *lead):
        held = sum(isinstance(s, Release) and s.ring == wait.ring for s in _steps(joined, after))
        if depth[wait.ring] <= held:
            raise InputError(
                f"launch plan: overlap_next_task waits for the next slot of ring {wait.ring} while "
                f"{held} of "
                f"its {depth[wait.ring]} are held; give it depth {held + 1}"
            )
        spread = {
            step.stage
            for step in loop.steady
            if isinstance(step, Issue) and step.op.id in readers[wait.ring]
        }
        if len(spread) > 1:
            raise InputError(
                f"launch plan: overlap_next_task, but matmuls read ring {wait.ring} stages apart"
            )
    assert first.op.dst is not None
    done = Join(0, (first.op.dst.name,), (0,))
    one = replace(
        loop,
        prologue=(rest,),
        epilogue=((*tail[: last + 1], Ahead(), *joined),),
        none=(*loop.none, Ahead()),
    )
    rest_of = [tuple(s for s in part.steps if not isinstance(s, Wait)) for part in before]
    early = [Straight(steps) for steps in rest_of if steps]
    return ahead, (*early, one, *after, Straight((done,)))


def _parts(sections: Sections) -> tuple[Pipeline, list[Straight], list[Straight]]:
    loops = [place for place, section in enumerate(sections) if isinstance(section, Pipeline)]
    if len(loops) != 1:
        raise InputError(
            f"launch plan: overlap_next_task needs one loop a task, the program has {len(loops)}"
        )
    loop = sections[loops[0]]
    assert isinstance(loop, Pipeline)
    if loop.depth != 1 or loop.copies or loop.skip or loop.empty:
        raise InputError(
            "launch plan: overlap_next_task needs one iteration started ahead and one copy of "
            "every tile, "
            f"loop {loop.loop.index} has {loop.depth} and {len(loop.copies)} tiles with copies"
        )
    before = [s for s in sections[: loops[0]] if isinstance(s, Straight)]
    after = [s for s in sections[loops[0] + 1 :] if isinstance(s, Straight)]
    odd = [s for s in _steps((), [*before, *after]) if isinstance(s, Issue | Join)]
    if odd:
        raise InputError(
            "launch plan: overlap_next_task, but the program has matmuls outside of its loop"
        )
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
            f"launch plan: overlap_next_task needs loop {loop.loop.index} to begin with the waits "
            "for one "
            "matmul and that matmul"
        )
    if len(first.op.srcs) != 2:
        raise InputError(
            f"{first.op.where}: overlap_next_task, but the first matmul of a task adds to a tile"
        )
    return lead, first, tuple(rest)


def _check_free(
    placement: Placement, first: Issue, straight: Sequence[Straight], loop: Pipeline
) -> None:
    """Raise when something touches the matmul's result while the next task's may be under way."""
    assert first.op.dst is not None
    if any(not placement.is_shared(var) for var in first.op.srcs):
        raise InputError(
            f"{first.op.where}: overlap_next_task, but the first matmul reads registers"
        )
    tail = loop.epilogue[0]
    last = max(place for place, step in enumerate(tail) if isinstance(step, Issue))
    for step in _steps(tail[last:], straight):
        if isinstance(step, OpStep) and first.op.dst in _touched(placement, step.op):
            raise InputError(
                f"{step.op.where}: overlap_next_task, but {step.op.label} touches "
                f"{first.op.dst.name} after "
                "the last matmul of a task"
            )


def _touched(placement: Placement, op: Op) -> list[object]:
    return [*placement.fusion.sources(op), *([] if op.dst is None else [op.dst])]


def _steps(first: Sequence[Step], straight: Sequence[Straight]) -> list[Step]:
    return [*first, *(step for part in straight for step in part.steps)]
