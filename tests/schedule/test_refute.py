"""Lower bounds: proved again by a second search, against exhaustion, and with faults planted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from fixtures import target_b
from hypothesis import given, settings
from hypothesis import strategies as st
from test_property import QUICK
from tight import STAGES, carrying_graphs, every_schedule, tight_graphs, tight_target

import warploom.schedule.solve.solve as solve_module
from bench.published import pinned, published, template
from warploom.errors import CheckFailed, InputError
from warploom.schedule import (
    Edge,
    Graph,
    GroupSpec,
    Node,
    Objective,
    Proof,
    Target,
    Unit,
    UnitUse,
    check,
)
from warploom.schedule.model.costs import costs, target
from warploom.schedule.model.rules import OURS, PAPER, Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.refute.refute import CONFIRMED, _Search, confirmed, refute, settled
from warploom.schedule.refute.refute_rules import Rulebook
from warploom.schedule.solve import encoding_lives
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.fallback import values_of
from warploom.schedule.solve.objectives import LENGTH
from warploom.schedule.solve.objectives import STAGES as STAGES_OF_ALL
from warploom.schedule.solve.problem import Clock, Problem, joint_encoding
from warploom.schedule.solve.solve import Modulo, solve
from warploom.schedule.solve.solver import Answer, Effort, run
from warploom.schedule.solve.subtiles import pins_allow_exchange

LONGEST = 4  # cycles: the intervals that exhaustion goes through


def tight_problem(graph: Graph, groups: int, rules: Rules, seconds: float = 10.0) -> Problem | None:
    """None for a graph that the target refuses by name."""
    try:
        return Problem(
            graph, tight_target(groups), rules, effort=Effort(seconds), stages=STAGES, objectives=()
        )
    except InputError:
        return None


def legal_intervals(it: Problem) -> list[int]:
    """Intervals up to `LONGEST` that have a schedule, by exhaustion."""
    intervals = range(1, LONGEST + 1)
    return [n for n in intervals if every_schedule(it.graph, it.target, it.rules, n)]


@given(
    st.one_of(tight_graphs(), carrying_graphs()), st.integers(1, 2), st.sampled_from([OURS, PAPER])
)
@settings(QUICK, max_examples=40)
def test_exhaustion_agrees_with_both_searches(graph: Graph, groups: int, rules: Rules) -> None:
    it = tight_problem(graph, groups, rules)
    if it is None:
        return
    legal = legal_intervals(it)
    for interval in range(1, LONGEST + 1):
        asked = run(joint_encoding(it, interval, STAGES).model, it.effort, [])
        assert asked.found == (interval in legal), interval
        again = refute(it, interval, interval, STAGES, 10)
        assert again.status != ("refuted" if interval in legal else "found"), interval
        if again.schedule is not None:
            assert check(it.graph, it.target, again.schedule).passed
    model = joint_encoding(it, (1, LONGEST), STAGES)
    model.model.minimize(model.interval)
    least = run(model.model, it.effort, [])
    assert (least.value if least.found else None) == (legal[0] if legal else None)


@given(st.one_of(tight_graphs(), carrying_graphs()), st.integers(1, 2))
@QUICK
def test_exhaustion_agrees_with_every_objective(graph: Graph, groups: int) -> None:
    """The least value of each, counted by the checker on every schedule there is."""
    it = tight_problem(graph, groups, OURS)
    legal = legal_intervals(it)[:1] if it else []
    for interval in legal:
        assert it is not None
        every = every_schedule(it.graph, it.target, it.rules, interval)
        for stage in STAGES_OF_ALL:
            model = joint_encoding(it, interval, STAGES)
            model.model.minimize(stage.expression(model, it.prices))
            answer = run(model.model, it.effort, [])
            assert answer.status == "OPTIMAL" and answer.bound == answer.value
            assert answer.value == min(counted(it, one, stage.name) for one in every), stage.name


def counted(it: Problem, schedule: Schedule, name: str) -> int:
    """What the checker counts, said when it refuses a claim that no schedule meets."""
    claim = replace(schedule, objectives=(Objective(name, -1, -1, ""),))
    (message,) = check(it.graph, it.target, claim, it.prices).broken("objective")
    return int(message.rsplit(" ", 1)[1])


@given(tight_graphs(), st.sampled_from([OURS, PAPER]), st.sampled_from([0.02, 0.1, 0.5]))
@QUICK
def test_a_short_limit_never_claims_too_much(graph: Graph, rules: Rules, seconds: float) -> None:
    it = tight_problem(graph, 1, rules, seconds)
    if it is None:
        return
    legal = legal_intervals(it)
    try:
        schedule = solve(it)
    except CheckFailed as error:
        assert not legal and "serial interval" in str(error)
        return
    proof = schedule.proof
    assert proof.stages in (0, STAGES)
    assert not legal or proof.lower_bound <= legal[0]
    assert confirmed(it, proof, 5).lower_bound == proof.lower_bound


@st.composite
def spread_graphs(draw: st.DrawFn) -> Graph:
    """Tight graphs in cycles that are no multiples of each other, too long for exhaustion."""
    graph = draw(tight_graphs(5))
    scale = draw(st.integers(5, 60))
    nodes = tuple(
        replace(
            node,
            uses=tuple(replace(u, cycles=scale * u.cycles + k, start=0) for u in node.uses[:1]),
            latency=scale * node.latency + k,
        )
        for k, node in enumerate(graph.nodes)
    )
    edges = tuple(replace(e, delay=scale * e.delay, distance=e.distance % 2) for e in graph.edges)
    try:
        return replace(graph, nodes=nodes, edges=edges)
    except InputError:  # an edge over two iterations became one over none, and closed a cycle
        return replace(graph, nodes=nodes, edges=())


@given(spread_graphs(), st.integers(1, 2))
@QUICK
def test_bounds_of_longer_intervals_are_confirmed(graph: Graph, groups: int) -> None:
    it = tight_problem(graph, groups, OURS, 5.0)
    if it is None:
        return
    try:
        schedule = solve(it)
    except CheckFailed:
        return
    assert confirmed(it, schedule.proof, 5).confirmed.startswith((CONFIRMED, "not confirmed"))
    least = schedule.initiation_interval
    wide = refute(it, 1, 2 * least, schedule.stages, 5)
    assert wide.status != "refuted" and wide.reached <= least


def test_what_the_checker_refuses_is_no_refutation() -> None:
    """Three operations of two cycles on two instances fill three slots, if they begin one after
    the other; the search, which does not know instances, begins them together."""
    nodes = tuple(Node(name, name, (UnitUse("PAIR", 2),), 2) for name in "abc")
    it = tight_problem(Graph("pair", nodes, ()), 1, OURS)
    assert it is not None and every_schedule(it.graph, it.target, it.rules, 3)
    assert refute(it, 3, 3, 1, 5).status == "open"


def test_an_objectives_bound_is_what_the_solver_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    it = replace(chain(3, 5, 2), objectives=(LENGTH,))
    (proved,) = solve(it).objectives
    assert proved.bound == proved.value
    improve = solve_module._improve
    monkeypatch.setattr(solve_module, "_improve", lambda *given: replace(improve(*given), bound=3))
    (objective,) = solve(it).objectives
    assert objective.bound == 3 < objective.value == proved.value


# What exists below intervals that were once "proved": attention's templates on Blackwell, and the
# backward pass on Hopper.
BELOW = {
    ("attention", "b200", "lcsf"): (3542, 3764),
    ("attention", "b200", "fa3_pingpong"): (3638, 3660),
    ("attention", "b200", "fa3_intra"): (3912, 3932),
    ("attention_backward", "h100", ""): (2944, 3020),
}


def problem_of(graph: str, gpu: str, name: str) -> Problem:
    table = costs(gpu)
    it = Problem(published(graph, gpu), target(table), effort=Effort(30), objectives=())
    return pinned(template(name), it) if name else it


@pytest.mark.parametrize("case", BELOW)
def test_the_range_of_intervals_holds_what_exists(case: tuple[str, str, str]) -> None:
    """A schedule's times fixed in the model with the interval as a variable: it must have them."""
    least, claimed = BELOW[case]
    it = problem_of(*case)
    if case[2]:
        found = refute(it, least, least, 3, 20).schedule
        assert found is not None and refute(it, 1, least - 1, 3, 20).status == "refuted"
    else:
        found = solve(it)
    assert found.initiation_interval == least and check(it.graph, it.target, found).passed
    assert admitted(it, found, (least, claimed))


