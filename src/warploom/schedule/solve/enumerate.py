"""More than one optimal schedule: the k first programs that no objective tells apart.

Two schedules are the same program when every operation has the same group and stage and every two
operations of one group issue in the same order. Times alone do not make a program: on the machine
only order survives.
"""

from __future__ import annotations

from itertools import combinations

from warploom.schedule.check.checker import check
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.readout import read_schedule, recount
from warploom.schedule.solve.solve import Problem, decisions, joint_encoding
from warploom.schedule.solve.solver import BoolVar, only_if, run


def top_schedules(problem: Problem, best: Schedule, count: int) -> list[Schedule]:
    """Up to `count` distinct programs, `best` first, all with its interval and objective values.

    Fewer than `count` when there are no more, or when the time limit of one solve is reached.
    Requires objectives of `best` to be those of `problem`, in the same order.
    """
    it = joint_encoding(
        problem, best.initiation_interval, best.proof.objective_stages or best.stages
    )
    for stage, objective in zip(problem.objectives, best.objectives, strict=False):
        it.model.add(stage.expression(it, problem.prices) <= objective.value)
    # Whole iterations of delay are not another program: the earliest issue is in iteration 0.
    first = it.model.new_int_var(0, it.longest - 1, "earliest")
    it.model.add_min_equality(first, list(it.time.values()))
    found = [best]
    _forbid(it, best)
    while len(found) < count:
        answer = run(it.model, problem.effort, decisions(it))
        if not answer.found:
            break
        schedule = read_schedule(
            it, answer.values, best.initiation_interval, best.objectives, best.proof
        )
        schedule = recount(problem.graph, problem.rules, schedule)
        check(problem.graph, problem.target, schedule, problem.prices).raise_if_failed()
        found.append(schedule)
        _forbid(it, schedule)
    return found


def _forbid(it: Encoding, schedule: Schedule) -> None:
    """Ask for another group, stage or order within a group than this schedule's.

    The model's times are the schedule's, shifted so that the anchor's phase is 0 and the earliest
    issue still lies in [0, II).
    """
    interval = schedule.initiation_interval
    names = [group.name for group in it.target.groups]
    shift = -schedule.time[it.anchor] % interval
    time = {name: schedule.time[name] + shift for name in it.time}
    change: list[BoolVar] = []
    for name, moment in time.items():
        change.append(it.member[name, names.index(schedule.group[name])].negated())
        earlier = it.model.new_bool_var(f"{name} in an earlier stage")
        later = it.model.new_bool_var(f"{name} in a later stage")
        begin = moment // interval * interval
        only_if(it.model.add(it.time[name] < begin), earlier)
        only_if(it.model.add(it.time[name] >= begin + interval), later)
        change += [earlier, later]
    for first, second in combinations(time, 2):
        if schedule.group[first] != schedule.group[second]:
            continue
        literal = it.phase_before(first, second)
        phases = [(time[name] % interval, it.rank[name]) for name in (first, second)]
        change.append(literal.negated() if phases[0] < phases[1] else literal)
    it.model.add_bool_or(change)
