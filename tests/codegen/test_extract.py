"""Graphs from programs, solved schedules, counters: with planted faults."""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lowering import lowered

from warploom.autosched.schedules import Policy, schedule_for
from warploom.autosched.solve import Search, solve_kernel
from warploom.codegen.compile.probe import probe, readings
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.perf.extract import extract
from warploom.schedule.check.checker import check
from warploom.schedule.model.costs import costs
from warploom.schedule.refute.refute import CONFIRMED
from warploom.schedule.solve.solve import solve
from warploom.tile import interpret

_SPEC = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "programs.py")
assert _SPEC is not None and _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)

QUICK = Search(seconds=6.0)
SPLIT = LaunchPlan(split="m")
MEASURED = replace(QUICK, seconds=9.0, cost_end="nominal")  # the high end takes far longer


def graph_of(program, split, parts=2, **options):
    placement = place(program, split, parts)
    return placement, extract(placement, program.loops()[0], costs("h200"), **options)


def agree(program, schedule, arrays, seeds=3):
    want = interpret(program, arrays)
    block = lower(program, schedule)
    for seed in range(seeds):
        got = simulate(block, arrays, seed=seed)
        for name in want:
            assert np.array_equal(got[name], want[name], equal_nan=True), (name, seed)


def test_units_of_attention_are_those_of_the_formula():
    _, problem = graph_of(attention(AttentionConfig()), "rows")
    load = {}
    for node in problem.graph.nodes:
        for use in node.uses:
            load[use.unit] = load.get(use.unit, 0) + use.cycles
    # 4 x 128 x 128 x 128 operations at 4096 a cycle; 128 x 128 exponentials at 16 a cycle.
    assert load["TC"] == 2048
    assert 1024 <= load["SFU"] < 1100
    assert problem.graph.flops == 4 * 128**3
    assert {n.id for n in problem.graph.nodes if n.variable_latency} == set(problem.graph.rings)


def test_every_pair_of_ops_on_one_tile_is_ordered_by_an_edge():
    _, problem = graph_of(attention(AttentionConfig()), "rows")
    edges = {(e.src, e.dst, e.distance) for e in problem.graph.edges}
    product = next(n.id for n in problem.graph.nodes if n.op == "mma")
    readers = [dst for src, dst, distance in edges if src == product and distance == 0]
    assert readers
    assert any((reader, product, 1) in edges for reader in readers + [e[1] for e in edges])


def test_the_solved_gemm_meets_its_bound_and_fills_shared_memory(empty_cache):
    program = gemm(GemmConfig())
    launch = LaunchPlan(split="m", cluster=("m_tile", 2), supergroup=8)
    schedule = solve_kernel(program, launch, search=QUICK)
    loop = schedule.any_loop
    assert loop.initiation_interval == 1024
    assert loop.proof.status == "analytic" and loop.proof.confirmed == CONFIRMED
    assert set(loop.ring_depth.values()) == {4}
    again = solve_kernel(program, launch, search=QUICK)
    assert again.to_json() == KernelSchedule.from_json(schedule.to_json()).to_json()


def test_a_bound_that_is_too_high_is_not_called_confirmed(empty_cache, monkeypatch):
    """Planted fault: the solver claims that a longer interval than it found is the least one."""

    def hasty(problem):
        found = solve(problem)
        claim = found.initiation_interval + 8
        proof = replace(found.proof, lower_bound=claim, status="infeasible", stages=found.stages)
        return replace(found, initiation_interval=claim, proof=proof)

    monkeypatch.setattr("warploom.autosched.solve.solve", hasty)
    program = gemm(GemmConfig(tile=(128, 128, 64)))
    loop = solve_kernel(program, SPLIT, search=QUICK).any_loop
    assert loop.proof.confirmed.startswith("not confirmed in 2 s: intervals from 640 on")


def test_solved_times_are_legal_on_the_extracted_graph_and_a_moved_one_is_not(empty_cache):
    program = gemm(GemmConfig())
    schedule = solve_kernel(program, LaunchPlan(split="m"), search=QUICK)
    _, problem = graph_of(program, "m")
    table = costs("h200").at("high")
    problem = extract(place(program, "m", 2), program.loops()[0], table)
    loop = schedule.any_loop
    legal = replace(loop, groups=(replace(loop.groups[0], warps=1), *loop.groups[1:]))
    assert check(problem.graph, problem.target, legal).passed
    first = next(n.id for n in problem.graph.nodes if n.op == "mma")
    moved = replace(legal, time={**legal.time, first: legal.time[first] - 400})
    assert not check(problem.graph, problem.target, moved).passed


