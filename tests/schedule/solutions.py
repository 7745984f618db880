"""Solved schedules shared by the tests: each is solved once a session."""

from __future__ import annotations

from functools import cache

from bench.published import published
from warploom.schedule.model.costs import costs, target
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort


@cache
def problem(name: str, gpu: str, seconds: float = 30.0) -> Problem:
    table = costs(gpu)
    return Problem(published(name, gpu), target(table), effort=Effort(seconds))


@cache
def solved(name: str, gpu: str, seconds: float = 30.0) -> Schedule:
    return solve(problem(name, gpu, seconds))