def admitted(it: Problem, found: Schedule, between: tuple[int, int]) -> bool:
    """Whether the model of a range of intervals has this schedule, to renamed groups."""
    model = joint_encoding(it, between, max(3, found.stages))
    values = values_of(model, found)
    model.model.add(model.interval == found.initiation_interval)
    for variable in model.time.values():
        model.model.add(variable == values[variable.index])
    return run(model.model, Effort(20), []).status == "OPTIMAL"


def small_domain(it: Encoding, name: str, k: int) -> object:
    """The domain that once cut intervals off: two intervals beyond the last stage."""
    if k < 2 or isinstance(it.interval, int):
        return COPY(it, name, k)
    later = it.model.new_int_var(0, (it.stages + 2) * it.longest, "")
    it.model.add(later == it.phase[name] + k * it.interval)
    return later


COPY = Encoding.copy


def merged_status(it: Problem, interval: int, effort: Effort) -> solve_module.Found:
    """What was not decided with groups, handed on as refuted."""
    found = FIRST(it, interval, effort)
    if not it.target.groups:
        return found
    return solve_module.Found(interval, it.stages, Answer("INFEASIBLE", 0, 0, 0.0, {}))


def test_a_domain_too_small_is_caught_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    it = problem_of("attention", "b200", "fa3_pingpong")
    found = refute(it, 3638, 3638, 3, 20).schedule
    assert found is not None and admitted(it, found, (3638, 3660))
    monkeypatch.setattr(Encoding, "copy", small_domain)
    assert not admitted(it, found, (3638, 3660))


