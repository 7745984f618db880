"""Cycles an iteration that a kernel schedule should take, named or solved: the model's answer.

The block program that the schedule lowers to is walked (`perf.pace`) with the costs of the
loop's graph (`perf.extract`) and the machine's table. Of a schedule's times nothing but the
order is used, so a named schedule, whose times are positions, is predicted by the same rules as a
solved one. Which phase the groups are in when a loop begins is chance and may stay so, so the
answer is the mean over some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.passes.lower import lower
from warploom.perf.extract import extract
from warploom.perf.pace import pace
from warploom.schedule.model.bounds import Bounds, lower_bounds
from warploom.schedule.model.costs import CostTable, costs
from warploom.tile import Program

ITERATIONS = 48
PHASES = (0.0, 0.25, 0.5, 0.75)  # of the least interval: how late a group begins after another


@dataclass(frozen=True)
class Prediction:
    """One loop: cycles an iteration in the steady state, and what no schedule can beat."""

    loop: str
    cycles: float
    bound: int
    reason: str
    flops: int


def predict(
    program: Program, schedule: KernelSchedule, gpu: str = "h200", table: CostTable | None = None
) -> dict[str, Prediction]:
    """Predictions by loop."""
    block, chosen = lower(program, schedule), table or costs(gpu)
    found: dict[str, Prediction] = {}
    for loop in program.loops():
        problem = extract(
            block.placement,
            loop,
            chosen,
            copies=dict(schedule.loops[loop.index].params.get("copies", {})),
            skip_unit=schedule.launch.skip_unit,
        )
        bounds = lower_bounds(problem.graph, problem.target)
        phases = PHASES if len(schedule.compute) > 1 else PHASES[:1]
        begins = [part * bounds.minimum for part in phases]
        if schedule.launch.stagger:
            begins = [float(schedule.launch.stagger)]
        walks = [
            pace(block, loop.index, problem.graph, chosen, ITERATIONS, late) for late in begins
        ]
        cycles = sum(walks) / len(walks)
        found[loop.index] = Prediction(
            loop.index, cycles, *machine_bound(bounds), problem.graph.flops
        )
    return found


def machine_bound(bounds: Bounds) -> tuple[int, str]:
    """(cycles an iteration that no schedule beats on the machine, what binds).

    The graph's own bound less what shared memory is charged with: that adds up reads of operands
    and writes of loads one after another, and is an upper estimate. Steps of 128x192x64 in bf16,
    charged 832 cycles, were counted at 767 on an H200; their matmuls take 768.
    """
    certain = {unit: cycles for unit, cycles in bounds.load.items() if unit != "SMEM"}
    unit = max(certain, key=lambda name: certain[name], default="")
    least = certain.get(unit, 0)
    if bounds.recurrence > least:
        return max(1, bounds.recurrence), replace(bounds, resource=0).reason
    return max(1, least), f"unit {unit} is needed for {least} cycles"


def cycles_of(found: Mapping[str, Prediction]) -> float:
    """Cycles an iteration of all loops together."""
    return sum(one.cycles for one in found.values())
