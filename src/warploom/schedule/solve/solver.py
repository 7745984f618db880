"""OR-Tools' CP-SAT behind one door: typed names, one deterministic way to run it, words for it.

OR-Tools is imported when the first model is made or run: importing takes a second, and graphs,
bounds, checker, simulator and pictures do without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warploom.errors import ToolMissing

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    BoolVar = cp_model.BoolVarT
    CpModel = cp_model.CpModel
    IntVar = cp_model.IntVar
    IntervalVar = cp_model.IntervalVar
    Variable = IntVar | BoolVar
else:
    BoolVar = CpModel = IntervalVar = IntVar = Variable = Any

Linear = Any  # a number, a variable or a sum of them: the stubs' operators do not compose


@cache
def _ortools(name: str) -> Any:
    """A module of OR-Tools, or a `ToolMissing` with the install line."""
    try:
        return import_module(f"ortools.{name}")
    except ImportError:
        raise ToolMissing(
            "OR-Tools is needed to solve schedules; install it with: pip install 'warploom[solver]'"
        ) from None


def new_model() -> CpModel:
    """An empty model. Raises `ToolMissing` when OR-Tools is not installed."""
    return _ortools("sat.python.cp_model").CpModel()


def solver_name() -> str:
    """The solver and its version, for proofs and evidence."""
    version = _ortools("init.python.init").OrToolsVersion
    return f"OR-Tools CP-SAT {version.version_string()}"


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
class Style:
    """How an objective is searched; measured on the attention graphs (bench/schedule.py).

    linear      how much of the model the linear relaxation holds: 1 the linear rows, 2 all. Sums
                of lifetimes need it, sums of literals do not
    cuts        whether the relaxation is sharpened with cuts: they cost more than they prove here
    from_below  raise the bound by refuting values from the least up, instead of improving
    work        deterministic seconds after which another style takes over, twice as many each
                time round; 0: all there are
    """

    linear: int = 1
    cuts: bool = True
    from_below: bool = False
    work: float = 0.0


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


def _stoppable(solver: Any, model: CpModel) -> Any:
    """Solve in a thread, so that Ctrl-C reaches Python: CP-SAT would take it for a time limit."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def run(
    model: CpModel,
    effort: Effort,
    wanted: Iterable[Variable],
    hint: Mapping[int, int] | None = None,
    style: Style = Style(),
) -> Answer:
    """Solve a model and return the values of the `wanted` variables by their index."""
    sat = _ortools("sat.python.cp_model")
    solver = sat.CpSolver()
    solver.parameters.num_workers = effort.workers
    solver.parameters.linearization_level = style.linear
    if not style.cuts:
        solver.parameters.cut_level = 0
    solver.parameters.use_objective_lb_search = style.from_below
    solver.parameters.random_seed = effort.seed
    solver.parameters.max_time_in_seconds = max(0.05, effort.seconds)
    if style.work:
        solver.parameters.max_deterministic_time = style.work
    variables = list(wanted)
    model.clear_hints()
    known: list[Any] = list(variables)
    for variable in known:
        if hint and variable.index in hint:
            model.add_hint(variable, int(hint[variable.index]))
    begin = time.perf_counter()
    status = _stoppable(solver, model)
    seconds = time.perf_counter() - begin
    words = {
        sat.OPTIMAL: "OPTIMAL",
        sat.FEASIBLE: "SAT",
        sat.INFEASIBLE: "INFEASIBLE",
        sat.UNKNOWN: "UNKNOWN",
    }
    if status not in words:
        raise AssertionError(f"the encoding is not a model: {model.validate()}")
    found = status in (sat.OPTIMAL, sat.FEASIBLE)
    values = {v.index: solver.value(v) for v in variables} if found else {}
    bounded = found and model.has_objective()
    value = round(solver.objective_value) if bounded else 0
    bound = round(solver.best_objective_bound) if bounded else 0
    return Answer(words[status], value, bound, seconds, values)
