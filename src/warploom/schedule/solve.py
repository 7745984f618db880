"""Graph + target -> proven Schedule: bounds, modulo schedule, joint problem, certificate.

    bounds          the analytic minimum of the interval, MinII
    modulo          units and dependences only: the smallest interval, then the shortest length
    joint           the same with warp groups; if impossible, the interval becomes the variable
    objectives      at the settled interval, one after the other, each optimum a constraint
    check           by code that shares nothing with the encoding; an illegal answer never leaves

The interval is optimal among schedules of at most `stages` overlapped iterations; when it meets
an analytic bound, among all. The paper's search raises the interval by one until an answer is
found (section 4.4); minimising over a range proves the same without stepping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from warploom.errors import CheckFailed
from warploom.schedule.bounds import Bounds, lower_bounds, serial_length
from warploom.schedule.checker import check
from warploom.schedule.encoding import Encoding, encode_times
from warploom.schedule.encoding_groups import add_groups, add_lifetimes
from warploom.schedule.encoding_memory import add_memory
from warploom.schedule.graph import Graph
from warploom.schedule.objectives import STAGES, Stage
from warploom.schedule.readout import read_schedule
from warploom.schedule.rules import OURS, Prices, Rules
from warploom.schedule.schedule import Objective, Proof, Schedule
from warploom.schedule.solver import NAME, Answer, Effort, IntVar, run
from warploom.schedule.target import Target

MOST_STAGES = 12
PROBES = (1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 4.0)
GRACE = 5.0


@dataclass(frozen=True)
class Problem:
    """What to solve and how. `stages` 0: what the modulo schedule needs, and one more."""

    graph: Graph
    target: Target
    rules: Rules = OURS
    prices: Prices = field(default_factory=Prices)
    effort: Effort = field(default_factory=Effort)
    stages: int = 0
    objectives: tuple[Stage, ...] = STAGES

    def __post_init__(self) -> None:
        self.target.validate(self.graph)


@dataclass
class Clock:
    """The time limit of one solve, shared by its steps."""

    effort: Effort
    begin: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def share(self, part: float = 1.0) -> Effort:
        """Effort with that part of the remaining time."""
        left = max(0.05, self.effort.seconds - self.spent)
        return replace(self.effort, seconds=part * left)


@dataclass(frozen=True)
class Modulo:
    """The answer without warp groups: interval, length, and how they are proved."""

    interval: int
    interval_bound: int
    length: int
    length_bound: int
    time: Mapping[str, int]
    seconds: float


def solve(problem: Problem) -> Schedule:
    """The optimal schedule under the problem's rules, or the best found marked unproved.

    Raises `CheckFailed` when no schedule exists even with nothing overlapped.
    """
    clock = Clock(problem.effort)
    bounds = lower_bounds(problem.graph, problem.target)
    modulo = modulo_schedule(problem, bounds, clock)
    stages = problem.stages or -(-modulo.length // modulo.interval) + 1
    problem = replace(problem, stages=stages)
    interval, bound, hint = _settle_interval(problem, modulo, clock)
    settled = clock.spent
    it = joint_encoding(problem, interval)
    objectives, values = _optimise(problem, it, hint, clock)
    proof = _prove(problem, bounds, interval, bound, settled)
    schedule = read_schedule(it, values, interval, objectives, proof)
    check(problem.graph, problem.target, schedule, problem.prices).raise_if_failed()
    return schedule


def modulo_schedule(problem: Problem, bounds: Bounds, clock: Clock) -> Modulo:
    """Phase 1: the smallest interval and then the shortest length, without warp groups."""
    low = bounds.minimum
    stages = problem.stages or MOST_STAGES
    it = encode_times(problem.graph, problem.target, problem.rules, stages, low)
    if it.length is not None:
        it.model.minimize(it.length)
    answer = run(it.model, clock.share(0.3), it.time.values())
    bound = low
    if not answer.found:
        bound = low + 1 if answer.status == "INFEASIBLE" else low
        low, bound = _least_modulo_interval(problem, bound, clock)
        it = encode_times(problem.graph, problem.target, problem.rules, stages, low)
        if it.length is not None:
            it.model.minimize(it.length)
        answer = run(it.model, clock.share(0.5), it.time.values())
    if not answer.found:
        raise CheckFailed(
            f"graph {problem.graph.name}: no modulo schedule found up to the serial interval "
            f"{serial_length(problem.graph)} with {stages} stages ({answer.status})"
        )
    times = {name: answer.values[variable.index] for name, variable in it.time.items()}
    return Modulo(low, bound, answer.value, answer.bound, times, answer.seconds)


def _least_modulo_interval(problem: Problem, low: int, clock: Clock) -> tuple[int, int]:
    high = max(low, serial_length(problem.graph))
    stages = problem.stages or MOST_STAGES
    it = encode_times(problem.graph, problem.target, problem.rules, stages, (low, high))
    it.model.minimize(it.interval)
    answer = run(it.model, clock.share(0.5), it.time.values())
    if answer.found:
        return answer.value, answer.bound
    return high, low


def joint_encoding(
    problem: Problem,
    interval: int | tuple[int, int],
    without: frozenset[str] = frozenset(),
) -> Encoding:
    """The full model at an interval, or over a range of them."""
    stages = problem.stages or MOST_STAGES
    it = encode_times(problem.graph, problem.target, problem.rules, stages, interval, without)
    if problem.target.groups:
        add_groups(it)
    else:
        add_lifetimes(it)
    add_memory(it, groups=bool(problem.target.groups))
    return it


def decisions(it: Encoding) -> list[IntVar]:
    """Variables that determine a schedule: enough for an answer and for the next stage's hint."""
    return [*it.time.values(), *it.member.values(), *it.depth.values(), *it.life.values()]


