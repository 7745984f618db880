"""Which tile? Solve each shape of a grid and compare cycles per useful floating-point operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from warploom.errors import CheckFailed, InputError
from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.published.catalogue import GRAPHS, build
from warploom.schedule.solve.objectives import TRAFFIC
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort


@dataclass(frozen=True)
class TileResult:
    """One shape: its schedule, or why there is none."""

    params: Mapping[str, Any]
    schedule: Schedule | None
    flops: int
    reason: str

    @property
    def cycles_per_kflop(self) -> float:
        """Cycles of one SM for 1000 useful floating-point operations; infinite without schedule."""
        if self.schedule is None or not self.flops:
            return float("inf")
        return 1000 * self.schedule.initiation_interval / self.flops


def search_tiles(
    name: str,
    costs: CostTable,
    target: Target,
    shapes: Iterable[Mapping[str, Any]] | None = None,
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[TileResult]:
    """Every shape solved for interval and traffic, best first; shapes that do not fit last.

    `say` hears which shape is on.
    A shape is dropped without solving only when its graph or target refuses it by name.
    """
    grid = list(shapes) if shapes is not None else list(GRAPHS[name].tiles)
    if not grid:
        raise InputError(f"graph {name} has no tile grid of its own, give shapes to try")
    each = effort or Effort(seconds=10)
    results: list[TileResult] = []
    for number, params in enumerate(grid):
        say(f"shape {number + 1} of {len(grid)}")
        results.append(_solve_shape(name, costs, target, params, each))
    return sorted(results, key=lambda result: result.cycles_per_kflop)


def _solve_shape(
    name: str, costs: CostTable, target: Target, params: Mapping[str, Any], effort: Effort
) -> TileResult:
    try:
        graph = build(name, costs, params)
        problem = Problem(graph, target, effort=effort, objectives=(TRAFFIC,))
        schedule = solve(problem)
    except (InputError, CheckFailed) as error:
        return TileResult(params, None, 0, str(error))
    return TileResult(params, schedule, graph.flops, schedule.proof.reason)
