"""Groups that write one operand in shared memory meet before they write it and afterwards, or with
two slots for it only afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.steps import Issue, Meet, Run, Step, Take
from warploom.codegen.passes.everywhere import every_sequence
from warploom.errors import InputError


def meetings(block: BlockProgram) -> BlockProgram:
    """Where every group leaves its part of an operand in shared memory, all groups meet twice: when
    all matmuls that read it have ended, and when all parts are written.

    *requires*  pipelines without joins
    *before -> after*  `Issue h; Run e(h); Run f(u); Issue g(u)` ->
                       `Issue h; Meet u; Run e(h); Run f(u); Meet u; Issue g(u)`: the first meeting
                       comes as early as it may after matmuls have started, which groups wait for
                       in any case, the second right before the first matmul that reads the region.
                       With two slots (`LaunchPlan.staged_slots`) the second also says that all have
                       read what they wrote before, and there is no first.
                       Where one group leads, the others meet it as often before they take what it
                       made, and so do groups that divide such work around all that they hand on
    *keeps*  every other step and its order
    """
    placement = block.placement
    common = placement.common
    if placement.led:
        around = _divided if block.launch.divided else _led
        return every_sequence(block, lambda steps: around(block, steps))

    def met(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        written: dict[str, Meet] = {}
        for step in steps:
            if isinstance(step, Issue):
                first = 1 if placement.from_registers(step.op) else 0
                result += [written.pop(v.name) for v in step.op.srcs[first:2] if v.name in written]
            dst = step.op.dst if isinstance(step, Run) else None
            if dst is not None and dst.name in common:
                meet = Meet(dst.name, step.stage)
                if block.launch.staged_slots == 1:
                    result.insert(_early(result, {dst.name}), meet)
                written[dst.name] = meet
            result.append(step)
        return (*result, *written.values())

    return every_sequence(block, met) if common else block


def _led(block: BlockProgram, steps: Sequence[Step]) -> tuple[Step, ...]:
    """What one group hands on in a run of steps: `Run f(t); Issue g(t)` ->
    `Meet t; Run f(t); Meet t; Issue g(t)` there, and `Take t; Issue g(t)` ->
    `Meet t; Meet t; Take t; Issue g(t)` in the others; with two slots for the tile the second
    meetings alone. Vectors have two slots in turn and go along with a staged tile."""
    placement = block.placement
    handed = [
        (place, step.op.dst.name, step.stage)
        for place, step in enumerate(steps)
        if isinstance(step, Run | Take) and step.op.dst and step.op.dst.name in placement.handed
    ]
    if not handed:
        return tuple(steps)
    first = next((one for one in handed if one[1] in placement.common), handed[0])
    meet, last = Meet(first[1], first[2]), handed[-1][0]
    once = block.launch.staged_slots > 1 and first[1] in placement.common
    if isinstance(steps[last], Take):
        place = handed[0][0]
        return (*steps[:place], *((meet,) if once else (meet, meet)), *steps[place:])
    if once:
        return (*steps[: last + 1], meet, *steps[last + 1 :])
    begun = list(steps[: first[0]])
    early = _early(begun, {first[1]})
    before = [*begun[:early], meet, *begun[early:]]
    return (*before, *steps[first[0] : last + 1], meet, *steps[last + 1 :])


def _divided(block: BlockProgram, steps: Sequence[Step]) -> tuple[Step, ...]:
    """All that groups hand on in a run of steps, between a meeting when matmuls have read what was
    there before and one when everything is written, behind which groups take the others'."""
    handed = block.placement.handed
    taken = tuple(step for step in steps if isinstance(step, Take))
    tiles = sorted(handed & block.placement.common)
    end = max((n + 1 for n, step in enumerate(steps) if isinstance(step, Take)), default=0)
    end -= len(taken)
    steps = [step for step in steps if not isinstance(step, Take)]
    places = [
        place
        for place, step in enumerate(steps)
        if isinstance(step, Run) and step.op.dst and step.op.dst.name in handed
    ]
    if not places and not taken:
        return tuple(steps)
    first, after = (places[0], places[-1] + 1) if places else (end, end)
    for step in steps[first:after]:
        if isinstance(step, Issue) and handed & {var.name for var in step.op.srcs[:2]}:
            raise InputError(
                f"{step.op.where}: this matmul reads what groups hand on before all of it is made: "
                "make all operands first"
            )
    stage = (taken or steps[first:])[0].stage
    begun = list(steps[:first])
    early = _early(begun, set(tiles))
    return (
        *begun[:early], Meet(tiles[0], stage), *begun[early:],
        *steps[first:after], Meet(tiles[-1], stage), *taken, *steps[after:],
    )  # fmt: skip


def _early(before: Sequence[Step], tiles: set[str]) -> int:
    """The first place behind the matmuls that begin a run of steps and behind every reader and
    meeting of some tiles."""
    started = False
    for place, step in enumerate(before):
        if isinstance(step, Issue):
            started = True
        elif started and isinstance(step, Run):
            later = before[place:]
            touched = any(
                (isinstance(s, Meet) and s.tile in tiles)
                or (isinstance(s, Issue) and tiles & {var.name for var in s.op.srcs[:2]})
                for s in later
            )
            if not touched:
                return place
    return len(before)
