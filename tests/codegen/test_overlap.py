"""Overlapped tasks: the first matmul of the next one beside the stores of the present one."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen import emulate
from tests.codegen.programs import attention_case, gemm_case
from tests.gpu.cases import distance

from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.block import Pipeline, Straight
from warploom.codegen.ir.steps import Issue, Join, Wait
from warploom.codegen.ir.text import block_text
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.tile import interpret


def overlapping(case, slots=2, **changes):
    """The case with its tasks overlapped, and slots for queries."""
    program, schedule, arrays = case
    launch = schedule.launch.with_options(
        overlap_next_task=True, task_rings={"q_t": slots}, **changes
    )
    return program, replace(schedule, launch=launch), arrays


def agree(case, seed):
    program, schedule, arrays = case
    want, got = interpret(program, arrays), simulate(lower(program, schedule), arrays, seed=seed)
    for name in want:
        assert np.array_equal(got[name], want[name], equal_nan=True), name


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300), keys=st.integers(0, 140), pingpong=st.booleans(),
    groups=st.sampled_from([1, 2, 3]), depth=st.integers(2, 3), causal=st.booleans(),
    window=st.sampled_from([None, 1, 33]),
    tile_scheduler=st.sampled_from(["static", "serpentine", "dynamic"]),
    early=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_overlapped_tasks_agree_at_any_size_mask_tile_scheduler_and_interleaving(
    rows, keys, pingpong, groups, depth, causal, window, tile_scheduler, early, seed
):
    case = attention_case(
        rows, keys, depth, pingpong, groups, seed=seed, causal=causal or window is not None,
        window=window, group=2, lse=True,
    )  # fmt: skip
    # Queries given back before the last matmul need one slot.
    agree(
        overlapping(case, 1 if early else 2, tile_scheduler=tile_scheduler, early_release=early),
        seed,
    )


def without(block, change):
    """The block program with `change(step)` in place of the steps of its groups, None: dropped."""

    def steps(old):
        return tuple(new for step in old if (new := change(step)) is not None)

    def section(old):
        if isinstance(old, Straight):
            return replace(old, steps=steps(old.steps))
        fields = ("steady", "plain", "none")
        parts = {name: tuple(map(steps, getattr(old, name))) for name in ("prologue", "epilogue")}
        return replace(old, **parts, **{name: steps(getattr(old, name)) for name in fields})

    roles = [
        role
        if role.loads
        else replace(role, sections=tuple(map(section, role.sections)), ahead=steps(role.ahead))
        for role in block.roles
    ]
    return replace(block, roles=tuple(roles))


def joins_less(step):
    return replace(step, count=2) if isinstance(step, Join) and step.count == 1 else step


FAULTS = {
    "no-join-after-stores": lambda s: (
        None if isinstance(s, Join) and s.names == ("product",) else s
    ),
    "join-too-late": joins_less,
    "no-wait-for-keys": lambda s: None if isinstance(s, Wait) and s.ring == "k" else s,
    "no-wait-for-queries": lambda s: None if isinstance(s, Wait) and s.ring == "q" else s,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_left_out_is_noticed(name):
    program, schedule, arrays = overlapping(attention_case(400, 100, 2, False, 2))
    want, broken = interpret(program, arrays), without(lower(program, schedule), FAULTS[name])
    for seed in range(20):
        try:
            got = simulate(broken, arrays, seed=seed)
        except CheckFailed:
            return
        if not np.array_equal(got["o"], want["o"]):
            return
    raise AssertionError("20 interleavings did not notice")


def test_the_matmul_moves_and_nothing_else():
    program, schedule, _ = overlapping(attention_case(200, 100, 2, False, 2))
    plain = replace(schedule, launch=schedule.launch.with_options(overlap_next_task=False))
    roles = [lower(program, each).roles[1] for each in (schedule, plain)]
    (loop, usual), ahead = (
        [next(s for s in role.sections if isinstance(s, Pipeline)) for role in roles],
        roles[0].ahead,
    )
    assert [type(step) for step in ahead] == [Wait, Wait, Issue]
    assert loop.steady == usual.steady
    moved = [step for step in usual.prologue[0] if step not in loop.prologue[0]]
    assert [type(step) for step in moved] == [Wait, Issue, Join]
    text = block_text(lower(program, schedule))
    assert text.count("Ahead") == 2 * 2  # each group: at the end, or none


CASES = {
    "causal": lambda: overlapping(attention_case(200, 170, 2, False, causal=True, lse=True)),
    "pingpong": lambda: overlapping(
        attention_case(330, 70, 2, True, 3, seed=5), tile_scheduler="serpentine"
    ),
    "dynamic": lambda: overlapping(
        attention_case(260, 70, 2, False, 1, causal=True),
        tile_scheduler="dynamic",
        reverse=("rows_tile",),
    ),
    "window": lambda: overlapping(
        attention_case(300, 170, 3, False, causal=True, window=40, group=2)
    ),
    "one-slot": lambda: overlapping(attention_case(300, 70, 2, False), slots=1, early_release=True),
    "no-keys": lambda: overlapping(
        attention_case(150, 0, 2, False, lse=True), tile_scheduler="serpentine"
    ),
}
BROKEN = {
    "no-wait-for-the-first": ("causal", r"wgmma_wait<0>\(\);\s*pin\(product\);"),
    "no-wait-for-the-last": ("causal", r"wgmma_wait<1>\(\);"),
    "no-wait-for-keys": ("window", r"barrier_wait\(k_full[^;]*;"),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every case and every broken one, emitted and compiled as one library."""
    made = {name: make() for name, make in CASES.items()}
    sources = {name: emit(lower(case[0], case[1])) for name, case in made.items()}
    for name, (case, pattern) in BROKEN.items():
        whole = sources[case]
        body = whole.text.index('extern "C"')
        text = whole.text[:body] + re.sub(pattern, "", whole.text[body:])
        assert text != whole.text
        sources[name], made[name] = replace(whole, text=text), made[case]
    return (
        emulate.compile_all(list(sources.values()), tmp_path_factory.mktemp("overlap")),
        made,
        sources,
    )


