"""When each warp group does each step of a loop: predicted by the replay, or stamped by the kernel.

A step is a wait for a ring's slot or for a turn, a matmul that was issued, a slot given back or a
turn passed on: what the block program and the machine code both have (`perf.replay`), in the order
of the code. A trace has the steps of a few iterations of each loop's steady state in cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import Issue, Release, Step, TurnPass, TurnWait, Wait
from warploom.codegen.passes.lower import lower
from warploom.perf.gates import Rates
from warploom.perf.replay import Walk, walked
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.timing.partition import GATE, MATMUL, SIGNAL
from warploom.schedule.model.costs import costs
from warploom.tile import Program

KINDS: Mapping[str, type[Step] | tuple[type[Step], ...]] = {
    GATE: (Wait, TurnWait),
    MATMUL: Issue,
    SIGNAL: (Release, TurnPass),
}
PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True)
class Mark:
    """A step of a group, done at a cycle."""

    loop: str
    group: int
    iteration: int
    step: str
    cycle: float


Trace = tuple[Mark, ...]


def predicted(
    program: Program,
    schedule: KernelSchedule,
    cubin: bytes,
    gpu: str = "h200",
    rates: Rates | None = None,
    iterations: int = 4,
) -> Trace:
    """The last iterations of the walk of every loop; raises what `replay` raises."""
    block, kernel = lower(program, schedule), decode(parse(cubin, program.name))
    found: list[Mark] = []
    for walk in walked(program, schedule, block, kernel, costs(gpu), rates or {}):
        found += settled(marks_of(walk), iterations)
    return tuple(found)


def marks_of(walk: Walk) -> list[Mark]:
    """Every step of a walk, in the order of their cycles."""
    found: list[Mark] = []
    for group, kind, number, cycle in walk.partition.marks:
        steady = walk.sections[group % len(walk.sections)].steady
        steps = [step for step in steady if isinstance(step, KINDS[kind])]
        iteration, place = divmod(number, len(steps))
        found.append(Mark(walk.index, group, iteration, str(steps[place]), cycle))
    return found


def settled(marks: Sequence[Mark], iterations: int) -> list[Mark]:
    """The last iterations of a loop that all of its groups have gone through, from cycle 0."""
    kept = last_whole(marks, iterations)
    start = min((mark.cycle for mark in kept), default=0.0)
    first = min((mark.iteration for mark in kept), default=0)
    return [
        Mark(m.loop, m.group, m.iteration - first, m.step, m.cycle - start)
        for m in sorted(kept, key=lambda mark: (mark.group, mark.cycle))
    ]


def last_whole(marks: Sequence[Mark], iterations: int) -> list[Mark]:
    """The marks of the last iterations of a loop that all of its groups have gone through."""
    groups = {mark.group for mark in marks}
    ends = [max(m.iteration for m in marks if m.group == group) for group in groups]
    whole = min(ends, default=0)
    return [mark for mark in marks if max(0, whole - iterations) <= mark.iteration < whole]


def spans(trace: Iterable[Mark]) -> dict[tuple[str, str], float]:
    """Mean cycles from each step of a loop to the next step of its group, over groups and
    iterations, by loop and "step -> next"."""
    lines: dict[tuple[str, int], list[Mark]] = {}
    for mark in trace:
        lines.setdefault((mark.loop, mark.group), []).append(mark)
    found: dict[tuple[str, str], list[float]] = {}
    for (loop, _), line in lines.items():
        for one, other in pairwise(line):
            key = loop, f"{one.step} -> {other.step}"
            found.setdefault(key, []).append(other.cycle - one.cycle)
    return {key: fmean(cycles) for key, cycles in found.items()}


def errors(model: Trace, measured: Trace) -> list[tuple[str, str, float, float]]:
    """(loop, "step -> next", predicted, measured cycles) of what both traces have, the largest
    difference first."""
    left, right = spans(model), spans(measured)
    both = [(*key, left[key], right[key]) for key in left if key in right]
    return sorted(both, key=lambda row: -abs(row[2] - row[3]))


def perfetto(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Chrome's trace format, which ui.perfetto.dev opens: a process for each loop of each trace, a
    track a warp group, a slice from each step to the next; 1 cycle is shown as 1 us."""
    events: list[dict[str, Any]] = []
    loops = dict.fromkeys(mark.loop for trace in traces.values() for mark in trace)
    for number, (loop, name) in enumerate((loop, name) for loop in loops for name in traces):
        marks = [mark for mark in traces[name] if mark.loop == loop]
        about = {"name": f"loop {loop}, {name}"}
        events.append({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": about})
        for one, other in pairwise(marks):
            if one.group != other.group:
                continue
            events.append(
                {
                    "name": one.step,
                    "ph": "X",
                    "pid": number,
                    "tid": one.group,
                    "ts": one.cycle,
                    "dur": other.cycle - one.cycle,
                    "args": {"iteration": one.iteration, "until": other.step},
                }
            )
        for group in sorted({mark.group for mark in marks}):
            about = {"name": f"group {group}"}
            track = {"name": "thread_name", "ph": "M", "pid": number, "tid": group, "args": about}
            events.append(track)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": "cycles"}}
