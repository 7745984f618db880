"""Planted faults: the checker and the simulator each catch what they are there for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from fixtures import graph_b, target_b, witness
from solutions import problem, solved

from warploom.errors import CheckFailed
from warploom.schedule import Edge, Graph, Group, Node, Objective, Prices, Schedule, UnitUse, check
from warploom.schedule.check.simulate import simulate, verify
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.rules import OURS, PAPER
from warploom.schedule.model.target import Unit


def broken(schedule: Schedule, graph: Graph | None = None) -> set[str]:
    report = check(graph or graph_b(), target_b(), schedule, Prices())
    return {finding.rule for finding in report.findings}


def moved(schedule: Schedule, **times: int) -> Schedule:
    return replace(schedule, time={**schedule.time, **times})


GOOD = witness("Wa")
FAULTS = {
    "dependence": moved(GOOD, M0=GOOD.time["M0"] - 2),
    "unit": moved(GOOD, O0=GOOD.time["O0"] + 1),
    "times": moved(GOOD, K=-1),
    "length": replace(GOOD, length=GOOD.length - 1),
    "hand-off": replace(GOOD, group={**GOOD.group, "C0": "compute1"}),
    "variable latency": replace(GOOD, group={**GOOD.group, "K": "compute0"}),
    "blocking wait": replace(GOOD, rules=replace(PAPER, window="literal")),
    "ring": replace(GOOD, ring_depth={"K": 1, "V": 1}),
    "memory": replace(GOOD, ring_depth={"K": 1, "V": 7}),
    "carried": replace(
        GOOD, group={**GOOD.group, "X0": "compute1"}, rules=replace(PAPER, carried_in_group=True)
    ),
    "unroll": replace(GOOD, rules=replace(PAPER, unroll=1), time={**GOOD.time, "C0": -400}),
    "nodes": replace(GOOD, time={**GOOD.time, "Q": 0}, group={**GOOD.group, "Q": "load"}),
    "groups": replace(GOOD, groups=(*GOOD.groups, Group("extra", 4, 24))),
    "objective": replace(GOOD, objectives=(Objective("traffic", 1, 1, "points"),)),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_the_checker_catches_each_fault(rule: str) -> None:
    assert not broken(GOOD)
    assert rule in broken(FAULTS[rule])


def test_the_checker_counts_registers_and_setmaxnreg() -> None:
    all_in_one = {
        node: "compute0" if group != "load" else group for node, group in GOOD.group.items()
    }
    assert "registers" in broken(replace(GOOD, group=all_in_one))
    target = replace(target_b(), register_pool=65536)
    fat = replace(GOOD, groups=tuple(replace(g, registers=248) for g in GOOD.groups))
    rules = {f.rule for f in check(graph_b(), target, replace(fat)).findings}
    assert not rules - {"setmaxnreg"}
    thin = replace(GOOD, groups=tuple(replace(g, registers=24) for g in GOOD.groups))
    assert check(graph_b(), target, thin).broken("setmaxnreg")


def test_the_checker_sees_two_issues_at_once() -> None:
    nodes = (Node("a", "a", issue=4), Node("b", "b", issue=4))
    graph = Graph("two", nodes, ())
    groups = {"a": "compute0", "b": "compute0"}
    good = assemble(graph, target_b(), OURS, 20, {"a": 0, "b": 4}, groups)
    assert not broken(good, graph)
    assert broken(moved(good, b=3), graph) == {"issue", "length"}


def test_a_value_that_is_there_in_time_but_for_the_way_to_another_group_is_a_late_hand_off() -> (
    None
):
    nodes = (Node("a", "a", latency=4), Node("b", "b", latency=1))
    graph = Graph("pair", nodes, (Edge("a", "b", 4, spill_cost=2),))
    apart = {"a": "compute0", "b": "compute1"}
    found = {
        at: broken(assemble(graph, target_b(), OURS, 20, {"a": 0, "b": at}, apart), graph)
        for at in range(3, 7)
    }
    assert found == {3: {"dependence"}, 4: {"hand-off"}, 5: {"hand-off"}, 6: set()}


def test_the_last_slots_wait_for_no_reader_of_a_pass_that_is_not_there() -> None:
    """What a pass leaves is read two passes later, by an operation that comes first in its pass,
    so that one slot is enough; the last two passes' values nobody reads."""
    nodes = (Node("fill", "fill", latency=4), Node("read", "read"))
    graph = Graph("late", nodes, (Edge("fill", "read", 4, distance=2, kind="ring"),))
    where = {"fill": "compute0", "read": "compute0"}
    schedule = assemble(graph, target_b(), OURS, 10, {"fill": 20, "read": 4}, where)
    assert schedule.ring_depth == {"fill": 1} and not broken(schedule, graph)
    run = simulate(graph, target_b(), schedule, 8)
    assert run.clean and len(run.issues) == 16