def run(kernels, name, seed):
    library, made, sources = kernels
    program, _, arrays = made[name]
    number = list(sources).index(name)
    got = emulate.run(library, number, sources[name], program, arrays, blocks=2, seed=seed)
    return max(distance(got[x], want) for x, want in interpret(program, arrays).items())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_the_emitted_code_means_what_the_program_means(kernels, name, seed):
    # exp2 is rounded as C++ has it: here and there a result is the next number of its type.
    assert run(kernels, name, seed) < 1e-4


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_out_of_the_code_is_noticed(kernels, name):
    for seed in range(12):
        try:
            if run(kernels, name, seed) > 1e-3:
                return
        except emulate.Fault:
            return
    raise AssertionError("12 interleavings did not notice")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attention_case(64, 64, 2, False, split_mask_loop=True), "one loop"),
        (lambda: attention_case(64, 64, kind="multistage"), "started ahead"),
        (lambda: gemm_case(64, 64, 64), "begin with the waits"),
    ],
)
def test_schedules_that_cannot_overlap_tasks_are_refused(make, words):
    program, schedule, _ = overlapping(make())
    with pytest.raises(InputError, match=words):
        lower(program, schedule)


def test_one_slot_for_queries_is_refused():
    program, schedule, _ = attention_case(64, 64, 2, False)
    schedule = replace(schedule, launch=schedule.launch.with_options(overlap_next_task=True))
    with pytest.raises(InputError, match="give it depth 2"):
        lower(program, schedule)


def test_clusters_and_other_targets_are_refused():
    program, schedule, _ = overlapping(attention_case(64, 64, 2, False))
    with pytest.raises(InputError, match="overlap_next_task with a cluster of 2"):
        schedule.launch.with_options(cluster=("rows_tile", 2))
    direct = replace(schedule, launch=schedule.launch.with_options(store="direct"))
    with pytest.raises(InputError, match="overlap_next_task has code for sm_90a"):
        emit_sm80(lower(program, direct))
