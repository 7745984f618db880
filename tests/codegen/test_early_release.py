"""Slots filled once a task, given back before the matmuls that do not read them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen.programs import attention_case

from warploom.codegen.ir.block import Pipeline
from warploom.codegen.ir.steps import Release
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed
from warploom.tile import interpret


def early(case, **changes):
    """The case with its queries given back early."""
    program, schedule, arrays = case
    launch = schedule.launch.with_options(early_release=True, **changes)
    return program, replace(schedule, launch=launch), arrays


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 300), keys=st.integers(0, 140), pingpong=st.booleans(),
    groups=st.sampled_from([1, 2, 3]), depth=st.integers(2, 3), causal=st.booleans(),
    split_mask_loop=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_attention_agrees_at_any_size_mask_and_interleaving(
    rows, keys, pingpong, groups, depth, causal, split_mask_loop, seed
):
    case = early(
        attention_case(
            rows,
            keys,
            depth,
            pingpong,
            groups,
            seed=seed,
            causal=causal,
            split_mask_loop=split_mask_loop,
        )
    )
    want, got = interpret(*case[::2]), simulate(lower(*case[:2]), case[2], seed=seed)
    assert np.array_equal(got["o"], want["o"], equal_nan=True)


def loops(case):
    return [s for s in lower(*case[:2]).roles[1].sections if isinstance(s, Pipeline)]


@pytest.mark.parametrize("split_mask_loop", [False, True])
def test_the_last_loop_gives_the_queries_back_before_its_last_matmul(split_mask_loop):
    case = attention_case(200, 100, split_mask_loop=split_mask_loop)
    plain, moved = loops(case), loops(early(case))
    release = Release("q")
    assert all(release not in loop.epilogue[0] for loop in (*plain, *moved[:-1]))
    assert moved[-1].epilogue[0][0] == release and moved[-1].none == (release,)


def test_stores_over_the_queries_keep_them():
    case = early(attention_case(200, 100), store_over="q_t")
    assert all(not loop.none for loop in loops(case))


def test_given_back_before_they_were_read_is_a_race():
    program, schedule, arrays = early(attention_case(400, 100))
    block = lower(program, schedule)

    def sooner(section):
        if not isinstance(section, Pipeline):
            return section
        release = section.epilogue[0][0]
        return replace(
            section,
            prologue=((release, *section.prologue[0]),),
            epilogue=(section.epilogue[0][1:],),
        )

    roles = [
        r if r.loads else replace(r, sections=tuple(map(sooner, r.sections))) for r in block.roles
    ]
    want = interpret(program, arrays)
    for seed in range(20):
        try:
            got = simulate(replace(block, roles=tuple(roles)), arrays, seed=seed)
        except CheckFailed:
            return
        if not np.array_equal(got["o"], want["o"]):
            return
    raise AssertionError("20 interleavings did not notice")
