"""What a scheduler of this kind must show: bounds, optima, proofs and refutations, A1 to A10."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fixtures import graph_a, graph_b, target_a, target_b, witness

import warploom.schedule.solve.solve as solve_module
from bench.explain import explain
from warploom.errors import CheckFailed, InputError
from warploom.schedule import Edge, Graph, Node, UnitUse, check, lower_bounds, verify
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.rules import CROSSING_PRICES, PAPER, Rules
from warploom.schedule.solve.encoding_exclusive import exclusive, standing
from warploom.schedule.solve.objectives import LENGTH, TRAFFIC
from warploom.schedule.solve.solve import Clock, Problem, joint_encoding, modulo_schedule, solve
from warploom.schedule.solve.solver import Effort, Style, run


def problem_b(groups: int = 2, *, prime: bool = False, stages: int = 0) -> Problem:
    graph, target = graph_b(prime=prime), target_b(groups)
    return Problem(graph, target, PAPER, CROSSING_PRICES, Effort(90), stages, (TRAFFIC,))


def exhaustive_a(interval: int) -> tuple[int, set[tuple[int, int, int]]]:
    """Shortest length of graph A and all its optima, by trying every start."""
    best, optima = 99, set[tuple[int, int, int]]()
    for times in itertools.product(range(7), repeat=3):
        s, p, o = times
        if min(times) or p < s + 1 or o < p + 1 or (s - o) % interval == 0:
            continue
        length = max(times) + 1
        if length < best:
            best, optima = length, set()
        if length == best:
            optima.add((s, p, o))
    return best, optima


def test_a1_graph_a() -> None:
    bounds = lower_bounds(graph_a(), target_a())
    assert (bounds.minimum, bounds.unit) == (2, "TC")
    assert exhaustive_a(2) == (4, {(0, 1, 3), (0, 2, 3)})  # the paper prints the second
    assert exhaustive_a(3) == (3, {(0, 1, 2)})
    problem = Problem(graph_a(), target_a(), PAPER, objectives=(LENGTH,))
    schedule = solve(problem)
    assert (schedule.initiation_interval, schedule.length, schedule.stages) == (2, 4, 2)
    assert schedule.proved
    assert tuple(schedule.time[n] for n in "SPO") in exhaustive_a(2)[1]


@pytest.mark.parametrize("prime", [False, True])
def test_a2_bounds_and_length_of_graph_b(prime: bool) -> None:
    problem = problem_b(prime=prime)
    bounds = lower_bounds(problem.graph, problem.target)
    assert bounds.load == {"TC": 2048, "SFU": 1026, "CUDA": 576, "TMA": 200}
    assert bounds.recurrence == 576 and set(bounds.cycle) in ({"X0", "O0"}, {"X1", "O1"})
    assert bounds.minimum == 2048 and "TC is 100 % busy" in bounds.reason
    modulo = modulo_schedule(problem, bounds, Clock(problem.effort))
    assert (modulo.interval, modulo.length, modulo.length_bound) == (2048, 3072, 3072)


LENGTHS = {"Wa": 4096, "Wb": 3584, "Wc": 4096}
WORDS = {"Wa": (5152, 5184), "Wb": (5168, 4144), "Wc": (5152, 6192)}
LATER = {"Wa": (7216, 6192), "Wb": (7216, 5152), "Wc": (7200, 6192)}
LITERAL = {
    "Wa": ["M0 waits under O0", "U0 waits under O0"],
    "Wb": ["M0 waits under O0", "U0 waits under O0", "X0 waits under S0"],
    "Wc": [],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a3_the_checker_reproduces_the_witness_table(name: str) -> None:
    graph, target = graph_b(), target_b()
    report = check(graph, target, witness(name))
    assert report.passed, report.findings
    assert witness(name).length == LENGTHS[name]
    assert report.memory_peak == {"smem": 98304}
    assert (report.register_peak["compute0"], report.register_peak["compute1"]) == WORDS[name]
    completion = Rules("issue", "completion", 0, carried_in_group=False, spill_memory=False)
    later = check(graph, target, replace(witness(name), rules=completion))
    assert (later.register_peak["compute0"], later.register_peak["compute1"]) == LATER[name]
    literal = check(graph, target, replace(witness(name), rules=replace(PAPER, window="literal")))
    assert sorted(literal.broken("blocking wait")) == LITERAL[name]
    prime = check(graph_b(prime=True), target, witness(name, prime=True))
    assert prime.passed == (name != "Wc")
    assert name != "Wc" or "A0->R0" in prime.broken("dependence")[0]
    if name == "Wb":
        assert witness(name).ring_depth == {"K": 1, "V": 2}


@pytest.mark.parametrize("prime", [False, True])
def test_a4_joint_graph_b(prime: bool) -> None:
    problem = problem_b(prime=prime, stages=2)
    schedule = solve(problem)
    assert schedule.initiation_interval == 2048 and schedule.proof.status == "analytic"
    (traffic,) = schedule.objectives
    assert traffic.value == 84 and traffic.proved
    for x in "01":
        assert len({g for n, g in schedule.group.items() if n.endswith(x)}) == 1
    assert verify(problem.graph, problem.target, schedule).ordered == 2048


def test_a4_a_third_group_is_no_help_and_no_harm() -> None:
    """That its traffic is the least takes fifteen seconds to prove, which is left out."""
    problem = replace(problem_b(3, stages=2), objectives=())
    schedule = solve(problem)
    assert schedule.initiation_interval == 2048 and schedule.proof.status == "analytic"
    assert verify(problem.graph, problem.target, schedule).ordered == 2048


def test_a5_one_compute_group_is_infeasible_for_two_reasons() -> None:
    found = explain(problem_b(1), 2048, stages=2)
    assert found.status == "INFEASIBLE"
    assert found.causes == ("registers", "waits")
    assert found.asked["units"] == "SAT"
    it = joint_encoding(problem_b(1), 2048, 2, frozenset({"registers", "waits"}))
    assert run(it.model, Effort(10), []).found


def test_a5_longer_intervals_are_settled() -> None:
    """One group, two stages: the register limit as a no-overlap decides what was open."""
    it = problem_b(1)
    own = [node.id for node in it.graph.nodes if node.registers]
    assert standing(it.graph, own)[:2] == [("X0", "O0"), ("X1", "O1")]
    assert exclusive(it.graph, own, it.target.words_per_warp) == "S0 U0 P0 S1 U1 P1".split()
    assert exclusive(it.graph, own, 2 * it.target.words_per_warp) == []
    refuted = joint_encoding(it, 2431, 2).model
    assert run(refuted, Effort(60), []).status == "INFEASIBLE"
    model = joint_encoding(it, (2049, 2700), 2)
    model.model.minimize(model.interval)
    least = run(model.model, Effort(90), [], style=Style(2))
    assert (least.status, least.value) == ("OPTIMAL", 2690)


def test_a6_micro_tests() -> None:
    target = target_b()

    def verdict(graph: Graph, times: dict[str, int], groups: dict[str, str], interval: int = 20):
        return check(graph, target, assemble(graph, target, PAPER, interval, times, groups))

    pair = Graph("pair", tuple(Node(n, n, (UnitUse("TC", 1),), 1) for n in "ab"), ())
    both = {"a": "compute0", "b": "compute1"}
    assert verdict(pair, {"a": 0, "b": 2}, both, 2).broken("unit")
    assert verdict(pair, {"a": 0, "b": 3}, both, 2).passed
    spill = replace(pair, edges=(Edge("a", "b", 4, spill_cost=3),))
    assert verdict(spill, {"a": 0, "b": 6}, both).broken("hand-off")
    assert verdict(spill, {"a": 0, "b": 7}, both).passed
    waiter = Graph(
        "wait",
        (Node("s", "s", latency=0), Node("v", "v", latency=1), Node("o", "o", latency=4)),
        (Edge("s", "v", blocking=True),),
    )
    one = {"s": "compute1", "v": "compute0", "o": "compute0"}
    for start in (7, 8, 9, 10, 27, 30):  # under t_v = 10, also modulo 20
        assert verdict(waiter, {"s": 0, "v": 10, "o": start}, one).broken("blocking wait"), start
    for start in (6, 11, 26):
        assert verdict(waiter, {"s": 0, "v": 10, "o": start}, one).passed, start
    lives = Graph("lives", (Node("a", "a", registers=128), Node("b", "b")), (Edge("a", "b"),))
    same = {"a": "compute0", "b": "compute0"}
    assert verdict(lives, {"a": 0, "b": 5}, same, 2).register_peak == {"compute0": 3 * 32}


def test_a8_ablations_are_reported_with_their_status() -> None:
    problem = problem_b(2)
    assert explain(problem, 2047, 2).status == "INFEASIBLE"  # below the unit bound
    assert explain(problem, 2048, 2).status in ("SAT", "OPTIMAL")
    hurried = explain(problem_b(1), 2600, 2, seconds=0.05)
    assert hurried.status == "UNKNOWN" and "UNKNOWN" in str(hurried)


def test_a9_no_answer_leaves_without_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: object, **kwargs: object):
        schedule = original(*args, **kwargs)
        return replace(schedule, time={**schedule.time, "S0": schedule.time["S1"]})

    original = solve_module.read_schedule
    monkeypatch.setattr(solve_module, "read_schedule", spoiled)
    with pytest.raises(CheckFailed, match="schedule is illegal"):
        solve(problem_b(2, stages=2))


def test_a10_structurally_infeasible_graphs_stop_at_the_serial_bound() -> None:
    # Two halves of 60 % of the registers each are carried round the loop: no interval helps.
    nodes = tuple(Node(n, n, (UnitUse("TC", 8),), 8, registers=20000) for n in "ab")
    edges = (Edge("a", "a", 8, 1), Edge("b", "b", 8, 1))
    graph = Graph("too wide", nodes, edges)
    with pytest.raises(CheckFailed, match="even at the serial interval"):
        solve(Problem(graph, target_b(1), effort=Effort(10)))
    with pytest.raises(InputError, match="fits no group"):
        Problem(graph_b(), target_b(0))