def living_long() -> Problem:
    """Bytes that live three intervals, in a memory that has room for four copies."""
    nodes = (
        Node("n0", "a"),
        Node("n1", "b", (UnitUse("PAIR", 1),)),
        Node("n2", "c", (UnitUse("PAIR", 3),), memory={"smem": 40}, asynchronous=True),
    )
    graph = Graph("living long", nodes, (Edge("n2", "n2", 0, 3, "data"),))
    it = tight_problem(graph, 2, OURS)
    assert it is not None
    return replace(it, stages=1)


def chain(*durations: int, distance: int = 1) -> Problem:
    """Operations one after the other on one unit, with a hand-off between any two groups."""
    names = [f"n{index}" for index in range(len(durations))]
    nodes = tuple(
        Node(name, name, (UnitUse("U", cycles),), cycles, registers=32)
        for name, cycles in zip(names, durations, strict=True)
    )
    edges = [
        Edge(a, b, nodes[k].latency, 0, "data", 3, blocking=True)
        for k, (a, b) in enumerate(pairwise(names))
    ]
    edges.append(Edge(names[-1], names[0], durations[-1], distance, "order"))
    groups = (GroupSpec("compute0", 4), GroupSpec("compute1", 4))
    where = Target("one unit", (Unit("U"),), {"smem": 4096}, groups, registers_per_thread=64)
    return Problem(Graph("chain", nodes, tuple(edges)), where, effort=Effort(10), objectives=())


def test_every_claim_above_the_truth_is_caught_and_none_below() -> None:
    for it in (chain(3, 5, 2), chain(4, 4, distance=2)):
        schedule = solve(it)
        proof, least = schedule.proof, schedule.initiation_interval
        assert proof.lower_bound == least
        assert confirmed(it, proof, 20).confirmed == CONFIRMED
        for claim in (least + 1, 2 * least):
            higher = replace(proof, lower_bound=claim, status="infeasible", stages=3)
            with pytest.raises(CheckFailed, match=f"false bound: {claim} is claimed"):
                confirmed(it, higher, 20)


def test_what_the_solver_leaves_open_is_proved_alone_and_says_so() -> None:
    it = problem_of("attention", "h100", "lcsf")
    schedule = solve(it)
    left = replace(schedule.proof, status="unproved", lower_bound=2048, stages=3)
    proof = settled(it, replace(schedule, proof=left), 20).proof
    assert (proof.status, proof.lower_bound) == ("second search", 2053)
    assert proof.confirmed == "by the second search alone"
    assert "the solver was open from 2048 up" in proof.reason
    worse = replace(schedule, initiation_interval=2054, proof=left)
    assert settled(it, worse, 20).proof.status == "unproved"  # 2053 has a schedule


