"""What is asked: a graph on a target under rules, in how much time; and the model of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import OURS, Prices, Rules
from warploom.schedule.model.target import Target
from warploom.schedule.solve.encoding import Encoding, encode_times
from warploom.schedule.solve.encoding_groups import add_groups
from warploom.schedule.solve.encoding_lives import add_lifetimes
from warploom.schedule.solve.encoding_memory import add_memory
from warploom.schedule.solve.objectives import STAGES, Stage
from warploom.schedule.solve.solver import Effort, Variable
from warploom.schedule.solve.subtiles import pins_allow_exchange
from warploom.schedule.solve.uniform import add_uniform

BUILDING = 1e-4  # seconds for the square of an operation: a guess before the first model


@dataclass(frozen=True)
class Problem:
    """What to solve and how.

    stages  most overlapped iterations; 0: as many as the modulo schedule needs, and one more
    pins    operations whose group a person decided
    uniform every sub-tile runs the same program at a shift (`solve.uniform`); pins, if any, must
            then give each sub-tile the same kind of groups
    """

    graph: Graph
    target: Target
    rules: Rules = OURS
    prices: Prices = field(default_factory=Prices)
    effort: Effort = field(default_factory=Effort)
    stages: int = 0
    objectives: tuple[Stage, ...] = STAGES
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    uniform: bool = False

    def __post_init__(self) -> None:
        self.target.validate(self.graph)


@dataclass
class Clock:
    """The time limit of one solve, shared by its steps; `say` hears which step begins."""

    effort: Effort
    begin: float = field(default_factory=time.perf_counter)
    built: float = 0.0  # seconds the last model with groups took to build
    say: Callable[[str], None] = field(default=lambda _: None)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    @property
    def over(self) -> bool:
        """Whether the limit has passed: building a large model takes time of its own."""
        return self.spent >= self.effort.seconds

    def affords(self, problem: Problem) -> bool:
        """Whether a model of the problem can be built before the limit.

        Building is no search and cannot be stopped: with groups it takes seconds from a hundred
        operations on, about with the square of their number.
        """
        if not problem.target.groups:
            return not self.over
        guess = self.built or BUILDING * len(problem.graph.nodes) ** 2
        return self.spent + guess < self.effort.seconds

    def building(self, problem: Problem, build: Callable[[], Encoding]) -> Encoding:
        """Build a model and remember how long that took."""
        begin = time.perf_counter()
        it = build()
        if problem.target.groups:
            self.built = time.perf_counter() - begin
        return it

    def share(self, part: float = 1.0) -> Effort:
        """Effort with that part of the remaining time."""
        left = max(0.05, self.effort.seconds - self.spent)
        return replace(self.effort, seconds=part * left)


def joint_encoding(
    problem: Problem,
    interval: int | tuple[int, int],
    stages: int,
    without: frozenset[str] = frozenset(),
) -> Encoding:
    """The full model at an interval, or over a range of them."""
    free = problem.uniform or not problem.pins
    it = encode_times(
        problem.graph,
        problem.target,
        problem.rules,
        stages,
        interval,
        without,
        symmetric=free and pins_allow_exchange(problem.graph, problem.target, problem.pins),
    )
    if problem.uniform:
        add_uniform(it)
    if problem.target.groups:
        add_groups(it, problem.pins)
    else:
        add_lifetimes(it)
    add_memory(it, groups=bool(problem.target.groups))
    return it


def decisions(it: Encoding) -> list[Variable]:
    """Variables that determine a schedule: enough for an answer and for the next stage's hint."""
    return [*it.time.values(), *it.member.values(), *it.depth.values(), *it.life.values()]
