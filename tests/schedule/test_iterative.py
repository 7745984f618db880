"""Placing without search: legal, never shorter than what is proved, and there when time is up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_property import QUICK, small_graphs, small_target

from bench.published import GRAPHS, published
from warploom.schedule import Edge, Graph, Node, Unit, UnitUse, check, lower_bounds
from warploom.schedule.model.costs import costs, target
from warploom.schedule.model.rules import OURS, Rules
from warploom.schedule.solve.fallback import serial_schedule
from warploom.schedule.solve.iterative import assignments, attempt, bare, iterative_schedule
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort
from warploom.schedule.solve.subtiles import corresponding


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_every_graph_overlaps_without_search(gpu: str) -> None:
    table = costs(gpu)
    for name in GRAPHS:
        graph = published(name, gpu)
        found = iterative_schedule(graph, target(table), OURS, {})
        plain = serial_schedule(graph, target(table), OURS, {})
        assert found is not None and plain is not None, name
        assert check(graph, target(table), found).passed
        bound = lower_bounds(graph, target(table)).minimum
        assert bound <= found.initiation_interval < 0.8 * plain.initiation_interval


@given(small_graphs(most=4), st.integers(1, 2))
@QUICK
def test_never_below_the_proved_optimum(graph: Graph, groups: int) -> None:
    where = small_target(groups)
    found = iterative_schedule(graph, where, OURS, {})
    if found is None:
        return
    assert check(graph, where, found).passed
    best = solve(Problem(graph, where, effort=Effort(10), objectives=()))
    assert best.proof.lower_bound <= found.initiation_interval
    assert best.initiation_interval <= found.initiation_interval


def test_values_do_not_outlive_their_registers() -> None:
    early = Node("early", "a", (UnitUse("U", 1),), latency=4, issue=1, registers=64)
    late = Node("late", "b", (UnitUse("U", 1),), latency=500, issue=1, asynchronous=True)
    both = Node("both", "c", (UnitUse("U", 1),), latency=4, issue=1)
    edges = (Edge("early", "both", 4), Edge("late", "both", 500))
    graph = Graph("late reader", (early, late, both), edges)
    where = replace(small_target(1), units=(Unit("U"),), registers_per_thread=255)
    group = next(assignments(graph, where, {}))
    loose = attempt(graph, where, Rules(unroll=0), group, False, 100)
    assert loose is not None and loose.time["both"] - loose.time["early"] > 100
    tight = attempt(graph, where, OURS, group, False, 100)
    assert tight is not None and tight.time["both"] - tight.time["early"] <= 100


def test_sub_tiles_move_together_where_asked() -> None:
    table = costs("h200")
    graph, where = published("attention", "h200"), target(table)
    found = iterative_schedule(graph, where, OURS, {}, uniform=True)
    assert found is not None
    for first, second in corresponding(graph):
        shift = found.time[second] - found.time[first]
        assert shift == found.initiation_interval // 2


def test_without_groups_only_units_and_dependences_count() -> None:
    table = costs("h200")
    graph = published("attention", "h200")
    alone = iterative_schedule(graph, replace(target(table), groups=()), OURS, {})
    joint = iterative_schedule(graph, target(table), OURS, {})
    assert alone is not None and joint is not None
    assert alone.initiation_interval <= joint.initiation_interval
    assert not any(node.registers or node.issue for node in bare(graph).nodes)


def test_no_time_for_a_model_gives_a_checked_schedule_with_overlap() -> None:
    table = costs("h200")
    graph, where = published("attention", "h200"), target(table)
    schedule = solve(Problem(graph, where, effort=Effort(0.01)))
    plain = serial_schedule(graph, where, OURS, {})
    assert plain is not None and check(graph, where, schedule).passed
    assert schedule.initiation_interval < plain.initiation_interval
    assert schedule.proof.status == "unproved" and not schedule.objectives