def test_a_failed_check_names_the_rule_and_the_numbers() -> None:
    with pytest.raises(CheckFailed, match=r"ring: V is filled again after 2048 cycles"):
        check(graph_b(), target_b(), FAULTS["ring"]).raise_if_failed()


def test_the_simulator_holds_the_interval_and_survives_random_latencies() -> None:
    for name, gpu in (("attention", "h100"), ("attention", "b200"), ("gemm", "h100")):
        it, schedule = problem(name, gpu), solved(name, gpu)
        rates = verify(it.graph, it.target, schedule)
        assert rates.ordered == pytest.approx(schedule.initiation_interval, abs=0.5)


def test_the_simulator_sees_a_deadlock() -> None:
    # Both groups wait for the other's second operation: legal data, impossible order.
    nodes = tuple(Node(n, n, latency=1) for n in "abcd")
    graph = Graph("knot", nodes, (Edge("b", "c", 1), Edge("d", "a", 1)))
    groups = {"a": "compute0", "b": "compute0", "c": "compute1", "d": "compute1"}
    knot = assemble(graph, target_b(), OURS, 10, {"a": 0, "b": 1, "c": 0, "d": 1}, groups)
    run = simulate(graph, target_b(), knot)
    assert set(run.deadlock) == {"a[0]", "c[0]"}
    with pytest.raises(CheckFailed, match="deadlock"):
        run.raise_if_failed()


def test_the_simulator_sees_a_ring_too_shallow_for_the_promised_rate() -> None:
    it, schedule = problem("attention", "h100"), solved("attention", "h100")
    shallow = replace(schedule, ring_depth=dict.fromkeys(schedule.ring_depth, 1))
    with pytest.raises(CheckFailed, match="cycles an iteration"):
        verify(it.graph, it.target, shallow)


def test_the_simulator_sees_an_overwritten_buffer() -> None:
    """Two values share one buffer and nothing but the clock kept them apart."""
    load = Node("L", "load", (UnitUse("TMA", 1),), 10, 1, 0, {}, 1, True, True, (1, 500))
    keep = Node("A", "keep", latency=1, memory={"smem": 200000})
    other = Node("B", "other", latency=1, memory={"smem": 200000})
    read = Node("R", "read", latency=1)
    last = Node("T", "last", latency=1)
    edges = (Edge("A", "R", 1), Edge("L", "R", 10), Edge("B", "T", 1))
    graph = Graph("clocked", (load, keep, other, read, last), edges)
    groups = {"L": "load", "A": "compute0", "R": "compute0", "B": "compute1", "T": "compute1"}
    times = {"L": 0, "A": 0, "R": 10, "B": 20, "T": 21}
    schedule = assemble(graph, target_b(), OURS, 40, times, groups)
    assert check(graph, target_b(), schedule).passed
    run = simulate(graph, target_b(), schedule)
    assert any("smem holds 400000" in hazard for hazard in run.hazards)
    with pytest.raises(CheckFailed, match=r"overwritten while alive: .*smem holds 400000"):
        run.raise_if_failed()