def _settle_interval(
    problem: Problem, modulo: Modulo, clock: Clock
) -> tuple[int, int, Mapping[int, int]]:
    """The interval of the joint problem, its proved lower bound, and a schedule to start from."""
    it = joint_encoding(problem, modulo.interval)
    answer = run(it.model, clock.share(0.5), decisions(it))
    if answer.found:
        return modulo.interval, modulo.interval_bound, answer.values
    bound = modulo.interval + 1 if answer.status == "INFEASIBLE" else modulo.interval_bound
    high, found = _probe(problem, bound, clock)
    if high > bound:
        it = joint_encoding(problem, (bound, high - 1))
        it.model.minimize(it.interval)
        least = run(it.model, clock.share(0.7), decisions(it))
        bound = _bound_after(least, bound, high)
        if least.found:
            high = least.value
            it = joint_encoding(problem, high)
            again = run(it.model, clock.share(0.5), decisions(it))
            found = again.values if again.found else least.values
    return high, bound, found


def _bound_after(answer: Answer, low: int, high: int) -> int:
    """The proved lower bound after minimising the interval over [low, high)."""
    if answer.status == "INFEASIBLE":
        return high
    return max(low, answer.bound) if answer.found else low


def _probe(problem: Problem, low: int, clock: Clock) -> tuple[int, Mapping[int, int]]:
    """Some interval that has a schedule, found on a coarse ladder up to the serial bound.

    Only an upper bound: what lies between is proved or searched by the caller.
    """
    serial = max(low, serial_length(problem.graph))
    ladder = sorted({min(serial, max(low, round(low * factor))) for factor in PROBES} | {serial})
    status = "UNKNOWN"
    for interval in ladder:
        it = joint_encoding(problem, interval)
        last = interval == serial
        effort = clock.share(0.2)
        if last and effort.seconds < GRACE:
            effort = replace(effort, seconds=GRACE)
        answer = run(it.model, effort, decisions(it))
        status = answer.status
        if answer.found:
            return interval, answer.values
    verdict = (
        "none exists" if status == "INFEASIBLE" else f"none found in {problem.effort.seconds:g} s"
    )
    raise CheckFailed(
        f"graph {problem.graph.name}: no schedule on target {problem.target.name} even at the "
        f"serial interval {serial}, where nothing overlaps ({verdict}): the groups, registers or "
        "memory on offer cannot hold it"
    )


def _optimise(
    problem: Problem, it: Encoding, hint: Mapping[int, int], clock: Clock
) -> tuple[tuple[Objective, ...], Mapping[int, int]]:
    """Minimise one objective after the other; each best value is a constraint on the next."""
    objectives: list[Objective] = []
    values = hint
    for position, stage in enumerate(problem.objectives):
        expression = stage.expression(it, problem.prices)
        it.model.minimize(expression)
        left = len(problem.objectives) - position
        answer = run(it.model, clock.share(max(0.4, 1 / left)), decisions(it), values)
        if not answer.found:
            break  # time is up: the stages so far stand, this one keeps the schedule it had
        values = answer.values
        objectives.append(
            Objective(stage.name, answer.value, answer.bound, stage.unit, round(answer.seconds, 3))
        )
        it.model.clear_objective()
        it.model.add(expression <= answer.value)
    return tuple(objectives), values


def _prove(problem: Problem, bounds: Bounds, interval: int, bound: int, seconds: float) -> Proof:
    seconds = round(seconds, 3)
    if interval <= bounds.minimum:
        return Proof(bounds.minimum, "analytic", bounds.reason, NAME, seconds)
    if bound >= interval:
        reason = f"every interval below {interval} is refuted, {bounds.minimum} is the unit bound"
        return Proof(interval, "infeasible", reason, NAME, seconds, problem.stages)
    reason = (
        f"time limit: intervals {bound} to {interval - 1} are undecided, "
        f"gap {(interval - bound) / interval:.1%}"
    )
    return Proof(bound, "unproved", reason, NAME, seconds, problem.stages)
