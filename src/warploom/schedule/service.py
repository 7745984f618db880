"""From the problem of one loop to a solved, checked, simulated and drawn schedule."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from warploom.errors import InputError
from warploom.files import read_json
from warploom.schedule.check.checker import Report, check
from warploom.schedule.check.simulate import Rates, verify
from warploom.schedule.model.costs import CostTable, costs, read_overrides, target
from warploom.schedule.model.graph import SOLVED, Graph, is_solved
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.refute.refute import settled
from warploom.schedule.solve.enumerate import top_schedules
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort
from warploom.schedule.view import gantt, picture

GPU = "h200"  # where neither the request nor a file names a machine
CONFIRMING = 0.5  # of the time limit: what proving a bound again may take


@dataclass(frozen=True)
class Request:
    """What a person asked for; see the options of `warploom schedule`."""

    gpu: str = ""
    costs: str = ""
    cost_end: str = "high"
    groups: int = 0
    registers: int = 0
    stages: int = 0
    top: int = 1
    time_limit: float = 60.0
    seed: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_limit) and self.time_limit > 0):
            raise InputError(f"--time-limit {self.time_limit}, expected seconds above 0")
        for name, least in (("groups", 0), ("stages", 0), ("top", 1), ("workers", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}, expected at least {least}")

    @property
    def effort(self) -> Effort:
        """How hard to look."""
        return Effort(self.time_limit, self.workers, self.seed)

    def table(self) -> CostTable:
        """The cost table of the machine, with what the request overrides."""
        table = costs(self.gpu or GPU, "nominal").at(self.cost_end)
        if self.costs:
            table = table.override("command line", **read_overrides(self.costs))
        return table


@dataclass(frozen=True)
class Result:
    """The graph and target a schedule is for, the schedule, its checks, and others as good."""

    graph: Graph
    target: Target
    schedule: Schedule
    report: Report
    rates: Rates
    others: tuple[Schedule, ...] = ()

    def __repr__(self) -> str:
        return str(self.schedule)

    def _repr_html_(self) -> str:
        """The steady state as a picture, and what is proved of it, for notebooks."""
        drawn = picture.svg(self.graph, self.target, self.schedule).encode()
        image = f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"
        return f'<img src="{image}"/><pre>{html.escape(str(self.schedule))}</pre>'


def file_problem(path: Path, request: Request) -> Problem:
    """The problem of a graph in a file; one that was solved brings its target."""
    where = target(request.table(), request.groups, request.registers)
    data = read_json(path)
    graph = Graph.from_json(data, str(path))
    if is_solved(data) and not (request.gpu or request.groups or request.registers):
        where = Target.from_json(data, str(path))
    return Problem(graph, where, effort=request.effort, stages=request.stages)


def answer(problem: Problem, top: int = 1, say: Callable[[str], None] = lambda _: None) -> Result:
    """Solve, prove the bound again, check and simulate; raises what a person has to know.

    `top` distinct schedules that are equally good; `say` hears which step begins.
    """
    schedule = solve(problem, say)
    say(f"proving the lower bound {schedule.proof.lower_bound} again")
    schedule = settled(problem, schedule, CONFIRMING * problem.effort.seconds)
    say("simulating")
    report = check(problem.graph, problem.target, schedule, problem.prices)
    rates = verify(problem.graph, problem.target, schedule)
    others: tuple[Schedule, ...] = ()
    if top > 1:
        others = tuple(top_schedules(problem, schedule, top)[1:])
    return Result(problem.graph, problem.target, schedule, report, rates, others)


def show(result: Result, console: Console) -> None:
    """Everything for a person."""
    gantt.show(result.graph, result.target, result.schedule, console)
    memory = ", ".join(
        f"{name} {peak} of {result.target.memories[name]}{' B' * (name == 'smem')}"
        for name, peak in result.report.memory_peak.items()
    )
    checked = "no rule broken" if result.report.passed else result.report.findings[0]
    console.print(f"\nchecked: {checked}; peaks: {memory}")
    rates = result.rates
    console.print(
        f"simulated: no deadlock, no overwrite; {rates.ordered:.0f} cycles an iteration in unit "
        f"order, {rates.free:.0f} free-running"
        + (" -> keep the order with named barriers" if rates.needs_order else "")
    )
    for other in result.others:
        console.print(f"\n[bold]as good[/]\n{other}")


def to_json(result: Result) -> dict[str, Any]:
    """Graph, target and schedule: enough to check the schedule elsewhere, or to solve again."""
    return {
        "schema": SOLVED,
        "version": 1,
        "graph": result.graph.to_json(),
        "target": result.target.to_json(),
        "schedule": result.schedule.to_json(),
        "others": [other.to_json() for other in result.others],
        "simulated": {"ordered": result.rates.ordered, "free": result.rates.free},
    }
