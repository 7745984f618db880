"""From a request (names and numbers) to a solved, checked, simulated and drawn schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from warploom.errors import InputError
from warploom.schedule.check.checker import Report, check
from warploom.schedule.check.simulate import Rates, verify
from warploom.schedule.model.costs import CostTable, costs, read_overrides, target
from warploom.schedule.model.graph import SOLVED, Graph, is_solved, read_json
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.published import tiles
from warploom.schedule.published.catalogue import GRAPHS, build, parameters, parse_params
from warploom.schedule.published.templates import pinned, template, templates
from warploom.schedule.refute.refute import settled
from warploom.schedule.solve.enumerate import top_schedules
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort
from warploom.schedule.view import gantt
from warploom.schedule.view.picture import svg
from warploom.schedule.view.trace import chrome_trace

GPU = "h100"  # where neither the request nor a file names a machine
CONFIRMING = 0.5  # of the time limit: what proving a bound again may take


@dataclass(frozen=True)
class Request:
    """What a person asked for; see the options of `warploom schedule`."""

    name: str
    gpu: str = ""
    settings: tuple[str, ...] = ()
    costs: str = ""
    cost_end: str = "nominal"
    groups: int = 0
    registers: int = 0
    stages: int = 0
    template: str = ""
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


@dataclass(frozen=True)
class Result:
    """The graph and target a schedule is for, the schedule, its checks, and others as good."""

    graph: Graph
    target: Target
    schedule: Schedule
    report: Report
    rates: Rates
    others: tuple[Schedule, ...] = ()


def table_of(request: Request) -> CostTable:
    """The cost table a request names, with its overrides."""
    table = costs(request.gpu or GPU, "nominal").at(request.cost_end)
    if request.costs:
        table = table.override("command line", **read_overrides(request.costs))
    return table


def problem_of(request: Request) -> Problem:
    """The problem a request poses."""
    table = table_of(request)
    where = target(table, request.groups, request.registers)
    if request.name.endswith(".json"):
        if request.settings:
            raise InputError(f"--set {request.settings[0]!r}: a JSON graph has no parameters")
        data = read_json(Path(request.name))
        graph = Graph.from_json(data, request.name)
        if is_solved(data) and not (request.gpu or request.groups or request.registers):
            where = Target.from_json(data, request.name)
    else:
        graph = build(request.name, table, parse_params(list(request.settings)))
    effort = Effort(request.time_limit, request.workers, request.seed)
    problem = Problem(graph, where, effort=effort, stages=request.stages)
    return pinned(template(request.template), problem) if request.template else problem


def answer(request: Request, say: Callable[[str], None] = lambda _: None) -> Result:
    """Solve, prove the bound again, check and simulate; raises what a person has to know.

    `say` hears which step begins.
    """
    problem = problem_of(request)
    schedule = solve(problem, say)
    say(f"proving the lower bound {schedule.proof.lower_bound} again")
    schedule = settled(problem, schedule, CONFIRMING * request.time_limit)
    say("simulating")
    report = check(problem.graph, problem.target, schedule, problem.prices)
    rates = verify(problem.graph, problem.target, schedule)
    others: tuple[Schedule, ...] = ()
    if request.top > 1:
        others = tuple(top_schedules(problem, schedule, request.top)[1:])
    return Result(problem.graph, problem.target, schedule, report, rates, others)


def show(result: Result, console: Console) -> None:
    """Everything for a person."""
    gantt.show(result.graph, result.target, result.schedule, console)
    memory = ", ".join(
        f"{name} {peak}/{result.target.memories[name]}"
        for name, peak in result.report.memory_peak.items()
    )
    console.print(f"\nchecked: {_rules(result)}; peaks: {memory}")
    rates = result.rates
    console.print(
        f"simulated: no deadlock, no overwrite; {rates.ordered:.0f} cycles an iteration in unit "
        f"order, {rates.free:.0f} free-running"
        + (" -> keep the order with named barriers" if rates.needs_order else "")
    )
    for other in result.others:
        console.print(f"\n[bold]as good[/]\n{other}")


def _rules(result: Result) -> str:
    return "no rule broken" if result.report.passed else f"{result.report.findings[0]}"


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


def trace(result: Result) -> dict[str, Any]:
    """A Chrome trace of the schedule."""
    return chrome_trace(result.graph, result.target, result.schedule)


def picture(result: Result) -> str:
    """The steady state as SVG."""
    return svg(result.graph, result.target, result.schedule)


def show_catalogue(console: Console) -> None:
    """Built-in graphs and templates."""
    table = Table(box=None, pad_edge=False)
    for column in ("graph", "what", "parameters"):
        table.add_column(column)
    for name, entry in GRAPHS.items():
        given = " ".join(f"{key}={value}" for key, value in parameters(name).items())
        table.add_row(name, entry.about, given)
    console.print(table)
    console.print()
    written = Table(box=None, pad_edge=False)
    written.add_column("template")
    written.add_column("what")
    for name, item in templates().items():
        written.add_row(name, item.about)
    console.print(written)


def show_tiles(
    request: Request, console: Console, say: Callable[[str], None] = lambda _: None
) -> None:
    """The tile grid of a graph, best first; `say` hears which shape is on."""
    if request.name not in GRAPHS:
        raise InputError(f"--tiles {request.name!r}, expected one of {list(GRAPHS)}")
    if request.template or request.top > 1:
        raise InputError("--tiles compares shapes, it takes neither --template nor --top")
    shapes = GRAPHS[request.name].tiles
    fixed = parse_params(list(request.settings))
    grid = [{**shape, **fixed} for shape in shapes]
    each = Effort(max(1.0, request.time_limit / max(1, len(grid))), request.workers, request.seed)
    table_ = table_of(request)
    where = target(table_, request.groups, request.registers)
    results = tiles.search_tiles(request.name, table_, where, grid, each, say)
    table = Table(box=None, pad_edge=False)
    for column in ("shape", "II", "cycles/kFLOP", "proof", "binds"):
        table.add_column(column)
    for item in results:
        shape = " ".join(f"{key}={value}" for key, value in item.params.items())
        if item.schedule is None:
            table.add_row(shape, "-", "-", "-", item.reason[:90])
            continue
        proof = item.schedule.proof
        interval = item.schedule.initiation_interval
        row = (
            shape,
            str(interval),
            f"{item.cycles_per_kflop:.4f}",
            proof.status,
            proof.reason[:90],
        )
        table.add_row(*row)
    console.print(table)
