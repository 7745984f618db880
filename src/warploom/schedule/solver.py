"""OR-Tools' CP-SAT behind one door: typed names, one deterministic way to run it, words for it.

Everything else here works without OR-Tools: graphs, bounds, checker, simulator and pictures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from warploom.errors import ToolMissing

try:
    from ortools.init.python import init
    from ortools.sat.python import cp_model
except ImportError:
    raise ToolMissing(
        "OR-Tools is needed to solve schedules; install it with: pip install 'warploom[solver]'"
    ) from None

BoolVar = cp_model.BoolVarT
CpModel = cp_model.CpModel
IntVar = cp_model.IntVar
IntervalVar = cp_model.IntervalVar
Linear = Any  # a number, a variable or a sum of them: the stubs' operators do not compose
Variable = IntVar | BoolVar
NAME = f"OR-Tools CP-SAT {init.OrToolsVersion.version_string()}"


def only_if(constraint: Any, *literals: BoolVar) -> None:
    """Enforce a constraint only where all literals hold."""
    constraint.only_enforce_if(*literals)


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    With one worker a seed gives one schedule; with more, only proved values are reproducible.
    """

    seconds: float = 60.0
    workers: int = 1
    seed: int = 1


@dataclass(frozen=True)
class Answer:
    """What the solver said: OPTIMAL, SAT, INFEASIBLE or UNKNOWN (time limit)."""

    status: str
    value: int
    bound: int
    seconds: float
    values: Mapping[int, int]

    @property
    def found(self) -> bool:
        """Whether there is a solution to read."""
        return self.status in ("OPTIMAL", "SAT")


def run(
    model: CpModel,
    effort: Effort,
    wanted: Iterable[Variable],
    hint: Mapping[int, int] | None = None,
    log: bool = False,
) -> Answer:
    """Solve a model and return the values of the `wanted` variables by their index."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = effort.workers
    if model.has_objective():  # linear relaxations prove sums of lifetimes; they slow feasibility
        solver.parameters.linearization_level = 2
    solver.parameters.random_seed = effort.seed
    solver.parameters.max_time_in_seconds = max(0.05, effort.seconds)
    solver.parameters.log_search_progress = log
    variables = list(wanted)
    model.clear_hints()
    known: list[Any] = list(variables)
    for variable in known:
        if hint and variable.index in hint:
            model.add_hint(variable, int(hint[variable.index]))
    begin = time.perf_counter()
    status = solver.solve(model)
    seconds = time.perf_counter() - begin
    words = {
        cp_model.OPTIMAL: "OPTIMAL",
        cp_model.FEASIBLE: "SAT",
        cp_model.INFEASIBLE: "INFEASIBLE",
        cp_model.UNKNOWN: "UNKNOWN",
    }
    if status not in words:
        raise AssertionError(f"the encoding is not a model: {model.validate()}")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = {v.index: solver.value(v) for v in variables} if found else {}
    bounded = found and model.has_objective()
    value = round(solver.objective_value) if bounded else 0
    bound = round(solver.best_objective_bound) if bounded else 0
    return Answer(words[status], value, bound, seconds, values)
