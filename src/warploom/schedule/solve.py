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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

from warploom.errors import CheckFailed
from warploom.schedule.backbone import fix_backbone
from warploom.schedule.bounds import (
    Bounds,
    longest_path,
    lower_bounds,
    serial_length,
)
from warploom.schedule.checker import check
from warploom.schedule.encoding import Encoding
from warploom.schedule.fallback import serial_schedule, serial_values
from warploom.schedule.objectives import (
    LENGTH,
    TRAFFIC,
)
from warploom.schedule.problem import Clock, Problem, decisions, joint_encoding
from warploom.schedule.readout import read_schedule
from warploom.schedule.recount import recount
from warploom.schedule.schedule import Objective, Proof, Schedule
from warploom.schedule.solver import NAME, Answer, Effort, IntVar, Style, Variable, run

EXTRA_STAGES = 2
GRACE = 10.0
MOST_POINTS = 1 << 40
TIMES = Style(2)  # how sums of times are minimised before there are groups


@dataclass(frozen=True)
class Modulo:
    """The answer without warp groups: interval, length, and how they are proved."""

    interval: int
    interval_bound: int
    length: int
    length_bound: int
    seconds: float


def solve(problem: Problem) -> Schedule:
    """The optimal schedule under the problem's rules, or the best found marked unproved.

    Raises `CheckFailed` when no schedule exists even with nothing overlapped.
    """
    clock = Clock(problem.effort)
    bounds = lower_bounds(problem.graph, problem.target)
    modulo = modulo_schedule(problem, bounds, clock)
    if not problem.stages:
        most = -(-modulo.length // modulo.interval) + 1
        problem = replace(problem, stages=most)
    start = _settle_interval(problem, modulo, clock)
    settled = clock.spent
    it = start.model or joint_encoding(problem, start.interval, start.stages)
    if it.length is not None and start.interval == modulo.interval:
        it.model.add(it.length >= modulo.length_bound)  # groups only make it longer
    objectives, values = _optimise(problem, it, start.values, clock)
    proof = _prove(problem, bounds, start, settled)
    schedule = recount(
        problem.graph, problem.rules, read_schedule(it, values, start.interval, objectives, proof)
    )
    check(problem.graph, problem.target, schedule, problem.prices).raise_if_failed()
    return schedule


def modulo_schedule(problem: Problem, bounds: Bounds, clock: Clock) -> Modulo:
    """Phase 1: the smallest interval and then the shortest length, without warp groups."""
    alone = replace(problem, target=replace(problem.target, groups=()), pins={})
    low, high = bounds.minimum, max(bounds.minimum, serial_length(problem.graph))
    found = _first(alone, low, clock.share(0.25))
    bound = low
    if not found.answer.found:
        bound = low + 1 if found.answer.status == "INFEASIBLE" else low
        found = _probe(alone, bound, high, clock)
        if found.interval > bound and not clock.over:
            it = joint_encoding(alone, (bound, found.interval - 1), _stages(alone, bound))
            it.model.minimize(it.interval)
            least = run(it.model, clock.share(0.3), decisions(it), style=TIMES)
            bound = _bound_after(least, bound, found.interval)
            if least.found:
                found = _first(alone, least.value, clock.share(0.3))
    it = found.model or joint_encoding(alone, found.interval, found.stages)
    it.model.minimize(LENGTH.expression(it, problem.prices))
    answer = run(it.model, clock.share(0.15), decisions(it), found.answer.values, TIMES)
    if not answer.found:
        answer = replace(found.answer, value=found.stages * found.interval)
    return Modulo(found.interval, bound, answer.value, answer.bound, answer.seconds)


@dataclass(frozen=True)
class Found:
    """The outcome of looking for any schedule at one interval, fewest stages first.

    `model` is the one that was asked, to go on with; none where time was up before.
    """

    interval: int
    stages: int
    answer: Answer
    model: Encoding | None = None


def _stages(problem: Problem, interval: int) -> int:
    """Most overlapped iterations looked at: what the dependences need and two more."""
    needed = -(-longest_path(problem.graph, interval) // interval)
    return problem.stages or needed + EXTRA_STAGES


def _first(problem: Problem, interval: int, effort: Effort) -> Found:
    """Any schedule at this interval, with as few overlapped iterations as it takes.

    INFEASIBLE only when the largest number of stages is refuted, which includes all smaller.
    """
    most = _stages(problem, interval)
    least = min(most, -(-longest_path(problem.graph, interval) // interval))
    clock = Clock(effort)
    answer = Answer("UNKNOWN", 0, 0, 0.0, {})
    for stages in range(least, most + 1):
        if clock.over:
            break
        it = joint_encoding(problem, interval, stages)
        part = clock.share(1 / (most + 1 - stages))
        answer = run(it.model, part, decisions(it))
        if answer.found:
            return Found(interval, stages, answer, it)
    return Found(interval, most, answer)


@dataclass(frozen=True)
class Start:
    """The settled interval, its proved lower bound, and a schedule to optimise from."""

    interval: int
    bound: int
    stages: int
    values: Mapping[int, int]
    model: Encoding | None


def _settle_interval(problem: Problem, modulo: Modulo, clock: Clock) -> Start:
    """The joint problem's interval: the modulo one if it can be, else the least that is found."""
    found = _first(problem, modulo.interval, clock.share(0.4))
    if found.answer.found:
        values = found.answer.values
        return Start(modulo.interval, modulo.interval_bound, found.stages, values, found.model)
    refuted = found.answer.status == "INFEASIBLE"
    bound = modulo.interval + 1 if refuted else modulo.interval_bound
    high = max(bound, serial_length(problem.graph))
    found = _probe(problem, bound, high, clock)
    if found.interval > bound and not clock.over:
        it = joint_encoding(problem, (bound, found.interval - 1), problem.stages)
        it.model.minimize(it.interval)
        least = run(it.model, clock.share(0.5), decisions(it), style=TIMES)
        bound = _bound_after(least, bound, found.interval)
        if least.found:
            again = _first(problem, least.value, clock.share(0.3))
            found = again if again.answer.found else found
    return Start(found.interval, bound, found.stages, found.answer.values, found.model)


def _bound_after(answer: Answer, low: int, high: int) -> int:
    """The proved lower bound after minimising the interval over [low, high)."""
    if answer.status == "INFEASIBLE":
        return high
    return max(low, answer.bound) if answer.found else low


def _probe(problem: Problem, low: int, serial: int, clock: Clock) -> Found:
    """Some interval that has a schedule: doubling steps up to the serial bound, then bisection.

    Only an upper bound. Feasibility is not monotone in the interval, so what lies between is
    proved or searched by the caller.
    """
    plain = _plain(problem)
    serial = serial if plain is None else plain.initiation_interval
    step = max(1, low // 64)
    failed, found = low - 1, None
    while found is None:
        interval = serial if clock.over else min(serial, failed + step)
        last = interval == serial
        if last:
            here = _serial(problem, serial, plain)
        else:
            here = _first(problem, interval, clock.share(0.1))
        if here.answer.found:
            found = here
        elif last:
            raise CheckFailed(_impossible(problem, serial, here.answer.status))
        else:
            failed, step = interval, 2 * step
    while found.interval - failed > max(1, low // 64) and not clock.over:
        here = _first(problem, (failed + found.interval) // 2, clock.share(0.1))
        if here.answer.found:
            found = here
        else:
            failed = here.interval
    return found


def _plain(problem: Problem) -> Schedule | None:
    """A schedule without search and without overlap, where one is legal."""
    if problem.uniform:
        return None
    return serial_schedule(problem.graph, problem.target, problem.rules, problem.pins)


def _serial(problem: Problem, interval: int, plain: Schedule | None) -> Found:
    """One iteration at a time: `plain` where there is one, else searched.

    The search may take a few seconds beyond the time limit, so that a time-out has something to
    return.
    """
    it = joint_encoding(problem, interval, 1)
    if plain is not None:
        return Found(interval, 1, Answer("SAT", 0, 0, 0.0, serial_values(it, plain)), it)
    effort = replace(problem.effort, seconds=max(GRACE, 0.1 * problem.effort.seconds))
    return Found(interval, 1, run(it.model, effort, decisions(it)), it)


def _impossible(problem: Problem, serial: int, status: str) -> str:
    verdict = (
        "none exists" if status == "INFEASIBLE" else f"none found in {problem.effort.seconds:g} s"
    )
    return (
        f"graph {problem.graph.name}: no schedule on target {problem.target.name} even at the "
        f"serial interval {serial}, where nothing overlaps ({verdict}): its groups, registers or "
        "memory cannot hold it (rules.unroll is "
        f"{problem.rules.unroll}: how many intervals a register value may live)"
    )


def _optimise(
    problem: Problem, it: Encoding, hint: Mapping[int, int], clock: Clock
) -> tuple[tuple[Objective, ...], Mapping[int, int]]:
    """Minimise one objective after the other; each best value is a constraint on the next.

    Values are read from the last answer: a stage cut short may be bettered by a later one.
    """
    objectives: list[Objective] = []
    totals: list[IntVar] = []
    values = hint
    for position, stage in enumerate(problem.objectives):
        if clock.over:
            break
        total = it.model.new_int_var(0, MOST_POINTS, stage.name)
        it.model.add(total == stage.expression(it, problem.prices))
        it.model.minimize(total)
        left = len(problem.objectives) - position
        wanted = [*decisions(it), *totals, total]
        answer = _improve(it, stage.styles, wanted, values, clock, max(0.4, 1 / left))
        it.model.clear_objective()
        if not answer.found:
            break  # time is up: the stages so far stand, this one keeps the schedule it had
        values = answer.values
        totals.append(total)
        it.model.add(total <= answer.value)
        if stage is TRAFFIC and answer.bound >= answer.value:
            fix_backbone(it, values, clock.share)
        spent = round(answer.seconds, 3)
        objectives.append(Objective(stage.name, answer.value, answer.bound, stage.unit, spent))
    final = tuple(
        replace(item, value=values[total.index])
        for item, total in zip(objectives, totals, strict=True)
    )
    return final, values


def _turns(styles: tuple[Style, ...]) -> Iterator[Style]:
    """The styles in turn, for ever; a limited one gets twice the work each time round."""
    for longer in count():
        for style in styles:
            yield replace(style, work=style.work * 2**longer)


def _improve(
    it: Encoding,
    styles: tuple[Style, ...],
    wanted: list[Variable],
    values: Mapping[int, int],
    clock: Clock,
    part: float,
) -> Answer:
    """One objective, by one style of search after the other until its optimum is proved.

    Styles with a limit take turns, twice as long each time round. The best value and the best bound
    may come from different searches.
    """
    limit = Clock(clock.share(part))
    best = Answer("UNKNOWN", 0, 0, 0.0, {})
    for style in _turns(styles):
        answer = run(it.model, limit.share(), wanted, best.values or values, style)
        spent = best.seconds + answer.seconds
        if answer.found and (not best.found or answer.value <= best.value):
            bound = max(answer.bound, best.bound) if best.found else answer.bound
            best = replace(answer, bound=bound)
        elif answer.found:
            best = replace(best, bound=max(answer.bound, best.bound))
        best = replace(best, seconds=spent)
        if (best.found and best.bound >= best.value) or limit.over or not style.work:
            break
    return best


def _prove(problem: Problem, bounds: Bounds, start: Start, seconds: float) -> Proof:
    seconds = round(seconds, 3)
    interval, bound = start.interval, start.bound
    if interval <= bounds.minimum:
        return Proof(bounds.minimum, "analytic", bounds.reason, NAME, seconds, start.stages)
    if bound >= interval:
        reason = (
            f"every interval below {interval} is refuted with up to {problem.stages} stages"
            f"{' among uniform schedules' * problem.uniform}; "
            f"the unit and recurrence bound is {bounds.minimum} ({bounds.reason})"
        )
        return Proof(interval, "infeasible", reason, NAME, seconds, start.stages)
    reason = (
        f"time limit: intervals {bound} to {interval - 1} are undecided, "
        f"gap {(interval - bound) / interval:.1%}"
    )
    return Proof(bound, "unproved", reason, NAME, seconds, start.stages)