@pytest.mark.parametrize("widest", [1, 2, 100])
@pytest.mark.parametrize("high", [1, 2, 9, 40])
def test_every_interval_of_a_range_is_asked_for(
    widest: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a search that refutes ranges up to a width and is lost in wider ones, the refuted ranges
    are all intervals, one after the other."""
    asked: list[int] = []

    def run(self: _Search, low: int, last: int) -> None:
        assert low <= last
        self.unknown = last - low >= widest
        if not self.unknown:
            asked.extend(range(low, last + 1))

    monkeypatch.setattr(_Search, "run", run)
    monkeypatch.setattr(_Search, "hopeless", lambda *_: False)
    assert refute(chain(3, 5, 2), 1, high, STAGES, 10).status == "refuted"
    assert asked == list(range(1, high + 1))


def test_halves_of_a_range_are_all_of_it() -> None:
    it = chain(3, 5, 2)
    search = _Search(Rulebook(it.graph, it.target, it.rules, it.pins, 3), 0.0)
    least = solve(it).initiation_interval
    for low, high in ((least, least + 1), (least, least + 2), (least, least + 7)):
        state = search._root(low, high, choices=True)
        assert state is not None
        halves = [range(half.low, half.high + 1) for half in search._halves(state)]
        assert [n for half in halves for n in half] == list(range(low, high + 1))
        assert len(halves) == 2


@pytest.mark.parametrize("interval", [2, 3, 6])
def test_three_values_of_which_two_fit_are_told_to_live_apart(interval: int) -> None:
    """Each lives two cycles, and there are registers for two: three cycles hold them all."""
    nodes = [Node(name, name, registers=64) for name in "abc"]
    nodes += [Node(f"{name} read", "read", issue=1) for name in "abc"]
    edges = tuple(Edge(name, f"{name} read", 2) for name in "abc")
    it = tight_problem(Graph("apart", tuple(nodes), edges), 1, OURS)
    assert it is not None
    said = refute(it, interval, interval, STAGES, 2).status
    assert said == ("refuted" if interval == 2 else "found")


def test_an_open_interval_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver finds nothing in its time, the second search may."""
    it = problem_of("attention", "b200", "fa3_pingpong")
    unknown = Answer("UNKNOWN", 0, 0, 0.0, {})
    monkeypatch.setattr(solve_module, "run", lambda *_, **__: unknown)
    first, later = (solve(replace(it, effort=Effort(seconds))) for seconds in (0.01, 1.5))
    assert later.initiation_interval < first.initiation_interval
    for schedule in (first, later):
        assert schedule.proof.status == "unproved"
        assert check(it.graph, it.target, schedule).passed


def test_what_is_not_confirmed_says_so() -> None:
    it = chain(3, 5, 2)
    proof = confirmed(it, replace(solve(it).proof, stages=3), 0.0)
    assert proof.confirmed == CONFIRMED  # units and dependences need no search
    higher = Proof(11, "analytic", "a claim about any number of stages", stages=0)
    assert confirmed(it, higher, 1).confirmed.startswith("not confirmed in 1 s: intervals from 10")
    hard = problem_of("attention", "h100", "")
    alone = replace(hard, target=hard.target.with_groups(1, single=0))
    left = confirmed(alone, Proof(4097, "infeasible", "", stages=2), 0.3).confirmed
    assert re.fullmatch(r"not confirmed in 0.3 s: intervals from \d+ on are left", left), left


@pytest.mark.parametrize("rule", ["readers", "enough", "_window", "dependences"])
def test_exhaustion_catches_a_second_search_that_forbids_too_much(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker of bounds has a checker: a rule made too strict refutes what exists."""
    original = getattr(Rulebook, rule)

    def strict(self: Rulebook, *args: object) -> object:
        value = original(self, *args)
        if rule == "readers":
            return [(edge, held + 3) for edge, held in value]
        if rule == "dependences":
            return [replace(gap, cycles=gap.cycles + 1) for gap in value]
        return original(self, args[0] - 1) if rule == "enough" else value + 2  # type: ignore[operator]

    it = waiting()
    least = legal_intervals(it)[0]
    assert refute(it, least, least, STAGES, 10).status == "found"
    monkeypatch.setattr(Rulebook, rule, strict)
    assert refute(it, least, least, STAGES, 10).status == "refuted"


def waiting() -> Problem:
    """Everything binds at 4 cycles: the unit, the recurrence, a wait, and a value's registers."""
    nodes = (
        Node("a", "a", (UnitUse("TC", 2),), 2, issue=1, registers=128),
        Node("b", "b", (UnitUse("TC", 2),), 2, issue=1),
    )
    edges = (Edge("a", "b", 2, 0, "data", 0, blocking=True), Edge("b", "a", 2, 1, "order"))
    it = tight_problem(Graph("waiting", nodes, edges), 1, OURS)
    assert it is not None
    return it


FIRST = solve_module._first
HELD = encoding_lives.held_after
# What plants each fault, and a problem whose interval it makes too long.
FAULTS: dict[str, tuple[object, str, object, Callable[[], Problem]]] = {
    "a domain too small": (Encoding, "copy", small_domain, living_long),
    "a status merged wrongly": (solve_module, "_first", merged_status, lambda: chain(3, 5, 2)),
    "a constraint too strong": (
        encoding_lives,
        "held_after",
        lambda it, edge: HELD(it, edge) + 3,
        waiting,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_solver_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, make = FAULTS[fault]
    it = make()
    right = solve(it)
    assert confirmed(it, right.proof, 10).confirmed == CONFIRMED
    monkeypatch.setattr(where, name, wrong)
    claim = solve(it).proof
    assert claim.status == "infeasible" and claim.lower_bound > right.initiation_interval
    with pytest.raises(CheckFailed, match=f"false bound: {claim.lower_bound} is claimed"):
        confirmed(it, claim, 10)


def test_a_limit_that_ends_the_search_early_refutes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One stage is refuted, then time is up: two stages were not asked."""
    nodes = (Node("a", "a", (UnitUse("U", 4),), 4), Node("b", "b", (UnitUse("V", 4),), 4))
    graph = Graph("two stages", nodes, (Edge("a", "b", 1),))
    where = Target("two", (Unit("U"), Unit("V")), {}, target_b(1).groups[1:])
    it = Problem(graph, where, effort=Effort(10), objectives=(), stages=2)
    assert solve_module._first(it, 4, Effort(10)).answer.found
    asked = [True, False]
    monkeypatch.setattr(Clock, "affords", lambda *_: asked.pop(0))
    monkeypatch.setattr(solve_module, "longest_path", lambda *_: 1)  # so that one stage is tried
    assert run(joint_encoding(it, 4, 1).model, Effort(10), []).status == "INFEASIBLE"
    assert solve_module._first(it, 4, Effort(10)).answer.status == "UNKNOWN"


def test_stages_that_are_asked_for_are_kept() -> None:
    """What placing finds with more is no answer, and no end of what is refuted with fewer."""
    table = costs("h100")
    it = Problem(published("gemm_epilogue", "h100"), target(table), effort=Effort(6), objectives=())
    for stages in (1, 2):
        assert solve(replace(it, stages=stages)).stages <= stages
    wide = replace(problem_of("attention", "h100", ""), stages=1, effort=Effort(2))
    assert solve(wide).stages == 1


def test_refuting_one_interval_leaves_those_below_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modulo interval is refuted, but it was not the least one: what lies below is open."""
    it = replace(chain(3, 5, 2), stages=2)
    modulo = Modulo(12, 10, 2, 12, 10, 0.0)
    refuted = solve_module.Found(12, 2, Answer("INFEASIBLE", 0, 0, 0.0, {}))
    monkeypatch.setattr(solve_module, "_first", lambda *_: refuted)
    unknown = Answer("UNKNOWN", 0, 0, 0.0, {})
    monkeypatch.setattr(solve_module, "_minimised", lambda _, low, *__: (unknown, low))
    start = solve_module._settle_interval(it, modulo, Clock(Effort(5)))
    assert start.bound == 10


def test_a_model_that_refutes_what_placing_finds_is_caught() -> None:
    it = chain(3, 5, 2)
    schedule = solve(it)
    with pytest.raises(CheckFailed, match="refutes every interval below 11 with up to 2 stages"):
        solve_module._given(schedule, 11, 2)


def test_pins_that_tell_sub_tiles_apart_are_no_symmetry() -> None:
    """`end` sits with sub-tile 0, so sub-tile 1 has a hand-off more and must go first."""
    nodes = (
        Node("a0", "a", (UnitUse("U", 2),), 2, subtile=0),
        Node("a1", "a", (UnitUse("U", 2),), 2, subtile=1),
        Node("end", "end", latency=1),
    )
    edges = tuple(Edge(f"a{x}", "end", 2, 0, "data", 2) for x in (0, 1))
    where = Target("one", (Unit("U"),), {}, target_b(2).groups)
    pins = {"a0": "compute0", "a1": "compute1", "end": "compute0"}
    graph = Graph("told apart", nodes, edges)
    it = Problem(graph, where, stages=1, pins=pins, uniform=True, objectives=())
    assert not pins_allow_exchange(graph, where, pins)
    assert pins_allow_exchange(graph, where, {name: pins[name] for name in ("a0", "a1")})
    assert run(joint_encoding(it, 5, 1).model, Effort(10), []).found


def test_a_bound_of_uniform_schedules_is_not_called_false() -> None:
    """More is free in the second search than the problem allows: it may only confirm."""
    it = replace(problem_of("attention", "h100", ""), uniform=True)
    claim = Proof(2060, "infeasible", "among uniform schedules", stages=3)
    assert confirmed(it, claim, 2).confirmed.startswith("not confirmed")


def test_progress_of_the_search_is_told() -> None:
    heard: list[str] = []
    it = problem_of("attention", "h100", "lcsf")
    assert refute(it, 1, 2052, 3, 20, heard.append).status == "refuted"
    assert heard and "below 20" in heard[-1]
