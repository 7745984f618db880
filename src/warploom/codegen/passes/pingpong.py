"""Where a schedule puts an op, and the turns that groups take with the tensor core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import Issue, Run, Step, TurnPass, TurnWait, Wait
from warploom.errors import InputError
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Loop, Op


def node_of(schedule: Schedule, op: Op, part: int) -> str:
    """The schedule's name for an op on a sub-tile: `mma.3/1`, or `mma.3` when not cut."""
    for name in (f"{op.label}/{part}", op.label):
        if name in schedule.time:
            return name
    raise InputError(
        f"schedule of {schedule.graph} gives no time for {op.label} (part {part}), {op.where}"
    )


def require_group(schedule: Schedule, node: str, wanted: str) -> None:
    """Raise when a node is in another group: register tiles stay where they are."""
    if schedule.group[node] != wanted:
        raise InputError(
            f"schedule of {schedule.graph}: {node} is in group {schedule.group[node]!r}, expected "
            f"{wanted!r}: register tiles do not move between groups, loads belong to the producer"
        )


def with_turns(steps: Sequence[Step], runs: Mapping[tuple[int, int], int], part: int) -> list[Step]:
    """A group's steps with a wait for its turn before every run of matmuls, passed on after it."""
    result: list[Step] = []
    open_run = -1
    for number, step in enumerate(steps):
        run = -1
        if isinstance(step, Issue):
            run = runs[(step.op.id, part)]
        elif open_run >= 0 and (isinstance(step, Wait) or _prepares(step, steps[number:])):
            run = open_run
        if open_run >= 0 and run != open_run:
            result.append(TurnPass())
        if run >= 0 and run != open_run:
            result.append(TurnWait())
        open_run = run
        result.append(step)
    if open_run >= 0:
        result.append(TurnPass())
    return result


def _prepares(step: Step, rest: Sequence[Step]) -> bool:
    """Whether a step changes the sums that the very next matmul adds to: they keep one turn."""
    following = next((s.op for s in rest if isinstance(s, Issue)), None)
    if not isinstance(step, Run) or step.op.dst is None or following is None:
        return False
    return following.dst == step.op.dst


def turn_runs(
    schedule: KernelSchedule, loop: Loop, ops: Mapping[int, Op]
) -> dict[tuple[int, int], int]:
    """Which run of tensor-core ops (op id, part) belongs to; runs go round the compute groups.

    Raises when the schedule's times do not let the groups take turns one after the other.
    """
    times = schedule.loops[loop.index]
    interval = times.initiation_interval
    found: list[tuple[int, int, int]] = []
    for op in loop.body:
        if isinstance(op, Op) and op.kind == "mma":
            for part in range(len(schedule.compute)):
                time = times.time[node_of(times, ops[op.id], part)]
                found.append((time % interval, part, op.id))
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
    parts = len(schedule.compute)
    expected = [owners[0]] if parts == 1 else [(owners[0] + i) % parts for i in range(len(owners))]
    if owners != expected or len(owners) % parts:
        raise InputError(
            f"schedule {schedule.name}: tensor-core work of the groups comes in the order {owners} "
            "in an interval; taking turns needs each group once, in a fixed round"
        )
    return runs
