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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from warploom.errors import CheckFailed
from warploom.schedule.check.checker import check
from warploom.schedule.model.bounds import Bounds, longest_path, lower_bounds, serial_length
from warploom.schedule.model.schedule import Objective, Proof, Schedule
from warploom.schedule.refute.refute import confirmed, refute
from warploom.schedule.solve.backbone import fix_backbone
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.fallback import serial_schedule, values_of
from warploom.schedule.solve.iterative import iterative_schedule
from warploom.schedule.solve.objectives import LENGTH, TRAFFIC
from warploom.schedule.solve.problem import Clock, Problem, decisions, joint_encoding
from warploom.schedule.solve.readout import read_schedule, recount
from warploom.schedule.solve.solver import Answer, Effort, IntVar, Style, Variable, run, solver_name

EXTRA_STAGES = 2
GRACE = 10.0
OPEN = 0.6  # of the time left: what an interval that is not settled may take from the objectives
SMALL = 64  # operations: of more, the second search finds nothing in its time
SECOND = 0.15  # of the time left: what the second search may take to shorten an open interval
PLACING = 0.3  # of the time left: what placing without search may take
MOST_POINTS = 1 << 40
TIMES = Style(2)  # how sums of times are minimised before there are groups


@dataclass(frozen=True)
class Modulo:
    """The answer without warp groups: interval, length, and how they are proved.

    `stages`: most overlapped iterations for which the intervals below the bound were refuted; 0:
    any number. `seconds` of the processor until the interval was settled.
    """

    interval: int
    interval_bound: int
    stages: int
    length: int
    length_bound: int
    seconds: float


