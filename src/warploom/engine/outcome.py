"""What becomes of a point: its predicted time and why, or why it is of no use.

A point's bound comes first: the time that its loops take at the interval that no order beats. Where
it lies below the best time known so far, the point is built, and its machine code replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from warploom.autosched.points import Point
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import compile_source
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule
from warploom.engine.points import Space
from warploom.errors import CheckFailed, WarploomError
from warploom.perf.extract import extract
from warploom.perf.launch_time import Launch, LaunchTime, at_bounds
from warploom.perf.replay import Replay, machine_bound, replay
from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.costs import costs
from warploom.tile import Op

BESIDE_SUMS = 32  # registers of a thread for addresses and operands
WARP_GROUP = 128  # threads
Outcome = dict[str, object]


def tried(space: Space, point: Point, sizes: Mapping[str, int], gpu: str, best: float) -> Outcome:
    """The outcome of a point, in a worker: predicted time and why, refused, or pruned."""
    try:
        selected = space.selected(point, gpu)
        bound = bound_of(selected, sizes, gpu)
        if bound > best:
            return {"pruned": True, "bound": bound}
        cubin, _ = compile_source(selected.emitted(), selected.arch, selected.allow)
        assert isinstance(selected.schedule, KernelSchedule)
        launch = Launch(selected.program, selected.launch, sizes, gpu)
        found = replay(selected.program, selected.schedule, cubin, gpu, rates=launch.rates())
        outcome = told(launch, found, bound)
        if (predicted := launch.time(found).microseconds) < bound:
            raise CheckFailed(
                f"{predicted:.1f} us predicted, its loops take {bound:.1f} us at least: the model "
                "of a launch is wrong"
            )
        return outcome
    except WarploomError as error:
        return {"refused": str(error)}


def told(launch: Launch, found: Replay, bound: float) -> Outcome:
    """What is kept of a point that is of use, whose loops and ends take as long as `found` says."""
    time_ = launch.time(found)
    return {
        "predicted": time_.microseconds,
        "bound": bound,
        "replay": found.to_json(),
        "mhz": time_.mhz,
        "work": time_.work,
        "limits": time_.limits,
        "busy": time_.busy,
        "overhead": time_.overhead,
        "alone": time_.alone,
        "rates": dict(launch.rates()),
    }


def elsewhere(
    space: Space, point: Point, known: Mapping[str, Any], sizes: Mapping[str, int], gpu: str
) -> Outcome | None:
    """The outcome of a point from what is known of it at other sizes: its machine code takes as
    long where its loads come as fast. None where they do not, or what is known cannot be read."""
    try:
        walked = Replay.from_json(known["replay"])
        launch = Launch(*space.laid_out(space.rewritten(point), point), sizes, gpu)
        if dict(launch.rates()) != known["rates"]:
            return None
        ideal = launch.time(at_bounds({name: one.bound for name, one in walked.loops.items()}))
        return told(launch, walked, _bound(ideal))
    except (WarploomError, KeyError, TypeError, ValueError):
        return None


def bound_of(selected: Selected, sizes: Mapping[str, int], gpu: str) -> float:
    """Microseconds that no order of these loops is below: each iteration at its bound, on all SMs
    all the time, at the highest clock."""
    launch = Launch(selected.program, selected.launch, sizes, gpu)
    return _bound(launch.time(at_bounds(bounds_of(selected, gpu))))


def _bound(ideal: LaunchTime) -> float:
    return max(ideal.memory, ideal.busy * ideal.microseconds)


def crowded(selected: Selected) -> bool:
    """Whether the sums of its matmuls leave a thread too few registers for anything else."""
    schedule = selected.schedule
    assert isinstance(schedule, KernelSchedule)
    held = 0
    for loop in selected.program.loops():
        matmuls = [op for op in loop.body if isinstance(op, Op) and op.kind == "mma"]
        sums = {op.dst.name: prod(op.dst.type.shape) for op in matmuls if op.dst is not None}
        held = max(held, sum(sums.values()))
    threads = WARP_GROUP * len(schedule.compute)
    return held / threads + BESIDE_SUMS > schedule.any_loop.groups[-1].registers


def bounds_of(selected: Selected, gpu: str) -> Mapping[str, float]:
    """Cycles of an iteration of each loop that no order is below."""
    schedule, program = selected.schedule, selected.program
    assert isinstance(schedule, KernelSchedule)
    placement = place(program, schedule.launch.split, len(schedule.compute))
    cycles: dict[str, float] = {}
    for loop in placement.program.loops():
        problem = extract(placement, loop, costs(gpu), skip_unit=schedule.launch.skip_unit)
        cycles[loop.index] = float(machine_bound(lower_bounds(problem.graph, problem.target))[0])
    return cycles