def test_the_simulator_judges_slots_by_when_things_were_issued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: fills wait for no release, so a slot is filled under its readers."""
    assert simulate(graph_b(), target_b(), GOOD).clean
    monkeypatch.setattr(sys.modules[simulate.__module__], "_slot_free", lambda *_: 0)
    hazards = simulate(graph_b(), target_b(), replace(GOOD, ring_depth={"K": 1, "V": 1})).hazards
    assert any("of K refilled under" in hazard for hazard in hazards), hazards


def test_the_simulator_takes_time_for_a_hand_over() -> None:
    edges = (Edge("a", "b", 5, spill_cost=7),)
    graph = Graph("pair", (Node("a", "a", latency=5), Node("b", "b", latency=1)), edges)
    for home, gap in (("compute0", 5), ("compute1", 12)):
        groups = {"a": "compute0", "b": home}
        schedule = assemble(graph, target_b(), OURS, 20, {"a": 0, "b": 12}, groups)
        issues = simulate(graph, target_b(), schedule).issues
        assert (issues["a", 0], issues["b", 0]) == (0, gap), "nothing waits for what is free"


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_of_a_slot_waits_for_its_load_and_no_other_is_faster_or_slower(seed: int) -> None:
    """How long a load takes is drawn; what only follows it in order keeps its distance."""
    load = Node("L", "load", (UnitUse("TMA", 1),), 10, 1, 0, {}, 1, True, True, (1, 500))
    read, after = Node("R", "read", latency=1), Node("A", "after", latency=1)
    edges = (Edge("L", "R", 10, kind="ring"), Edge("L", "A", 3, kind="order"))
    graph = Graph("drawn", (load, read, after), edges)
    groups = {"L": "load", "R": "compute0", "A": "compute1"}
    schedule = assemble(graph, target_b(), OURS, 600, {"L": 0, "R": 10, "A": 3}, groups)
    schedule = replace(schedule, ring_depth={"L": 1})  # each load finds its reader waiting
    issues = simulate(graph, target_b(), schedule, seed=seed).issues
    gaps = [issues["R", i] - issues["L", i] for i in range(40)]
    assert 1 <= min(gaps) < 100 and 400 < max(gaps) <= 500
    assert {issues["A", i] - issues["L", i] for i in range(40)} == {3}


def test_the_simulated_rate_is_no_less_than_the_work_of_a_rate_unit() -> None:
    target = replace(target_b(), units=(*target_b().units, Unit("fluid", 2, rate=True)))
    node = Node("a", "a", (UnitUse("fluid", 21, amount=2),), latency=1)
    graph = Graph("fluid", (node,), ())
    for interval in (20, 21):
        schedule = assemble(graph, target, OURS, interval, {"a": 0}, {"a": "compute0"})
        assert simulate(graph, target, schedule).rate == 21
    with pytest.raises(CheckFailed, match=r"takes 21\.0 cycles .* promises 20"):
        verify(graph, target, replace(schedule, initiation_interval=20))


def test_a_slow_steady_state_is_refused() -> None:
    hasty = replace(GOOD, initiation_interval=2000)
    with pytest.raises(CheckFailed, match="promises 2000"):
        verify(graph_b(), target_b(), hasty)


def test_a_slot_is_released_when_its_copy_to_another_group_is_done() -> None:
    """Filled at 0, read from 10 on for 10 cycles: a slot, and a second one for a copy after it."""
    load, read = (
        Node("L", "load", latency=10, min_warps=1, variable_latency=True),
        Node("R", "r", latency=10),
    )
    depths = {}
    for cost in (0, 1):
        edge = Edge("L", "R", 10 - cost, kind="ring", spill_cost=cost)
        graph = Graph("pair", (load, read), (edge,))
        groups = {"L": "load", "R": "compute0"}
        schedule = assemble(graph, target_b(), OURS, 20, {"L": 0, "R": 10}, groups)
        depths[cost] = [
            depth
            for depth in (1, 2)
            if not broken(replace(schedule, ring_depth={"L": depth}), graph)
        ]
    assert depths == {0: [1, 2], 1: [2]}


def test_a_wait_for_another_group_stalls_what_runs_beside_it() -> None:
    a, b, c = (
        Node(name, name, latency=latency) for name, latency in (("a", 1), ("b", 1), ("c", 8))
    )
    graph = Graph("wait", (a, b, c), (Edge("a", "b", 1),))
    for home, rules in (("compute1", {"blocking wait"}), ("compute0", set())):
        groups = {"a": home, "b": "compute0", "c": "compute0"}
        schedule = assemble(graph, target_b(), OURS, 20, {"a": 0, "b": 4, "c": 0}, groups)
        assert broken(schedule, graph) == rules, home


def test_a_rate_unit_does_no_more_than_an_intervals_work() -> None:
    target = replace(target_b(), units=(*target_b().units, Unit("fluid", 2, rate=True)))
    for cycles, right in ((20, True), (21, False)):
        node = Node("a", "a", (UnitUse("fluid", cycles, amount=2),), latency=1)
        graph = Graph("fluid", (node,), ())
        schedule = assemble(graph, target, OURS, 20, {"a": 0}, {"a": "compute0"})
        assert check(graph, target, schedule).passed == right, cycles


def test_an_operation_sits_in_a_group_that_has_its_warps() -> None:
    node = Node("a", "a", latency=1, min_warps=8)
    graph = Graph("wide", (node,), ())
    schedule = assemble(graph, target_b(), OURS, 20, {"a": 0}, {"a": "compute0"})
    assert broken(schedule, graph) == {"warps"}


def test_a_bound_is_never_over_the_value() -> None:
    for bound, right in ((GOOD.length, True), (GOOD.length + 1, False)):
        claim = Objective("length", GOOD.length, bound, "cycles")
        assert (not broken(replace(GOOD, objectives=(claim,)))) == right


def test_setmaxnreg_gives_what_was_launched_in_steps_of_eight() -> None:
    """65,536 registers, three warp groups of 128 threads: 168 a thread each, 24 for the loads."""
    target = replace(target_b(), register_pool=65536)
    most = (3 * 168 - 24) // 2 // 8 * 8
    for registers, right in ((most, True), (most - 4, False), (most + 8, False)):
        groups = tuple(replace(g, registers=registers) if g.warps == 4 else g for g in GOOD.groups)
        report = check(graph_b(), target, replace(GOOD, groups=groups))
        assert (not report.broken("setmaxnreg")) == right, (registers, report.findings)
