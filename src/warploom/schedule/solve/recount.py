"""Objective values of a finished schedule, counted on the schedule itself."""

from __future__ import annotations

from dataclasses import replace

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.solve.objectives import (
    BUSIEST,
    LENGTH,
    REGISTER_TIME,
    hold_cycles,
    register_weight,
)
from warploom.schedule.solve.readout import death


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
