"""Scheduled programs under random interleavings: the sequential bits, or a fault."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.codegen.ir.block import Pipeline, Straight
from warploom.codegen.ir.steps import Acquire, Join, Release, TurnPass, Wait
from warploom.codegen.oracle.barriers import Company, NamedBarrier, PhaseBarrier, Push, TaskRing
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.tile import interpret

_SPEC = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "programs.py")
assert _SPEC is not None and _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)


def agree(case, seed, outputs):
    program, schedule, arrays = case
    want, got = interpret(program, arrays), simulate(lower(program, schedule), arrays, seed=seed)
    for name in outputs:
        assert np.array_equal(got[name], want[name], equal_nan=True), name


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 300), n=st.integers(1, 130), trips=st.integers(0, 9), extra=st.integers(0, 15),
    depth=st.integers(1, 5), cluster=st.sampled_from([1, 2]), seed=st.integers(0, 10**6),
    a=st.sampled_from(["mk", "km"]), b=st.sampled_from(["kn", "nk"]),
)  # fmt: skip
def test_gemm_agrees_at_any_size_depth_and_interleaving(
    m, n, trips, extra, depth, cluster, seed, a, b
):
    # With one slot nothing may stay in flight over the back edge: the slot is needed at once.
    case = programs.gemm_case(
        m, n, trips * 16 + extra, depth, cluster, flying=int(depth > 1), seed=seed, a=a, b=b
    )
    agree(case, seed, ["c"])


def test_gemm_epilogues_agree():
    case = programs.gemm_case(
        150, 70, 40, bias=True, residual=True, scale=0.5, activation="silu", cluster=2
    )
    agree(case, 1, ["c"])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 260), keys=st.integers(1, 140), pingpong=st.booleans(),
    groups=st.sampled_from([1, 2, 3]), depth=st.integers(2, 3), causal=st.booleans(),
    window=st.sampled_from([None, 1, 33]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_attention_agrees_at_any_size_mask_and_interleaving(
    rows, keys, pingpong, groups, depth, causal, window, seed
):
    case = programs.attention_case(
        rows, keys, depth, pingpong, groups, seed=seed, causal=causal or window is not None,
        window=window, group=2, lse=True,
    )  # fmt: skip
    agree(case, seed, ["o", "lse"])


def test_the_plain_schedule_agrees_too():
    agree(programs.attention_case(130, 100, kind="multistage", lse=True), 3, ["o", "lse"])


def edit(block, change):
    """A block program with `change(step)` applied to every consumer step (None drops it)."""

    def steps(old):
        return tuple(new for step in old if (new := change(step)) is not None)

    def section(old):
        if isinstance(old, Straight):
            return replace(old, steps=steps(old.steps))
        return Pipeline(
            old.loop, old.depth, tuple(map(steps, old.prologue)), steps(old.steady),
            tuple(map(steps, old.epilogue)), steps(old.plain),
        )  # fmt: skip

    roles = [
        role if role.loads else replace(role, sections=tuple(map(section, role.sections)))
        for role in block.roles
    ]
    return replace(block, roles=tuple(roles))


def faults(case, change, seeds=20):
    """The faults that some interleavings of an edited block program end in, or wrong results."""
    program, schedule, arrays = case
    want = interpret(program, arrays)
    block = edit(lower(program, schedule), change)
    found = set()
    for seed in range(seeds):
        try:
            got = simulate(block, arrays, seed=seed)
        except CheckFailed as error:
            found.add(str(error).split(":")[0].split(" ")[0] + " " + str(error))
            continue
        except KeyError:
            found.add("missing value")
            continue
        for name in want:
            if not np.array_equal(got[name], want[name], equal_nan=True):
                found.add("wrong result")
    return " | ".join(sorted(found))


GEMM = {"m": 300, "n": 70, "k": 200}


def drop(kind):
    return lambda step: None if isinstance(step, kind) else step


def test_a_missing_release_deadlocks():
    assert "deadlock" in faults(programs.gemm_case(**GEMM), drop(Release))


def test_a_missing_join_is_a_race():
    text = faults(programs.gemm_case(**GEMM), drop(Join))
    assert "race" in text or "under a matmul" in text or "may use it" in text


def test_a_join_that_waits_for_too_little_is_a_race():
    def weaken(step):
        return replace(step, count=step.count + 1) if isinstance(step, Join) else step

    text = faults(programs.gemm_case(**GEMM), weaken)
    assert "race" in text or "may use it" in text


def test_a_missing_wait_is_noticed():
    assert faults(programs.gemm_case(**GEMM), drop(Wait))


def test_releasing_before_the_matmul_is_done_is_a_race():
    program, schedule, arrays = programs.gemm_case(**GEMM)
    block = lower(program, schedule)

    def early(pipeline):
        steady = list(pipeline.steady)
        place = next(i for i, step in enumerate(steady) if isinstance(step, Release))
        steady.insert(0, steady.pop(place))
        return replace(pipeline, steady=tuple(steady))

    roles = [block.roles[0]]
    for role in block.roles[1:]:
        parts = tuple(early(s) if isinstance(s, Pipeline) else s for s in role.sections)
        roles.append(replace(role, sections=parts))
    with pytest.raises(CheckFailed, match="race"):
        for seed in range(20):
            simulate(replace(block, roles=tuple(roles)), arrays, seed=seed)


def test_turns_that_are_not_passed_on_deadlock():
    case = programs.attention_case(130, 100)
    assert "deadlock" in faults(case, drop(TurnPass), seeds=3)


def test_reading_registers_under_a_matmul_is_noticed():
    case = programs.attention_case(130, 100)
    assert "may use it" in faults(case, drop(Join), seeds=6)


def test_the_loader_must_not_run_ahead_of_the_ring():
    program, schedule, arrays = programs.gemm_case(**GEMM)
    block = lower(program, schedule)
    loader = block.roles[0]
    pipeline = loader.sections[0]
    steady = tuple(step for step in pipeline.steady if not isinstance(step, Acquire))
    broken = replace(
        block,
        roles=(replace(loader, sections=(replace(pipeline, steady=steady),)), *block.roles[1:]),
    )
    with pytest.raises(CheckFailed):
        for seed in range(10):
            simulate(broken, arrays, seed=seed)


def test_a_schedule_that_exchanges_dependent_ops_is_refused():
    program, schedule, _ = programs.attention_case(130, 100, pingpong=False)
    index, loop = next(iter(schedule.loops.items()))
    time = dict(loop.time)
    largest = next(n for n in time if n.startswith("reduce_max") and n.endswith("/0"))
    weights = [n for n in time if n.startswith("exp2") and n.endswith("/0")][-1]
    time[largest], time[weights] = time[weights], time[largest]
    broken = replace(schedule, loops={**schedule.loops, index: replace(loop, time=time)})
    with pytest.raises(InputError, match="program's meaning would change"):
        lower(program, broken)


def test_a_ring_too_shallow_for_what_stays_in_flight_is_refused():
    with pytest.raises(InputError, match="it would hang, as this order waits for a_b"):
        programs.gemm_case(64, 64, 64, depth=1, flying=1)
    program, schedule, _ = programs.gemm_case(64, 64, 64, depth=2, flying=1)
    loops = {
        index: replace(loop, ring_depth=dict.fromkeys(loop.ring_depth, 1))
        for index, loop in schedule.loops.items()
    }
    with pytest.raises(InputError, match="depth 1, but 1 of its slots are still held"):
        lower(program, replace(schedule, loops=loops))


def test_a_barrier_takes_each_phases_arrivals_and_no_more():
    barrier = PhaseBarrier("slot", 2)
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.arrive()
    with pytest.raises(CheckFailed, match="2 arrivals with 1 of 2 left in phase 0"):
        barrier.arrive(2)
    barrier.arrive()
    assert barrier.passed(0) and not barrier.passed(1)
    turn = NamedBarrier("turn")
    assert not turn.take()
    turn.arrive()
    with pytest.raises(CheckFailed, match="passed twice before it was taken"):
        turn.arrive()


def test_parts_of_a_cluster_reduction_are_read_once_they_are_all_there():
    company = Company("sum", 2, 1)
    ones = np.ones(4, np.float32)
    assert Push(company, 0, ones).land()
    with pytest.raises(CheckFailed, match="block 0 pushes over a part of sum"):
        Push(company, 0, ones).land()
    with pytest.raises(CheckFailed, match="sum reads parts that have not landed"):
        company.take()
    assert Push(company, 1, 2 * ones).land()
    assert company.take().tolist() == [3.0] * 4


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_task_is_handed_over_once_its_slot_was_read_by_all(slots, readers):
    """Beside a queue: as many tasks ahead as there are slots, each reader gets all in order."""
    random, ring = np.random.default_rng(0), TaskRing("queue", slots, readers)
    given, taken = 0, [0] * readers
    for _ in range(300):
        reader = int(random.integers(-1, readers))
        if reader < 0:
            room = given < min(taken) + slots
            assert ring.give(given, 10 * given) is room
            given += room
        else:
            there = taken[reader] < given
            assert ring.take(taken[reader]) == (10 * taken[reader] if there else None)
            taken[reader] += there
    assert given > 20


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3),
    happened=st.lists(
        st.sampled_from([("arrive", 1), ("arrive", 2), ("expect", 64), ("landed", 64)]), max_size=9
    ),
)
def test_a_phase_ends_when_all_have_come_and_all_bytes_that_were_told(count, happened):
    """Counted anew from all that happened in the phase: arrivals, bytes told and bytes landed."""
    barrier = PhaseBarrier("slot", count)
    came = told = landed = phases = 0
    for what, number in happened:
        arrives = {"arrive": number, "expect": 1}.get(what, 0)
        told += number * (what == "expect")
        landed += number * (what == "landed")
        # Copies of others may come before anybody has; then one has told of too few.
        if came + arrives > count or (what == "landed" and landed > told and came):
            with pytest.raises(CheckFailed):
                getattr(barrier, what)(number)
            return
        came += arrives
        getattr(barrier, what)(number)
        if came == count and told == landed:
            came, told, landed, phases = 0, 0, 0, phases + 1
        assert barrier.completed == phases
        assert [barrier.passed(parity) for parity in (0, 1)] == [phases % 2 == 1, phases % 2 == 0]