@cache
def solved(kernel):
    """The schedule of a small kernel, solved once a test run."""
    small = programs.gemm_case if kernel == "gemm" else programs.attention_case
    plan = LaunchPlan(split="m" if kernel == "gemm" else "rows")
    return solve_kernel(small(64, 64, 3)[0], plan, search=MEASURED)


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 260), n=st.integers(1, 70), k=st.integers(0, 120), seed=st.integers(0, 10**6)
)
def test_a_solved_gemm_agrees_with_the_interpreter(m, n, k, seed):
    program, _, arrays = programs.gemm_case(m, n, k, seed=seed)
    agree(program, solved("gemm"), arrays, seeds=1)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 200), keys=st.integers(1, 200), seed=st.integers(0, 10**6))
def test_a_solved_attention_agrees_with_the_interpreter(rows, keys, seed):
    program, _, arrays = programs.attention_case(rows, keys, seed=seed)
    agree(program, solved("attention"), arrays, seeds=1)


def ahead(schedule, **more):
    """Scores start one iteration before their softmax, so two of them live at a time."""
    index, loop = next(iter(schedule.loops.items()))
    interval = loop.initiation_interval
    first = next(name for name in loop.time if name.startswith("mma")).split("/")[0]
    time = {
        name: at if name.startswith("load") or name.split("/")[0] == first else at + interval
        for name, at in loop.time.items()
    }
    release = {name: at + interval for name, at in loop.params["release"].items()}
    params = {**loop.params, "release": release, **more}
    return replace(schedule, loops={index: replace(loop, time=time, params=params)})


def test_a_tile_that_outlives_the_interval_is_refused():
    program, schedule, _ = programs.attention_case(64, 64, depth=4, pingpong=False)
    with pytest.raises(InputError, match="both touch tile product"):
        lower(program, ahead(schedule))
    with pytest.raises(InputError, match=r"params\['copies'\] is gone: it was measured and lost"):
        lower(program, ahead(schedule, copies={"product": 2}))


def test_schedules_by_name_and_an_unknown_one():
    program = gemm(GemmConfig())
    launch = LaunchPlan(split="m")
    depths = {
        name: set(schedule_for(program, Policy(name, launch)).any_loop.ring_depth.values())
        for name in ("unpipelined", "multistage", "lcsf")
    }
    assert depths == {"unpipelined": {1}, "multistage": {2}, "lcsf": {4}}
    with pytest.raises(InputError, match="expected one of"):
        schedule_for(program, Policy("fastest", launch))


def test_counters_surround_the_steady_loop_of_every_group_and_nothing_else():
    program = gemm(GemmConfig())
    source = emit(lowered(program, Policy("lcsf", LaunchPlan(split="m"))))
    probed, loops = probe(source)
    assert loops == ("i",)
    groups = source.text.count("matmuls and everything in registers")
    assert probed.text.count("probe_clock() - probe_i)") == groups >= 1
    kept = [line for line in probed.text.split("\n") if "probe" not in line]
    assert [x for x in source.text.split("\n") if x not in kept] == []
    (reading,) = readings(loops, [3000, 3, 2000])
    assert (reading.cycles_an_iteration, reading.gigahertz) == (1000.0, 1.5)


def test_where_the_high_end_has_no_schedule_the_nominal_costs_are_tried(monkeypatch):
    program = gemm(GemmConfig())
    tried = []

    def refuse(program, launch, gpu, search, registers):
        tried.append(search.cost_end)
        if search.cost_end == "high":
            raise CheckFailed("none found")
        return search

    monkeypatch.setattr("warploom.autosched.solve._solve_at", refuse)
    assert solve_kernel(program, search=QUICK) == replace(QUICK, cost_end="nominal")
    assert tried == ["high", "nominal"]

    def never(program, launch, gpu, search, registers):
        raise CheckFailed(f"none found at {search.cost_end}")

    monkeypatch.setattr("warploom.autosched.solve._solve_at", never)
    with pytest.raises(CheckFailed, match="at nominal"):
        solve_kernel(program, search=QUICK)
