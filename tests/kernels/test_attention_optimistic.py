"""Blocks weighed by the maximum so far: exact where that is too low, cheap where it is not."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.codegen.analysis.role_code import Skips, guard_of
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import reference
from warploom.tile.interpret import bind

PATTERNS = ("random", "large", "rising", "steady", "falling", "equal", "one large")


def arrays_of(pattern, rows, keys, seed, d=32):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(1, 1, rows, d)), rng.normal(size=(1, 1, keys, d))
    if pattern == "large":
        q *= 30
    if pattern in ("rising", "falling"):
        # Scores grow or shrink along the keys, far beyond what the threshold allows for.
        q[..., 0] = 8.0
        k[..., 0] = np.linspace(-40, 40, keys) * (1 if pattern == "rising" else -1)
    if pattern == "steady":
        # Six more in every block: the base is raised, and no block need be weighed again.
        q[..., 0] = d**0.5
        k[..., 0] = np.arange(keys) // 32 * 6.0
    if pattern == "equal":
        k[:] = 0.25
    if pattern == "one large":
        k[0, 0, keys // 2] = 60 * q[0, 0, rows // 2]
    found = {"q": q, "k": k, "v": rng.normal(size=(1, 1, keys, d))}
    return found | {"o": np.full_like(q, np.nan), "lse": np.full((1, 1, rows), np.nan)}


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 150), keys=st.integers(1, 150), causal=st.booleans(),
    window=st.sampled_from([None, 1, 40]), pattern=st.sampled_from(PATTERNS),
    threshold=st.sampled_from([1.0, 12.0]), split=st.booleans(), seed=st.integers(0, 99),
    kind=st.sampled_from([t.BF16, t.FP16]),
)  # fmt: skip
def test_optimistic_rescaling_is_as_close_to_float64(
    rows, keys, causal, window, pattern, threshold, split, seed, kind
):
    config = AttentionConfig(
        dtype=kind, head_dim=32, causal=causal, window=window, lse=True, tile=(64, 32),
        optimistic_threshold=threshold, split_mask_loop=split and window is None,
    )  # fmt: skip
    arrays = arrays_of(pattern, rows, keys, seed)
    program = attention(config)
    got = t.interpret(program, arrays)
    want, lse = reference(config, bind(program, arrays))
    exact = t.interpret(attention(replace(config, optimistic_threshold=0.0)), arrays)["o"]
    assert not np.isnan(got["o"]).any()
    allowed = 1.5 * np.linalg.norm(exact - want) + 2e-3 * np.linalg.norm(want)
    assert np.linalg.norm(got["o"] - want) <= allowed
    finite = np.isfinite(lse)
    assert np.array_equal(np.isfinite(got["lse"]), finite)
    np.testing.assert_allclose(got["lse"][finite], lse[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pattern", ["random", "rising", "steady"])
def test_optimistic_rescaling_as_scheduled_gives_the_sequential_result(pattern):
    config = AttentionConfig(
        head_dim=32, causal=True, lse=True, tile=(128, 32), optimistic_threshold=12.0
    )
    arrays, program = arrays_of(pattern, 200, 170, 3), attention(config)
    plan = LaunchPlan(split="rows", skip_unit=True, skip_voted=True)
    block = lowered(program, Policy("pingpong-early", plan, groups=2, depth=2))
    got = simulate(block, arrays, seed=1)
    want = t.interpret(program, arrays)
    assert all(got[name].tobytes() == want[name].tobytes() for name in ("o", "lse"))


@pytest.mark.parametrize("causal", [False, True])
def test_what_a_second_weighing_costs_is_under_tests_of_a_warp(causal):
    config = AttentionConfig(head_dim=64, causal=causal, tile=(128, 64), optimistic_threshold=12.0)
    plan = LaunchPlan(split="rows", skip_unit=True, skip_voted=True)
    program = attention(config)
    text = emit(lowered(program, Policy("pingpong-early", plan, groups=2, depth=2))).text
    body = text[text.index("= i_start + 1;") :]
    body = body[: body.index("finish what is in flight")]
    tests = re.findall(r"if \(!\(__all_sync\(0xffffffffu, (.*)\)\)\) \{", body)
    rescaled, raised, summed, again = tests
    # Sums of 2^12 and 2^24, of weights of 2^-25 and less.
    assert "== 1.0f" in rescaled and f"<= {2.0**-13}f" in raised and "<= 0.5f" in again
    assert "<= 0.5f" in summed and "* 0.5f)" in summed and "* 0.5f)" not in again
    between, inside = body[body.index(raised) : body.index(summed)], body[body.index(again) :]
    sums = inside[inside.index("// Run reduce_sum") :]
    assert body.count("fmaxf(") > 0 and body.count("fmaxf(") == inside.count("fmaxf(")
    assert body.count("log2_fast(") > 0 and body.count("log2_fast(") == between.count("log2_fast(")
    assert body.count("half_bf16(") > 0 and body.count("half_bf16(") == sums.count("half_bf16(")
    # The weighing anew stands within the test of what is summed anew; one vote where both hold.
    depth = [line.index("if") for line in body.split("\n") if "__all_sync" in line]
    assert depth[3] > depth[2] == depth[1] == depth[0]
    plain = emit(
        lowered(program, Policy("pingpong-early", LaunchPlan(split="rows"), groups=2, depth=2))
    ).text
    assert "__all_sync" not in plain, "the plan says whether anything is left out"


def corrected(used):
    """A tile program that corrects x where a row's sum is large; `used`: and stores the maximum."""

    def rows(a, b, c, m):
        (i,) = t.grid(one=1)
        x, top = t.zeros(rows=64, cols=64), t.zeros(rows=64)
        for j in t.loop(2):
            x[:] = t.load(a, t.span(i, 64), t.span(j * 64, 64)) @ t.load(
                b, t.span(j * 64, 64), t.span(0, 64)
            )
            right = t.sum_along(x, "cols") <= 8.0
            highest = t.max_along(x, "cols")
            top[:] = t.where(right, top, highest)
            x[:] = t.where(right, x, x - top)
            if used:
                top[:] = top + highest
        t.store(c, t.span(i, 64), t.span(0, 64), tile=x)
        t.store(m, t.span(i, 64), tile=top)

    specs = {
        "a": t.array(t.BF16, "rows k"),
        "b": t.array(t.BF16, "k cols"),
        "c": t.array(t.FP32, "rows cols"),
    }
    return t.trace(rows, specs | {"m": t.array(t.FP32, "rows")})


