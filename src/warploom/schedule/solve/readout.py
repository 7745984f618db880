"""From the values of a model's variables to a Schedule with the objectives it really has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.schedule.model.assemble import assemble, death
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Objective, Proof, Schedule
from warploom.schedule.solve.encoding import Encoding, times_of
from warploom.schedule.solve.objectives import (
    BUSIEST,
    LENGTH,
    REGISTER_TIME,
    hold_cycles,
    register_weight,
)


def read_schedule(
    it: Encoding,
    values: Mapping[int, int],
    interval: int,
    objectives: tuple[Objective, ...],
    proof: Proof,
) -> Schedule:
    """The schedule that the values of `decisions(it)` describe."""
    names = [group.name for group in it.target.groups]
    group = {node: names[w] for (node, w), literal in it.member.items() if values[literal.index]}
    times = times_of(it, {name: values[variable.index] for name, variable in it.time.items()})
    depths = {name: values[variable.index] for name, variable in it.depth.items()}
    made = assemble(it.graph, it.target, it.rules, interval, times, group, depths)
    return replace(made, objectives=objectives, proof=proof)


def recount(graph: Graph, rules: Rules, schedule: Schedule) -> Schedule:
    """Objective values as the schedule has them, where a model's sums may have left slack."""
    interval = schedule.initiation_interval
    lives = {
        n.id: death(graph, rules, interval, schedule.time, n.id) - schedule.time[n.id]
        for n in graph.nodes
    }
    held = {
        g.name: sum(hold_cycles(n) for n in graph.nodes if schedule.group[n.id] == g.name)
        for g in schedule.groups
    }
    actual = {
        REGISTER_TIME.name: sum(register_weight(n) * lives[n.id] for n in graph.nodes),
        BUSIEST.name: max(held.values(), default=0),
        LENGTH.name: schedule.length,
    }
    objectives = tuple(
        replace(item, value=actual.get(item.name, item.value)) for item in schedule.objectives
    )
    return replace(schedule, objectives=objectives)
