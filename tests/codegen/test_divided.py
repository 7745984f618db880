"""Rows split over groups that divide what has no part of them: each piece is made once, for all."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.codegen.meetings import steps_of, without_meeting

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.spec import verify
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import PASSES, lower, verified
from warploom.errors import CheckFailed, InputError

PLAN = LaunchPlan(split="e", divided=True)


def program(extra=""):
    """Two kinds of weights of 64 rows, each from scores of its own, times 128 columns of values,
    and over the sums of both kinds."""

    def body(q, k, v, o):
        (i,) = t.grid(i=t.cdiv(t.size("m"), 64))
        queries = t.load(q, t.span(i * 64, 64, "m"), t.span(0, 32, "d"))
        acc, total = t.zeros(e=128, i=64), t.zeros(m=64)
        for j in t.loop(t.cdiv(t.size("n"), 64)):
            n, e = t.span(j * 64, 64, "n"), t.span(0, 128, "e")
            keys, values = t.load(k, n, t.span(0, 32, "d")), t.load(v, n, e)
            first, other = queries @ keys, queries @ keys
            top = t.max_along(first, "n")
            first = t.exp2(first - top)
            other = t.maximum(other, 0.0) * 0.25
            if extra == "joined":
                other = other + first
            sums = t.sum_along(first, "n") + t.sum_along(other, "n")
            weights = [part.cast(t.BF16).rename("m", "i") for part in (first, other)]
            if extra == "early":
                acc += values @ weights[0]
                weights[0] = (other + 1.0).cast(t.BF16).rename("m", "i")
            for one in weights:
                acc += values @ one
            if extra == "tile":
                scaled = values.T.cast(t.FP32) * t.sum_along(first, "m")
                acc += scaled.cast(t.BF16) @ weights[0]
            total += sums
        t.store(o, t.span(i * 64, 64, "i"), t.span(0, 128, "e"),
                tile=(acc * (1.0 / total).rename("m", "i")).T)  # fmt: skip

    arrays = {"q": t.array(t.BF16, "m d"), "k": t.array(t.BF16, "n d")}
    arrays |= {"v": t.array(t.BF16, "n e"), "o": t.array(t.FP32, "m e")}
    return t.trace(body, arrays, name="divided")


def policy(order="lcsf", **plan):
    return Policy(order, replace(PLAN, store="direct", **plan), 2, 2)


def lowered(order="lcsf", **plan):
    return lower(program(), schedule_for(program(), policy(order, **plan)), verified)


def inputs(m, n, seed=0):
    random = np.random.default_rng(seed)
    whole = {"q": (m, 32), "k": (n, 32), "v": (n, 128)}
    arrays = {x: random.integers(-2, 3, shape).astype(float) for x, shape in whole.items()}
    return arrays | {"o": np.zeros((m, 128))}


def test_each_group_makes_a_piece_and_both_have_rows():
    block = lowered()
    text = block_text(block)
    assert parse_block(text, program()) == block
    for role in ("compute0", "compute1"):
        steps = steps_of(text, role)
        kept = [step.split()[0] for step in steps if step.startswith(("Issue", "Meet", "Take"))]
        assert kept == ["Issue", "Meet", "Meet", "Take", "Take", "Issue", "Issue"]
    exponentials = [steps_of(text, role).count("Run exp2") for role in ("compute0", "compute1")]
    assert sorted(exponentials) == [0, 1]
    assert {block.placement.leader(name) for name in block.placement.common} == {0, 1}


@pytest.mark.parametrize("order", ["lcsf", "lcsf-early"])
def test_simulated_groups_give_what_the_program_says(order):
    for seed, (m, n) in enumerate(((130, 70), (64, 200), (200, 33))):
        arrays = inputs(m, n, seed)
        got = simulate(lowered(order), arrays, seed=seed)
        assert np.array_equal(got["o"], t.interpret(program(), arrays)["o"])


@pytest.mark.parametrize(
    ("number", "fault"), [(0, r"may still take|under a matmul"), (1, "before the groups have met")]
)
def test_a_meeting_that_is_missing_is_found(number, fault):
    broken = parse_block(without_meeting(block_text(lowered()), number), program())
    with pytest.raises(CheckFailed, match=fault):
        for seed in range(20):
            simulate(broken, inputs(200, 330, seed), seed=seed)


@pytest.mark.parametrize("role", ["compute0", "compute1"])
def test_a_group_that_takes_too_early_is_found(role):
    head, own = block_text(lowered()).split(f"  role {role}")
    early, count = re.subn(r"( +Meet \S+\n)((?: +Take .*\n)+)", r"\2\1", own, count=1)
    assert count == 1
    broken = parse_block(f"{head}  role {role}{early}", program())
    with pytest.raises(CheckFailed, match="before the groups have met"):
        for seed in range(20):
            simulate(broken, inputs(200, 330, seed), seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r" +Take reduce_sum\.\d+\n", ""),
        (r"Take (rename\.\d+)", r"Run \1"),
        (r"Run (exp2\.\d+)", r"Take \1"),
    ],
)
def test_the_spec_knows_what_each_group_does(old, new):
    text, count = re.subn(old, new, block_text(lowered()), count=1)
    assert count == 1
    with pytest.raises(CheckFailed):
        verify(parse_block(text, program()), list(PASSES))


def test_the_emitted_kernel_gives_it_and_its_barriers_are_needed():
    block = lowered()
    source = emit(block)
    meet = "named_sync<5, 256>();"
    assert source.text.count(meet) == 4
    bare = replace(source, text=source.text.replace(meet, ""))
    library = emulate.compile_all([source, bare], None)
    for seed, (m, n) in enumerate(((130, 70), (64, 200))):
        arrays = inputs(m, n, seed)
        got = emulate.run(library, 0, source, block.placement.program, arrays, blocks=2)
        want = t.interpret(program(), arrays)["o"]
        assert np.allclose(got["o"], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(CheckFailed):
        emulate.run(library, 1, bare, block.placement.program, inputs(130, 200), blocks=2)


def test_pieces_that_depend_on_each_other_are_one():
    made = program("joined")
    placement = lower(made, schedule_for(made, policy()), verified).placement
    assert set(placement.led.values()) == {0}


def test_what_does_not_fit_is_refused():
    def scheduled(made, one):
        return lower(made, schedule_for(made, one))

    with pytest.raises(InputError, match="make all operands first"):
        scheduled(program("early"), policy())
    with pytest.raises(InputError, match="one group makes for all"):
        scheduled(program("tile"), policy())
    with pytest.raises(InputError, match="one group leads"):
        scheduled(program(), policy("pingpong"))
    with pytest.raises(InputError, match="divided work"):
        build(program(), schedule_for(program(), policy()), "sm_80")