@pytest.mark.parametrize("used", [False, True])
def test_only_what_nothing_else_reads_is_left_out(used):
    program = corrected(used)
    tiles, voted = RegisterTiles(place(program, "", 1)), Skips(voted=True)
    left_out = {op.kind: guard_of(tiles, op, voted) for op in program.ops() if op.kind != "load"}
    assert left_out["where"] is not None and left_out["reduce_sum"] is None
    assert (left_out["reduce_max"] is None) is used
    assert left_out["mma"] is None


def test_thresholds_that_cannot_be_are_refused():
    for changes in (
        {"optimistic_threshold": 16.0},
        {"optimistic_threshold": 12.0, "rescale_threshold": 8.0},
    ):
        with pytest.raises(InputError, match="expected 0 to 15 and no"):
            AttentionConfig(**changes)


def test_weights_of_8_bits_on_the_emulated_machine():
    """As interpreted, with blocks that are weighed again and with a last one that is cut."""
    config = AttentionConfig(
        dtype=t.E4M3, head_dim=32, tile=(64, 64), scale=0.125, optimistic_threshold=12.0
    )
    program, launch = attention(config), LaunchPlan(skip_voted=True)
    schedule = schedule_for(program, Policy("pingpong-early", launch, groups=1, depth=2))
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 1, 70, 32), "k": (1, 1, 200, 32), "v": (1, 1, 200, 32)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays |= {f"scale_{name}": np.array([1.0]) for name in "qkv"}
    arrays["q"][..., 0] = 1.0
    arrays["k"][..., 0] = np.arange(200) // 64 * 6.0
    arrays["o"] = np.full((1, 1, 70, 32), np.nan)
    bound = bind(program, arrays)
    found = Library([emit(lower(program, schedule))]).run(0, program, bound, None, 2, 1)["o"]
    want, _ = reference(config, bound)
    assert np.linalg.norm(found - want) < 0.035 * np.linalg.norm(want)
    assert np.linalg.norm(found - t.interpret(program, arrays)["o"]) < 0.004 * np.linalg.norm(want)
