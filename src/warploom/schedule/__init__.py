"""Optimal schedules: joint software pipelining and warp specialisation, proved and checked.

    model       graph, target, costs, rules, schedule, bounds
    solve       the solver
    check       what believes none of it; refute: a second search for its lower bounds
    view        what people see; service: a request, from problem to picture

Solving needs OR-Tools (`warploom[solver]`); everything else does not.
"""

from warploom.schedule.check.checker import Report, check
from warploom.schedule.check.simulate import Run, simulate, verify
from warploom.schedule.model.bounds import Bounds, lower_bounds
from warploom.schedule.model.graph import Edge, Graph, Node, UnitUse
from warploom.schedule.model.rules import CROSSING_PRICES, OURS, PAPER, Prices, Rules
from warploom.schedule.model.schedule import Group, Objective, Proof, Schedule
from warploom.schedule.model.target import GroupSpec, Target, Unit

__all__ = [
    "CROSSING_PRICES",
    "OURS",
    "PAPER",
    "Bounds",
    "Edge",
    "Graph",
    "Group",
    "GroupSpec",
    "Node",
    "Objective",
    "Prices",
    "Proof",
    "Report",
    "Rules",
    "Run",
    "Schedule",
    "Target",
    "Unit",
    "UnitUse",
    "check",
    "lower_bounds",
    "simulate",
    "verify",
]
