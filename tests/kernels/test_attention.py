"""Attention forward on the interpreter against float64: masks, ragged sizes, grouped queries."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen import emulate
from tests.lowering import lowered

from warploom.autosched.schedules import Policy, compiled, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import reference, task_table
from warploom.kernels.attention.variants import choose_attention
from warploom.tile import E4M3, interpret
from warploom.tile.interpret import bind


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 90), keys=st.integers(1, 90), causal=st.booleans(),
    window=st.sampled_from([None, 1, 20, 64]), group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([0.0, 1.5]), bq=st.sampled_from([16, 32]), bk=st.sampled_from([16, 48]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_attention_is_close_to_float64(rows, keys, causal, window, group, softcap, bq, bk, seed):
    config = AttentionConfig(
        head_dim=16,
        causal=causal,
        window=window,
        group=group,
        softcap=softcap,
        lse=True,
        tile=(bq, bk),
    )
    rng = np.random.default_rng(seed)
    arrays = {
        "q": rng.normal(size=(1, group, rows, 16)),
        "k": rng.normal(size=(1, 1, keys, 16)),
        "v": rng.normal(size=(1, 1, keys, 16)),
        "o": np.full((1, group, rows, 16), np.nan),
        "lse": np.full((1, group, rows), np.nan),
    }
    program = attention(config)
    got = interpret(program, arrays)
    want, lse = reference(config, bind(program, arrays))
    assert not np.isnan(got["o"]).any()
    norm = np.linalg.norm(want)
    assert np.linalg.norm(got["o"] - want) <= 8e-3 * norm
    finite = np.isfinite(lse)
    assert np.array_equal(np.isfinite(got["lse"]), finite)
    np.testing.assert_allclose(got["lse"][finite], lse[finite], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_values_may_have_heads_of_another_size(causal):
    base = AttentionConfig(head_dim=192, value_dim=128, causal=causal, lse=True)
    choice = choose_attention(4096, base)
    config = choice.config(base)
    rng = np.random.default_rng(0)
    shapes = {"q": (140, 192), "k": (170, 192), "v": (170, 128), "o": (140, 128)}
    arrays = {name: rng.normal(size=(1, 1, *shape)) for name, shape in shapes.items()}
    arrays["lse"] = np.full((1, 1, 140), np.nan)
    program = attention(config)
    got = interpret(program, arrays)
    want, _ = reference(config, bind(program, arrays))
    assert np.linalg.norm(got["o"] - want) <= 8e-3 * np.linalg.norm(want)
    seen = simulate(lower(program, choice.schedule(config)), arrays, seed=1)
    assert (np.asarray(seen["o"]) == np.asarray(got["o"])).all()
    with pytest.raises(InputError, match="head_dim=128 value_dim=64: expected a head_dim of 136"):
        AttentionConfig(value_dim=64)


def test_rows_that_see_no_key_give_zero():
    config = AttentionConfig(head_dim=16, causal=True, lse=True, tile=(16, 16))
    arrays = {
        "q": np.ones((1, 1, 8, 16)), "k": np.ones((1, 1, 3, 16)), "v": np.ones((1, 1, 3, 16)),
        "o": np.full((1, 1, 8, 16), np.nan), "lse": np.full((1, 1, 8), np.nan),
    }  # fmt: skip
    got = interpret(attention(config), arrays)
    assert (got["o"][0, 0, :5] == 0).all() and (got["o"][0, 0, 5:] == 1).all()
    assert np.isneginf(got["lse"][0, 0, :5]).all()


def test_large_scores_do_not_overflow():
    config = AttentionConfig(head_dim=16, tile=(16, 16))
    q = np.full((1, 1, 16, 16), 200.0)
    values = np.arange(40 * 16.0).reshape(1, 1, 40, 16) % 7
    arrays = {"q": q, "k": np.full((1, 1, 40, 16), 200.0), "v": values, "o": np.zeros_like(q)}
    got = interpret(attention(config), arrays)["o"]
    np.testing.assert_allclose(got[0, 0, 0], values[0, 0].mean(0), rtol=1e-2)


def test_bad_configs_are_refused():
    with pytest.raises(InputError, match="expected >= 1"):
        AttentionConfig(group=0)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4),
    causal=st.booleans(), window=st.sampled_from([None, 9]), seed=st.integers(0, 99),
)  # fmt: skip
def test_packed_sequences_are_each_their_own_attention(lengths, causal, window, seed):
    config = AttentionConfig(
        head_dim=16, causal=causal, window=window, group=2, lse=True, tile=(32, 16), packed=True
    )
    arrays = packed_arrays(config, lengths, heads=4, seed=seed)
    got = interpret(attention(config), arrays) if len(arrays["tiles"]) else arrays
    want, lse = reference(config, bind(attention(config), arrays))
    assert not np.isnan(got["o"]).any()
    assert np.linalg.norm(got["o"] - want) <= 8e-3 * np.linalg.norm(want)
    finite = np.isfinite(lse)
    assert np.array_equal(np.isfinite(got["lse"]), finite)
    np.testing.assert_allclose(got["lse"][finite], lse[finite], atol=1e-5)


def packed_arrays(config, lengths, heads, seed=0):
    rng = np.random.default_rng(seed)
    rows, keys = ([0, *np.cumsum([pair[n] for pair in lengths])] for n in (0, 1))
    d, kv = config.head_dim, heads // config.group
    arrays = {
        "q": rng.normal(size=(rows[-1], heads, d)), "k": rng.normal(size=(keys[-1], kv, d)),
        "v": rng.normal(size=(keys[-1], kv, d)), "row_bounds": np.array(rows),
        "key_bounds": np.array(keys), "o": np.full((rows[-1], heads, d), np.nan),
        "tiles": task_table(*zip(*lengths, strict=True), config.tile[0]),
    }  # fmt: skip
    return {**arrays, "lse": np.full((heads, rows[-1]), np.nan)} if config.lse else arrays


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_as_scheduled_gives_the_sequential_result(causal):
    config = AttentionConfig(head_dim=32, causal=causal, tile=(128, 32), packed=True)
    arrays = packed_arrays(config, [(150, 90), (0, 40), (64, 200), (5, 5)], heads=1)
    program = attention(config)
    plan = LaunchPlan(split="rows", tile_scheduler="dynamic", skip_unit=True)
    block = lowered(program, Policy("pingpong", plan, groups=2, depth=2))
    got = simulate(block, arrays, seed=4)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()
    text = emit(block).text
    assert "__shfl_sync(0xffffffffu, GIVEN(tiles_data" in text, "what a task reads is uniform"
    assert "if (row_bounds_read + " in text.replace("((", "(").replace("((", "(")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("optimistic", "blocks"), [(0.0, False), (12.0, False), (12.0, True)])
def test_attention_of_8_bits_is_close_to_float64(causal, optimistic, blocks):
    config = AttentionConfig(
        dtype=E4M3, head_dim=32, causal=causal, lse=True, tile=(64, 32),
        optimistic_threshold=optimistic, block_scales=blocks,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    arrays = {
        "q": rng.normal(size=(1, 2, 150, 32)), "k": rng.normal(size=(1, 2, 150, 32)),
        "v": rng.normal(size=(1, 2, 150, 32)), "scale_q": np.array([0.5]),
        "scale_k": np.array([1.5]), "scale_v": np.array([2.0]),
        "o": np.full((1, 2, 150, 32), np.nan), "lse": np.full((1, 2, 150), np.nan),
    }  # fmt: skip
    if blocks:
        several = {"scale_q": (1, 2, 2), "scale_k": (1, 2, 2), "scale_v": (1, 2)}
        arrays |= {name: rng.uniform(0.2, 2.0, size=shape) for name, shape in several.items()}
    program = attention(config)
    got = interpret(program, arrays)
    want, lse = reference(config, bind(program, arrays))
    assert np.linalg.norm(got["o"] - want) <= 0.03 * np.linalg.norm(want)
    np.testing.assert_allclose(got["lse"], lse, atol=1e-5)
    policy = Policy("pingpong", LaunchPlan(), groups=1, depth=2)
    compiled(program, policy)
    if blocks:
        source = emit(lowered(program, policy))
        ran = emulate.run(emulate.compile_all([source], None), 0, source, program, arrays, blocks=2)
        assert np.linalg.norm(ran["o"] - got["o"]) <= 1e-3 * np.linalg.norm(want)


def test_a_quad_exchanges_pairs_into_the_fragment_of_8_bit_operands():
    """`quad_fragment` as written, on column numbers: lane q ends with columns 4 q to 4 q + 3."""
    pairs = {q: [2 * q, 2 * q + 1, 8 + 2 * q, 9 + 2 * q] for q in range(4)}
    for q in range(4):
        start = 2 * q & 3
        both = pairs[start] + pairs[start + 1]
        selector = 0x5410 if q < 2 else 0x7632
        found = [both[selector >> 4 * n & 7] for n in range(4)]
        assert found == [4 * q + n for n in range(4)]


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 200), keys=st.integers(1, 130), causal=st.booleans(),
    pingpong=st.booleans(), pair=st.booleans(),
    split_mask_loop=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rescaling_beside_the_first_matmul_gives_the_sequential_result(
    rows, keys, causal, pingpong, pair, split_mask_loop, seed
):
    """`early`, alone and with the keys multicast to two row tiles (full rows only)."""
    program, arrays = early_case(rows, keys, causal, split_mask_loop, seed)
    cluster = ("rows_tile", 2) if pair and not causal else ("", 1)
    launch = LaunchPlan(split="rows", cluster=cluster)
    order = "pingpong-early" if pingpong else "overlapped-early"
    block = lowered(program, Policy(order, launch, groups=2, depth=2))
    got = simulate(block, arrays, seed=seed)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()


def early_case(rows, keys, causal=False, split_mask_loop=False, seed=0):
    program = attention(
        AttentionConfig(head_dim=32, causal=causal, split_mask_loop=split_mask_loop, tile=(128, 32))
    )
    rng = np.random.default_rng(seed)
    shapes = {"q": rows, "k": keys, "v": keys}
    arrays = {name: rng.normal(size=(1, 1, count, 32)) for name, count in shapes.items()}
    return program, {**arrays, "o": np.full((1, 1, rows, 32), np.nan)}


def test_a_slot_given_back_before_its_reader_is_started_is_refused():
    program, _ = early_case(128, 128)
    schedule = schedule_for(
        program, Policy("pingpong-early", LaunchPlan(split="rows"), groups=2, depth=2)
    )
    ((index, loop),) = schedule.loops.items()
    first = dict.fromkeys(loop.params["release"], loop.initiation_interval)
    early = replace(loop, params={**loop.params, "release": first})
    with pytest.raises(InputError, match="ring v is released before its last reader"):
        lower(program, replace(schedule, loops={index: early}))


def over(tile="q_t", **changes):
    config = AttentionConfig(head_dim=128, tile=(128, 64))
    plan = LaunchPlan(split="rows", store_over=tile, **changes)
    return emit(lowered(attention(config), Policy("pingpong", plan, groups=2, depth=2)))


def test_results_leave_through_the_slot_of_the_queries():
    """Every group writes its rows of each panel, and gives the slot back when they have left."""
    source = over()
    program = attention(AttentionConfig(head_dim=128, tile=(128, 64)))
    policy = Policy("pingpong", LaunchPlan(split="rows", store_panels=2), groups=2, depth=2)
    split_mask_loop = emit(lowered(program, policy))
    assert source.shared_bytes == split_mask_loop.shared_bytes - 2 * 2 * 64 * 128
    at = dict(re.findall(r"const unsigned (\w+) = shared \+ (\d+);", source.text))
    assert at["panels"] == at["q_base"]
    # Two groups of 64 rows in two panels of 128 rows of 128 B.
    assert set(re.findall(r"panels \+ part \* (\d+) \+ (\d+)", source.text)) == {
        ("8192", "0"), ("8192", "16384"),
    }  # fmt: skip
    role = source.text[source.text.index("// compute0") :]
    given, stored = role.index("// Release q\n"), role.index("store_commit();")
    assert given > stored
    assert role[given:].split("\n")[1].endswith("store_wait_read<0>();")


def test_a_slot_that_groups_have_no_rows_of_is_refused():
    with pytest.raises(InputError, match="ring of its own of one slot"):
        over(task_rings={"q_t": 2})
    with pytest.raises(InputError, match="ring of its own"):
        over("nothing")
    with pytest.raises(InputError, match="needs store='tma'"):
        over(store="direct")
    config = AttentionConfig(dtype=E4M3, head_dim=128, tile=(128, 64))
    plan = LaunchPlan(split="rows", store_over="q_t")
    with pytest.raises(InputError, match="expected equal panels"):
        emit(lowered(attention(config), Policy("pingpong", plan, groups=2, depth=2)))