def solve(problem: Problem, say: Callable[[str], None] = lambda _: None) -> Schedule:
    """The optimal schedule under the problem's rules, or the best found marked unproved.

    `say` hears which step begins. Raises `CheckFailed` when no schedule exists even with nothing
    overlapped.
    """
    clock = Clock(problem.effort, say=say)
    clock.say("units and dependences alone")
    bounds = lower_bounds(problem.graph, problem.target)
    modulo = modulo_schedule(problem, bounds, clock)
    asked = problem.stages
    if not problem.stages:
        most = -(-modulo.length // modulo.interval) + 1
        problem = replace(problem, stages=most)
    clock.say(f"warp groups, from II {modulo.interval} up")
    start = _settle_interval(problem, modulo, clock, asked)
    if start.bound < start.interval:
        clock.say(f"II {start.interval} found, intervals from {start.bound} up are open")
    start = _bettered(problem, start, clock)
    settled = clock.spent
    it = start.model
    if it is None:
        assert start.placed is not None
        proof = _prove(problem, bounds, start, settled, ())
        return replace(start.placed, rules=problem.rules, proof=_added_again(problem, proof))
    if it.length is not None and start.interval == modulo.interval:
        it.model.add(it.length >= modulo.length_bound)  # groups only make it longer
    objectives, values = _optimise(problem, it, start.values, clock)
    proof = _prove(problem, bounds, start, settled, objectives)
    schedule = recount(
        problem.graph, problem.rules, read_schedule(it, values, start.interval, objectives, proof)
    )
    check(problem.graph, problem.target, schedule, problem.prices).raise_if_failed()
    return replace(schedule, proof=_added_again(problem, proof))


def _added_again(problem: Problem, proof: Proof) -> Proof:
    """An analytic bound is confirmed at once: that needs no search, only sums and longest paths."""
    return confirmed(problem, proof, 0.0) if proof.status == "analytic" else proof


def modulo_schedule(problem: Problem, bounds: Bounds, clock: Clock) -> Modulo:
    """Phase 1: the smallest interval and then the shortest length, without warp groups."""
    alone = replace(problem, target=replace(problem.target, groups=()), pins={})
    begin, low = time.process_time(), bounds.minimum
    found = _first(alone, low, clock.share(0.2))
    bound, most = low, _stages(alone, low)
    if not found.answer.found:
        bound = low + 1 if found.answer.status == "INFEASIBLE" else low
        placed = _placed(alone, bound, clock, alone.stages)
        found = _given(placed, bound, most)
        high = placed.initiation_interval
        least, bound = _minimised(alone, bound, high, most, 0.2, clock)
        if least.found:
            again = _first(alone, least.value, clock.share(0.2))
            found = again if again.answer.found else found
        if found.placed is not None:
            length, path = placed.length, longest_path(problem.graph, found.interval)
            seconds = time.process_time() - begin
            allowed = most if bound > low else 0
            return Modulo(found.interval, bound, allowed, length, min(length, path), seconds)
    seconds = time.process_time() - begin
    it = found.model or joint_encoding(alone, found.interval, found.stages)
    it.model.minimize(LENGTH.expression(it, problem.prices))
    answer = run(it.model, clock.share(0.15), decisions(it), found.answer.values, TIMES)
    if not answer.found:
        answer = replace(found.answer, value=found.stages * found.interval)
    allowed = most if bound > low else 0
    return Modulo(found.interval, bound, allowed, answer.value, answer.bound, seconds)


@dataclass(frozen=True)
class Found:
    """The outcome of looking for any schedule at one interval, fewest stages first.

    `model` is the one that was asked, to go on with; none where time was up before. `placed` is a
    schedule that came without a model.
    """

    interval: int
    stages: int
    answer: Answer
    model: Encoding | None = None
    placed: Schedule | None = None


def _given(schedule: Schedule, refuted: int, most: int) -> Found:
    """A schedule that was placed, as the outcome of looking for one.

    Raises `CheckFailed` where the checker passed it below `refuted` with at most `most` stages:
    the intervals below were refuted, so the model refutes too much.
    """
    interval, stages = schedule.initiation_interval, schedule.stages
    if interval < refuted and stages <= most:
        raise CheckFailed(
            f"graph {schedule.graph}: the solver's model refutes every interval below {refuted} "
            f"with up to {most} stages, the checker passes a schedule of {interval} with {stages}"
        )
    return Found(interval, stages, Answer("SAT", 0, 0, 0.0, {}), None, schedule)


def _stages(problem: Problem, interval: int) -> int:
    """Most overlapped iterations looked at: what the dependences need and two more."""
    needed = -(-longest_path(problem.graph, interval) // interval)
    return problem.stages or needed + EXTRA_STAGES


def _first(problem: Problem, interval: int, effort: Effort) -> Found:
    """Any schedule at this interval, with as few overlapped iterations as it takes.

    INFEASIBLE only when the largest number of stages is refuted, which includes all smaller: that
    fewer were refuted before time was up says nothing of the interval.
    """
    most = _stages(problem, interval)
    least = min(most, -(-longest_path(problem.graph, interval) // interval))
    clock = Clock(effort)
    unknown = answer = Answer("UNKNOWN", 0, 0, 0.0, {})
    for stages in range(least, most + 1):
        if not clock.affords(problem):
            return Found(interval, most, unknown)
        it = clock.building(problem, partial(joint_encoding, problem, interval, stages))
        part = clock.share(1 / (most + 1 - stages))
        answer = run(it.model, part, decisions(it))
        if answer.found:
            return Found(interval, stages, answer, it)
    return Found(interval, most, answer)


@dataclass(frozen=True)
class Start:
    """The settled interval, its proved lower bound, and a schedule to optimise from.

    `refuted` are the stages that the refutations below the bound allowed (0: any number), `stages`
    those of the model. Where time did not suffice for one, `placed` is the schedule.
    """

    interval: int
    bound: int
    refuted: int
    stages: int
    values: Mapping[int, int]
    model: Encoding | None
    placed: Schedule | None = None


def _settle_interval(problem: Problem, modulo: Modulo, clock: Clock, asked: int = 0) -> Start:
    """The joint problem's interval: the modulo one if it can be, else the least that is found.

    `asked` are the most stages that a person allows, 0: any number.
    """
    found = _first(problem, modulo.interval, clock.share(0.4))
    if found.answer.found:
        values, model = found.answer.values, found.model
        low = modulo.interval_bound
        return Start(modulo.interval, low, modulo.stages, found.stages, values, model)
    bound = modulo.interval_bound
    if found.answer.status == "INFEASIBLE" and bound == modulo.interval:
        bound += 1  # else intervals between the modulo bound and its interval are undecided
    refuted = min(modulo.stages or problem.stages, problem.stages)
    placed = _placed(problem, bound, clock, asked)
    _given(placed, bound, refuted)
    interval, stages = placed.initiation_interval, placed.stages
    # Where minimising settles it, it does so soon; else a shorter range is easier.
    least, bound = _minimised(problem, bound, interval, problem.stages, 0.2, clock)
    probed: Found | None = None
    if least.status != "OPTIMAL":
        best = min(interval, least.value) if least.found else interval
        probed = _probe(problem, bound, best, clock)
        high = probed.interval if probed else best
        again, bound = _minimised(problem, bound, high, problem.stages, 0.5, clock)
        least = again if again.found or probed else least
    if least.found:
        again = _first(problem, least.value, clock.share(0.3))
        probed = again if again.answer.found else probed
    if probed is not None:
        it, values = probed.model, probed.answer.values
        return Start(probed.interval, bound, refuted, probed.stages, values, it)
    if not clock.affords(problem):
        return Start(interval, bound, refuted, stages, {}, None, placed)
    it = clock.building(problem, lambda: joint_encoding(problem, interval, stages))
    return Start(interval, bound, refuted, stages, values_of(it, placed), it, placed)


def _bettered(problem: Problem, start: Start, clock: Clock) -> Start:
    """An open interval is searched again, longer each time, while the limit leaves time for it.

    A share of the limit that was too short for one search is no reason to stop: on a machine with
    other work that is what most of them are.
    """
    if start.bound < start.interval:
        start = _searched(problem, start, clock)
    left = clock.share(OPEN if problem.objectives else 1.0)
    limit = Clock(left, built=clock.built)
    while start.bound < start.interval and limit.affords(problem):
        found = _first(problem, start.bound, limit.share(0.5))
        if found.answer.found:
            values, model = found.answer.values, found.model
            return Start(start.bound, start.bound, start.refuted, found.stages, values, model)
        if found.answer.status == "INFEASIBLE":
            start = replace(start, bound=start.bound + 1)
        low, high, stages = start.bound, start.interval, problem.stages
        least, bound = _minimised(problem, low, high, stages, 0.5, limit)
        start = replace(start, bound=bound)
        if least.found:
            again = _first(problem, least.value, limit.share(0.5))
            if again.answer.found:
                values, model = again.answer.values, again.model
                start = Start(least.value, bound, start.refuted, again.stages, values, model)
    return start


def _searched(problem: Problem, start: Start, clock: Clock) -> Start:
    """A shorter interval that the second search finds: a schedule, never a bound.

    It is the faster of the two where most groups are pinned.
    """
    if len(problem.graph.nodes) > SMALL:
        return start
    limit, found = Clock(clock.share(SECOND)), None
    best = start.interval
    while best > start.bound and not limit.over:
        left = limit.share().seconds
        better = refute(problem, start.bound, best - 1, problem.stages, left).schedule
        if better is None:
            break
        best, found = better.initiation_interval, better
    if found is None or not clock.affords(problem):
        return start
    build = partial(joint_encoding, problem, best, found.stages)
    it = clock.building(problem, build)
    values = values_of(it, found)
    return Start(best, start.bound, start.refuted, found.stages, values, it, found)


def _bound_after(answer: Answer, low: int, high: int) -> int:
    """The proved lower bound after minimising the interval over [low, high)."""
    if answer.status == "INFEASIBLE":
        return high
    return max(low, answer.bound) if answer.found else low


def _placed(problem: Problem, least: int, clock: Clock, most: int) -> Schedule:
    """A schedule without search: operations placed one by one, or else one after the other.

    Of at most `most` stages, where that is not 0.
    An upper bound of the interval and, when time is up, the answer. Where neither is legal the
    serial interval is searched, which may take a few seconds beyond the time limit, so that a
    time-out has something to return.
    """
    limit = Clock(clock.share(PLACING))
    graph, target, rules, pins = problem.graph, problem.target, problem.rules, problem.pins
    found = iterative_schedule(
        graph, target, rules, pins, problem.uniform, least, lambda: limit.over
    )
    if found is not None and most and found.stages > most:
        found = None
    if found is None and not problem.uniform:
        found = serial_schedule(graph, target, rules, pins)
    if found is not None and not (most and found.stages > most):
        return found
    interval = max(least, serial_length(graph))
    it = joint_encoding(problem, interval, 1)
    effort = replace(problem.effort, seconds=max(GRACE, 0.1 * problem.effort.seconds))
    answer = run(it.model, effort, decisions(it))
    if not answer.found:
        raise CheckFailed(_impossible(problem, interval, answer.status))
    unproved = Proof(0, "written", "searched at the serial interval")
    return read_schedule(it, answer.values, interval, (), unproved)


def _probe(problem: Problem, low: int, high: int, clock: Clock) -> Found | None:
    """Some interval in [low, high) that has a schedule: doubling steps, then bisection.

    Only an upper bound. Feasibility is not monotone in the interval, so what lies between is
    proved or searched by the caller.
    """
    fine = max(1, low // 64)
    step, failed, found = fine, low - 1, None
    while found is None and failed + step < high and clock.affords(problem):
        here = _first(problem, failed + step, clock.share(0.1))
        found = here if here.answer.found else None
        if found is None:
            failed, step = failed + step, 2 * step
    while found is not None and found.interval - failed > fine and clock.affords(problem):
        here = _first(problem, (failed + found.interval) // 2, clock.share(0.1))
        found = here if here.answer.found else found
        failed = failed if here.answer.found else here.interval
    return found


def _minimised(
    problem: Problem, low: int, high: int, stages: int, part: float, clock: Clock
) -> tuple[Answer, int]:
    """The least interval in [low, high), if time allows; and the proved lower bound."""
    if high <= low or not clock.affords(problem):
        return Answer("UNKNOWN", 0, 0, 0.0, {}), low
    build = partial(joint_encoding, problem, (low, high - 1), stages)
    it = clock.building(problem, build)
    it.model.minimize(it.interval)
    least = run(it.model, clock.share(part), decisions(it), style=TIMES)
    return least, _bound_after(least, low, high)


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
        clock.say(f"{stage.name}, {position + 1} of {len(problem.objectives)} objectives")
        answer = _improve(it, stage.styles, wanted, values, clock, max(0.4, 1 / left))
        it.model.clear_objective()
        if answer.status == "INFEASIBLE":
            raise CheckFailed(
                f"graph {it.graph.name}: the solver's model refutes the schedule it has found "
                f"while it minimises {stage.name}"
            )
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


def _prove(
    problem: Problem,
    bounds: Bounds,
    start: Start,
    seconds: float,
    objectives: tuple[Objective, ...],
) -> Proof:
    unreached = tuple(stage.name for stage in problem.objectives[len(objectives) :])
    interval, bound = start.interval, start.bound

    def proof(lower: int, status: str, reason: str, stages: int) -> Proof:
        spent, model = round(seconds, 3), start.stages if objectives else 0
        return Proof(lower, status, reason, solver_name(), spent, stages, model, unreached)

    if interval <= bounds.minimum:
        return proof(bounds.minimum, "analytic", bounds.reason, 0)
    if bound >= interval:
        reason = (
            f"every interval below {interval} is refuted with up to {start.refuted} stages"
            f"{' among uniform schedules' * problem.uniform}; "
            f"the unit and recurrence bound is {bounds.minimum} ({bounds.reason})"
        )
        return proof(interval, "infeasible", reason, start.refuted)
    reason = (
        f"time limit: intervals {bound} to {interval - 1} are undecided, "
        f"gap {(interval - bound) / interval:.1%}"
    )
    return proof(bound, "unproved", reason, start.refuted if bound > bounds.minimum else 0)
