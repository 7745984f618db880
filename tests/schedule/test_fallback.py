"""What a time-out falls back to, and what is fixed between stages: each against another answer."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solutions import problem
from test_property import QUICK, small_graphs, small_target, traffic

from bench.published import GRAPHS, published
from warploom.schedule import Graph, check
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.bounds import lower_bounds, serial_length
from warploom.schedule.model.costs import costs, target
from warploom.schedule.model.rules import OURS
from warploom.schedule.solve.backbone import fix_backbone
from warploom.schedule.solve.fallback import serial_schedule, values_of
from warploom.schedule.solve.objectives import TRAFFIC
from warploom.schedule.solve.solve import Problem, decisions, joint_encoding, solve
from warploom.schedule.solve.solver import Effort, run


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_every_graph_has_a_schedule_without_search(gpu: str) -> None:
    table = costs(gpu)
    for name in GRAPHS:
        graph = published(name, gpu)
        found = serial_schedule(graph, target(table), OURS, {})
        assert found is not None, name
        assert check(graph, target(table), found).passed


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_the_model_agrees_that_it_is_legal(gpu: str) -> None:
    it = problem("attention_backward", gpu)
    plain = serial_schedule(it.graph, it.target, OURS, {})
    assert plain is not None and plain.initiation_interval < serial_length(it.graph)
    model = joint_encoding(it, plain.initiation_interval, 1)
    values = values_of(model, plain)
    for variable in (*model.time.values(), *model.member.values()):
        model.model.add(variable == values[variable.index])
    assert run(model.model, Effort(10), []).found


def test_no_time_at_all_still_gives_a_checked_schedule_with_its_gap() -> None:
    for gpu in ("h100", "b200"):
        it = replace(problem("attention_backward", gpu), effort=Effort(0.05))
        schedule = solve(it)
        assert check(it.graph, it.target, schedule).passed
        if schedule.initiation_interval == lower_bounds(it.graph, it.target).minimum:
            assert schedule.proof.status == "analytic"  # placing alone met the bound
            continue
        assert schedule.proof.status == "unproved" and "gap" in schedule.proof.reason
        assert schedule.proof.lower_bound < schedule.initiation_interval


def best_homes(graph: Graph, groups: int, interval: int) -> list[tuple[str, ...]]:
    """Who runs what in every legal schedule of least traffic, decided by the checker alone."""
    target, names = small_target(groups), [node.id for node in graph.nodes]
    found: list[tuple[int, tuple[str, ...]]] = []
    for times in itertools.product(range(2 * interval), repeat=len(names)):
        for homes in itertools.product([g.name for g in target.groups], repeat=len(names)):
            placed = dict(zip(names, homes, strict=True))
            at = dict(zip(names, times, strict=True))
            schedule = assemble(graph, target, OURS, interval, at, placed)
            if schedule.length <= 2 * interval and check(graph, target, schedule).passed:
                found.append((traffic(graph, placed), homes))
    least = min((points for points, _ in found), default=0)
    return sorted({homes for points, homes in found if points == least})


@given(small_graphs(most=3), st.integers(2, 3))
@QUICK
def test_only_choices_without_an_alternative_are_fixed(graph: Graph, interval: int) -> None:
    homes = best_homes(graph, 2, interval)
    it = joint_encoding(Problem(graph, small_target(2), stages=2), interval, 2)
    total = TRAFFIC.expression(it, Problem(graph, small_target(2)).prices)
    it.model.minimize(total)
    answer = run(it.model, Effort(10), decisions(it))
    assert answer.found == bool(homes)
    if not homes:
        return
    it.model.clear_objective()
    it.model.add(total <= answer.value)
    assert fix_backbone(it, answer.values, lambda _: Effort(10))
    # The groups are interchangeable, so a placing survives if one of its renamings does.
    for placing in homes:
        renamings = [placing, tuple({"compute0": "compute1"}.get(g, "compute0") for g in placing)]
        assert any(_holds(it.model.clone(), it, graph, names) for names in renamings), placing


def _holds(model, it, graph: Graph, placing: tuple[str, ...]) -> bool:
    for node, home in zip(graph.nodes, placing, strict=True):
        for w, group in enumerate(it.target.groups):
            model.add(it.member[node.id, w] == int(group.name == home))
    return run(model, Effort(10), []).found
