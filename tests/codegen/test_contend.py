"""Contention in graphs and in the walk, orders bettered by walking, several schedules to choose
from: each against what it claims to keep, with planted faults."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.autosched import portfolio as portfolio_module
from warploom.autosched.named import overlapped
from warploom.autosched.portfolio import portfolio
from warploom.autosched.refine import Walker, fewest_copies, order_of, refine
from warploom.autosched.schedules import schedule_named
from warploom.autosched.solve import Search
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.text import block_text
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.perf.contend import busy_cycles, crowded, slowdown, stretch, tensor_cycles
from warploom.perf.extract import extract
from warploom.perf.predict import predict
from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.costs import costs
from warploom.tile import interpret

_SPEC = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "programs.py")
assert _SPEC is not None and _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)

TABLE = costs("h200")
PLAN = LaunchPlan(split="rows")


def problem_of(program, table=TABLE, parts=2, **options):
    return extract(place(program, "rows", parts), program.loops()[0], table, **options)


def walker_of(program, schedule):
    placement = place(program, "rows", len(schedule.compute))
    problems = [
        extract(placement, loop, TABLE, copies=dict(schedule.loops[loop.index].params["copies"]))
        if "copies" in schedule.loops[loop.index].params
        else extract(placement, loop, TABLE)
        for loop in program.loops()
    ]
    return Walker(placement, problems, TABLE)


def test_matmuls_share_the_delay_of_the_iterations_arithmetic():
    program = attention(AttentionConfig())
    alone, beside = problem_of(program), problem_of(program, crowded=True)
    slots = sum(n.issue for n in alone.graph.nodes if not n.asynchronous)
    delay = TABLE.value("mma.beside") * slots
    busy = sum(map(tensor_cycles, beside.graph.nodes))
    assert 2048 + delay <= busy <= 2048 + delay + 4  # rounded up, a matmul each
    assert lower_bounds(beside.graph, beside.target).minimum == busy
    load = lower_bounds(alone.graph, alone.target).load
    crowd = lower_bounds(beside.graph, beside.target).load
    assert {k: v for k, v in load.items() if k != "TC"} == {
        k: v for k, v in crowd.items() if k != "TC"
    }


def test_what_leaves_a_matmul_moves_with_its_end():
    program = attention(AttentionConfig())
    alone, beside = problem_of(program), problem_of(program, crowded=True)
    for node in beside.graph.nodes:
        before = alone.graph.by_id[node.id]
        if node.variable_latency:
            assert node == before
        elif node.asynchronous:
            more = tensor_cycles(node) - tensor_cycles(before)
            assert more > 0 and node.latency == before.latency + more
        else:
            factor = slowdown(node, TABLE)
            assert factor in (TABLE.value("lanes.beside"), TABLE.value("mufu.beside"))
            slower = node.latency - before.latency
            assert slower == -(-busy_cycles(before) * (factor - 1) // 1)
    delays = {(e.src, e.dst, e.distance): e.delay for e in alone.graph.edges}
    for edge in beside.graph.edges:
        if beside.graph.by_id[edge.src].asynchronous and edge.kind == "data":
            assert edge.delay > delays[edge.src, edge.dst, edge.distance]


def test_a_family_without_these_costs_has_no_contention():
    a100 = costs("a100")
    nodes = problem_of(attention(AttentionConfig())).graph.nodes
    assert stretch(nodes, a100) == 1.0
    assert crowded(nodes, a100) == list(nodes)


@pytest.mark.parametrize(("tile", "parts"), [((128, 128), 2), ((64, 64), 1)])
def test_no_walk_is_faster_than_the_tensor_core_beside_arithmetic(tile, parts):
    """The bound of `contend`, of named orders; 2 % for pieces that end later."""
    program = attention(AttentionConfig(tile=tile))
    beside = problem_of(program, parts=parts, crowded=True)
    bound = sum(map(tensor_cycles, beside.graph.nodes))
    for name in ("multistage", "overlapped", "pingpong"):
        (found,) = predict(program, schedule_named(program, name, PLAN)).values()
        assert found.cycles >= 0.98 * bound


def small():
    program, _, arrays = programs.attention_case(130, 200)
    return program, arrays


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 99))
def test_a_refined_order_walks_faster_and_means_the_same(seed):
    program, arrays = small()
    plain = overlapped(program, 3, PLAN, 2, turns=False)
    walker = walker_of(program, plain)
    found = refine(plain, walker, tries=12, seed=seed)
    assert walker(found) <= walker(plain)
    assert refine(plain, walker, tries=12, seed=seed).to_json() == found.to_json()
    want = interpret(program, arrays)
    got = simulate(lower(program, found), arrays, seed=seed)
    for name, value in want.items():
        assert np.array_equal(got[name], value, equal_nan=True), name


def test_orders_that_break_the_program_are_not_walked():
    program, _ = small()
    plain = overlapped(program, 3, PLAN, 2, turns=False)
    walker = walker_of(program, plain)
    (index,) = plain.loops
    loop = plain.loops[index]
    first = min(order_of(loop, walker.problems[0].graph).values())
    assert first == 0
    swapped = {**loop.time}
    label = next(name for name in loop.time if name.startswith("exp2"))
    swapped[label] -= 40 * loop.initiation_interval
    broken = replace(plain, loops={index: replace(loop, time=swapped)})
    assert walker(broken) is None
    with pytest.raises(InputError, match="illegal"):
        refine(broken, walker, tries=2)


def test_copies_that_an_order_does_without_are_dropped():
    program, _ = small()
    plain = overlapped(program, 3, PLAN, 2, turns=False)
    (index,) = plain.loops
    loop = plain.loops[index]
    tile = next(op.dst.name for op in program.loops()[0].body if getattr(op, "kind", "") == "cast")
    doubled = replace(loop, params={**loop.params, "copies": {tile: 2}})
    schedule = replace(plain, loops={index: doubled})
    lean = fewest_copies(schedule, walker_of(program, schedule))
    assert lean.loops[index].params["copies"] == {}


def test_a_portfolio_is_distinct_and_begins_with_the_solvers_answer(monkeypatch):
    program, _ = small()
    asked: list[str] = []

    def answers(program, name, plan, gpu, search):
        asked.append(name)
        if name == "inflight":
            raise InputError("does not fit")
        named = {"lcsf": 2, "overlapped": 3, "pingpong": 3}.get(name, 4)
        made = overlapped(program, named, plan, 2, turns=False)
        return replace(made, name=name)

    monkeypatch.setattr(portfolio_module, "schedule_named", answers)
    found = portfolio(program, PLAN, search=Search(seconds=1.0), count=9)
    assert found[0].name == "solve" and len(asked) > 9
    # What lowers alike is one: of three depths, each once.
    steps = {block_text(replace(lower(program, one.schedule), name="")) for one in found}
    assert len(found) == len(steps) == 3
    assert [one.cycles for one in found[1:]] == sorted(one.cycles for one in found[1:])
