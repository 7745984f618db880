"""A loop's steady state as bars in rows: what each role, ring and the tensor core do, and when.

Bars are those of the replay's walk of the machine code (`perf.replay`): predicted, not measured.
Those of a trace (`perf.trace`) stand beside them, stamped by a kernel where one was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from warploom.codegen.ir.block import BlockProgram, steps_of
from warploom.codegen.ir.steps import Acquire, Fill, Issue, Publish, Release, Run, Wait
from warploom.perf.replay import Walk
from warploom.perf.trace import Trace, last_whole, marks_of
from warploom.sass.timing.partition import Matmul
from warploom.sass.timing.slots import followed
from warploom.tile import Program

ITERATIONS = 3  # that are shown
CODE, MATMUL, COPY, HELD, STAMPED = "code", "matmul", "copy", "held", "stamped"
TENSOR_CORE = "tensor core"
_LAG = re.compile(r" \(iteration -\d+\)$")
_WHERE = re.compile(r"  \S+:\d+$")
Steps = Mapping[str, tuple[int, ...]]  # numbers of the operations that a step does, by its name


@dataclass(frozen=True)
class Bar:
    """A stretch of a row, in cycles from the beginning of what is shown.

    `kind`: code of a group, from the issue before it on, so that a wait is the bar of what waits; a
    matmul on the tensor core; the copies into a slot; a slot held from then on until it is given
    back; or what lies between two stamps. `group` is whose matmul it is.
    """

    row: str
    kind: str
    step: str
    begin: float
    end: float
    group: str = ""


@dataclass(frozen=True)
class Timeline:
    """The bars of a loop over so many cycles, in which it makes so many iterations."""

    loop: str
    cycles: float
    iterations: int
    bars: tuple[Bar, ...]


def step_name(text: str) -> str:
    """The name of a step without how far its iteration lags."""
    return _LAG.sub("", text)


def steps_of_program(program: Program, block: BlockProgram | None) -> Steps:
    """The steps of a kernel by name. What is computed where it is read belongs to the step that
    reads it; a wait or a release to the loads of its ring. Without a block program (a kernel of
    threads) each operation is a step, named by its text."""
    ops = list(program.ops())
    if block is None:
        return {str(op): (op.id,) for op in ops}
    steps = [step for role in block.roles for part in role.sections for step in steps_of(part)] + [
        step for role in block.roles for step in role.ahead
    ]
    loads: dict[str, list[int]] = {}
    for step in steps:
        if isinstance(step, Fill):
            loads.setdefault(step.ring, []).append(step.op.id)
    found: dict[str, set[int]] = {}
    for step in steps:
        own = found.setdefault(step_name(str(step)), set())
        if isinstance(step, Fill | Issue | Run):
            own.add(step.op.id)
        elif isinstance(step, Acquire | Publish | Wait | Release):
            own.update(loads.get(step.ring, ()))
    owner = {number: name for name, own in found.items() for number in own}
    for op in reversed(ops):
        reader = next(
            (one.id for one in ops if one.id > op.id and op.dst in one.srcs and one.id in owner), -1
        )
        if op.dst is not None and op.id not in owner and reader >= 0:
            owner[op.id] = owner[reader]
            found[owner[reader]].add(op.id)
    return {name: tuple(sorted(own)) for name, own in found.items()}


def steps_of_lines(cuda: str, steps: Steps) -> list[str]:
    """Of each line of an emitted file the step whose code it is; "" for the others. A step begins
    with its comment and ends with the block that the comment stands in."""
    found: list[str] = []
    step, margin = "", 0
    for line in cuda.splitlines():
        text = line.lstrip()
        inside = len(line) - len(text)
        if inside < margin:
            step = ""
        name = step_name(_WHERE.sub("", text.removeprefix("// ")))
        if inside and text.startswith("// ") and name in steps:
            step, margin = name, inside
        found.append(step)
    return found


def timeline(walk: Walk, block: BlockProgram, of_line: Sequence[str]) -> Timeline:
    """The last iterations of a walk; `of_line` are the steps of the lines that the kernel's
    instructions were compiled from (`Line.at`)."""
    kept = last_whole(marks_of(walk), ITERATIONS)
    begin = min((mark.cycle for mark in kept), default=0.0)
    end = max((mark.cycle for mark in kept), default=0.0)
    roles = {role.part: role.name for role in block.roles}
    parts, resident = len(walk.sections), block.launch.resident
    names = [
        roles[group % parts] + (f", block {group // parts}" if resident > 1 else "")
        for group in range(parts * resident)
    ]
    bars = [*_code(walk, names, of_line), *_matmuls(walk, names), *_copies(walk, block)]
    shown = [
        replace(bar, begin=max(0.0, bar.begin - begin), end=min(end, bar.end) - begin)
        for bar in bars
        if bar.begin < end and bar.end > begin
    ]
    return Timeline(walk.index, end - begin, len({mark.iteration for mark in kept}), tuple(shown))


def stamped(trace: Trace, loop: str, what: str) -> list[Bar]:
    """Bars of a loop of a trace, which `what` names, from each step to its group's next."""
    marks = [mark for mark in trace if mark.loop == loop]
    return [
        Bar(f"group {one.group}, {what}", STAMPED, step_name(other.step), one.cycle, other.cycle)
        for one, other in pairwise(marks)
        if one.group == other.group
    ]


def _code(walk: Walk, names: Sequence[str], of_line: Sequence[str]) -> Iterator[Bar]:
    """Neighbours of one step are one bar."""
    steps = [
        "" if item.line.at is None else of_line[item.line.at[1] - 1]
        for item, _ in followed(walk.steady)
    ]
    for group, name in enumerate(names):
        own = [one for one in walk.partition.issued if one.group == group]
        last = own[0].cycle
        for step, stretch in groupby(own, key=lambda one: steps[one.place]):
            begin, last = last, list(stretch)[-1].cycle
            yield Bar(name, CODE, step, begin, last)


def _matmuls(walk: Walk, groups: Sequence[str]) -> Iterator[Bar]:
    """Groups take the tensor core in turn: neighbours of one group are one bar."""

    def own(one: Matmul) -> tuple[int, int]:
        return one.group, one.number

    order = sorted(walk.partition.matmuls, key=lambda one: one.begin)
    steps = [
        [step_name(str(step)) for step in part.steady if isinstance(step, Issue)]
        for part in walk.sections
    ]
    for (group, number), parts in groupby(order, key=own):
        each = list(parts)
        names = steps[group % len(steps)]
        step = names[number % len(names)]
        yield Bar(TENSOR_CORE, MATMUL, step, each[0].begin, each[-1].end, groups[group])


def _copies(walk: Walk, block: BlockProgram) -> Iterator[Bar]:
    fills = {
        step.ring: step_name(str(step))
        for role in block.roles
        for part in role.sections
        for step in steps_of(part)
        if isinstance(step, Fill)
    }
    for one in sorted(walk.copies, key=lambda one: (one.ring, one.slot)):
        row = f"ring {one.ring}, slot {one.slot}"
        yield Bar(row, COPY, fills[one.ring], one.begun, one.complete)
        yield Bar(row, HELD, f"Wait {one.ring}", one.complete, one.freed)
