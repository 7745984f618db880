"""Random graphs: a search over every schedule confirms each optimum; all answers check and run."""

from __future__ import annotations

import itertools
from dataclasses import replace

from fixtures import target_b
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.schedule import Edge, Graph, GroupSpec, Node, Target, Unit, UnitUse, check, verify
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.rules import OURS, PAPER, Prices, Rules
from warploom.schedule.solve.objectives import LENGTH, STAGES, TRAFFIC
from warploom.schedule.solve.solve import Problem, joint_encoding, solve
from warploom.schedule.solve.solver import Effort, run

QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@st.composite
def small_graphs(draw: st.DrawFn, most: int = 4, longest: int = 3) -> Graph:
    count = draw(st.integers(2, most))
    nodes: list[Node] = []
    for index in range(count):
        cycles = draw(st.integers(1, longest))
        nodes.append(
            Node(
                f"n{index}",
                f"op{index}",
                (UnitUse(draw(st.sampled_from(["TC", "SFU"])), cycles),),
                latency=cycles,
                issue=draw(st.integers(0, 1)),
                registers=draw(st.sampled_from([0, 4, 8])),
                asynchronous=draw(st.booleans()),
            )
        )
    edges: list[Edge] = []
    for _ in range(draw(st.integers(1, count + 1))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        distance = draw(st.integers(0, 1)) if a < b else 1
        edges.append(
            Edge(
                f"n{a}",
                f"n{b}",
                draw(st.integers(0, longest)),
                distance,
                draw(st.sampled_from(["data", "order"])),
                draw(st.integers(0, 2)),
                draw(st.booleans()) and a != b,
            )
        )
    return Graph("random", tuple(nodes), tuple(edges))


def small_target(groups: int) -> Target:
    compute = tuple(GroupSpec(f"compute{i}", 4) for i in range(groups))
    return Target("small", (Unit("TC"), Unit("SFU")), {}, compute, registers_per_thread=1)


def brute_force(
    graph: Graph, target: Target, rules: Rules, interval: int, horizon: int
) -> set[tuple[int, int]]:
    """(length, traffic) of every legal schedule at an interval, decided by the checker alone."""
    found: set[tuple[int, int]] = set()
    names = [node.id for node in graph.nodes]
    groups = [group.name for group in target.groups]
    for times in itertools.product(range(horizon), repeat=len(names)):
        if min(times) != 0:
            continue
        for chosen in itertools.product(groups, repeat=len(names)):
            placed = dict(zip(names, chosen, strict=True))
            at = dict(zip(names, times, strict=True))
            schedule = assemble(graph, target, rules, interval, at, placed)
            if check(graph, target, schedule).passed:
                found.add((schedule.length, traffic(graph, placed)))
    return found


def traffic(graph: Graph, group: dict[str, str]) -> int:
    prices = Prices()
    points = 0
    for src, dst in {(e.src, e.dst) for e in graph.edges}:
        between = [e for e in graph.edges if (e.src, e.dst) == (src, dst)]
        blocking = any(e.blocking for e in between)
        points += 20 * blocking
        if group[src] != group[dst]:
            data = any(e.kind == "data" for e in between)
            points += prices.edge + (graph.by_id[src].registers // 64 if data else 0)
            points += 0 if blocking else 20
    return points


@given(small_graphs(most=3), st.integers(1, 2), st.sampled_from([OURS, PAPER]))
@QUICK
def test_brute_force_confirms_interval_traffic_and_length(
    graph: Graph, groups: int, rules: Rules
) -> None:
    target = small_target(groups)
    for objective, column in ((LENGTH, 0), (TRAFFIC, 1)):
        problem = Problem(
            graph, target, rules, effort=Effort(10), stages=2, objectives=(objective,)
        )
        for interval in range(1, 5):
            it = joint_encoding(problem, interval, 2)
            it.model.minimize(objective.expression(it, problem.prices))
            answer = run(it.model, problem.effort, [])
            legal = brute_force(graph, target, rules, interval, 2 * interval)
            legal = {pair for pair in legal if pair[0] <= 2 * interval}
            assert answer.found == bool(legal), (interval, legal)
            if legal:
                assert answer.status == "OPTIMAL"
                assert answer.value == min(pair[column] for pair in legal)


@given(small_graphs(most=6, longest=5), st.integers(1, 2), st.integers(1, 3))
@QUICK
def test_minimising_the_interval_agrees_with_trying_each(
    graph: Graph, groups: int, stages: int
) -> None:
    problem = Problem(graph, small_target(groups), OURS, effort=Effort(10))
    tried = [
        interval
        for interval in range(1, 25)
        if run(joint_encoding(problem, interval, stages).model, problem.effort, []).found
    ]
    it = joint_encoding(problem, (1, 24), stages)
    it.model.minimize(it.interval)
    answer = run(it.model, problem.effort, [])
    assert answer.status == ("OPTIMAL" if tried else "INFEASIBLE")
    assert not tried or answer.value == tried[0]


@given(small_graphs(most=7, longest=9), st.integers(1, 3))
@QUICK
def test_every_answer_checks_and_runs(graph: Graph, groups: int) -> None:
    target = small_target(groups)
    wide = Target(target.name, target.units, {}, target.groups, registers_per_thread=255)
    rules = replace(OURS, unroll=0)  # a value read by its own next copy needs two
    schedule = solve(Problem(graph, wide, rules, effort=Effort(10), objectives=STAGES[:2]))
    assert check(graph, wide, schedule, Prices()).passed
    assert schedule.proof.status in ("analytic", "infeasible")
    assert verify(graph, wide, schedule, seeds=1).ordered <= schedule.initiation_interval + 0.5


@given(small_graphs(most=5))
@QUICK
def test_json_round_trip(graph: Graph) -> None:
    assert Graph.from_json(graph.to_json()) == graph


def test_a_wrong_target_is_refused_before_solving() -> None:
    graph = Graph("g", (Node("a", "a", (UnitUse("nope", 1),)),), ())
    try:
        Problem(graph, target_b())
    except InputError as error:
        assert "unknown unit 'nope'" in str(error)
    else:
        raise AssertionError("an unknown unit was accepted")
