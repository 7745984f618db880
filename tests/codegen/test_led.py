"""Columns split over groups: one group makes what has no part of them, and hands it on."""

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


def program(extra=""):
    """Scores, of which each block is weighed by its largest so far, times values of 128 columns."""

    def body(q, k, v, o, sums, bias):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, every = t.span(i * 64, 64), t.span(0, 128)
        queries = t.load(q, rows, t.span(0, 32))
        highest, acc = t.full(-1e4, m=64), t.zeros(m=64, e=128)
        for j in t.loop(t.cdiv(t.size("n"), 32)):
            n = t.span(j * 32, 32)
            scores = queries @ t.load(k, n, t.span(0, 32))
            top = t.maximum(highest, t.max_along(scores, "n"))
            scale = t.exp2(highest - top)
            highest[:] = top
            acc[:] = acc * scale
            if extra == "bias":
                acc[:] = acc + t.load(bias, every)
            weights = t.exp2(scores - top)
            acc += weights.cast(t.BF16) @ t.load(v, n, every)
            if extra == "tile":
                acc[:] = acc + t.sum_along(weights, "n")
                t.store(sums, rows, tile=t.sum_along(acc, "e"))
        t.store(o, rows, every, tile=acc + t.maximum(highest, 0.0))
        t.store(sums, rows, tile=highest)

    arrays = {"q": t.array(t.BF16, "m d"), "k": t.array(t.BF16, "n d")}
    arrays |= {"v": t.array(t.BF16, "n e"), "o": t.array(t.FP32, "m e")}
    arrays |= {"sums": t.array(t.FP32, "m"), "bias": t.array(t.FP32, "e")}
    return t.trace(body, arrays, name="led")


def policy(order="lcsf", **plan):
    return Policy(order, LaunchPlan(**{"split": "e", "store": "direct", **plan}), 2, 2)


def lowered(order="lcsf", **plan):
    return lower(program(), schedule_for(program(), policy(order, **plan)), verified)


def inputs(m, n, seed=0):
    random = np.random.default_rng(seed)
    whole = {"q": (m, 32), "k": (n, 32), "v": (n, 128)}
    arrays = {x: random.integers(-2, 3, shape).astype(float) for x, shape in whole.items()}
    rest = {"o": (m, 128), "sums": (m,), "bias": (128,)}
    return arrays | {x: np.zeros(shape) for x, shape in rest.items()}


def test_one_group_makes_the_weights_and_both_have_columns():
    block = lowered()
    text = block_text(block)
    assert parse_block(text, program()) == block
    first, second = (steps_of(text, f"compute{n}") for n in range(2))
    assert [step for step in first if step.startswith(("Issue", "Meet", "Take"))] == [
        "Issue mma", "Meet exp2_2", "Meet exp2_2", "Issue mma",
    ]  # fmt: skip
    assert second == [
        "Meet exp2_2", "Meet exp2_2", "Take exp2", "Run mul", "Take cast", "Wait v", "Issue mma",
        "Join <= 0", "Release v",
    ]  # fmt: skip
    assert block.takers(block.ring("v")) == 2 and block.takers(block.ring("q")) == 1


@pytest.mark.parametrize("order", ["lcsf", "lcsf-early", "inflight"])
def test_simulated_groups_give_what_the_program_says(order):
    for seed, (m, n) in enumerate(((130, 70), (64, 0), (200, 33))):
        arrays = inputs(m, n, seed)
        got = simulate(lowered(order), arrays, seed=seed)
        want = t.interpret(program(), arrays)
        assert all(np.array_equal(got[x], want[x]) for x in ("o", "sums"))


@pytest.mark.parametrize(
    ("number", "fault"),
    [(0, r"may still take|under a matmul|writes exp2_2"), (1, "before the groups have met")],
)
def test_a_meeting_that_is_missing_is_found(number, fault):
    broken = parse_block(without_meeting(block_text(lowered()), number), program())
    with pytest.raises(CheckFailed, match=fault):
        for seed in range(20):
            simulate(broken, inputs(200, 130, seed), seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r" +Take exp2\.\d+\n", ""),
        (r"Take (exp2\.\d+)", r"Run \1"),
        (r"Run (exp2\.\d+)", r"Take \1"),
        (r"( +)Wait v\n( +Issue.*\n +Join.*\n +Release v\n +straight)", r"\1Wait k\n\2"),
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
    assert source.text.count(meet) == 8
    bare = replace(source, text=source.text.replace(meet, ""))
    library = emulate.compile_all([source, bare], None)
    for seed, (m, n) in enumerate(((130, 70), (64, 0))):
        arrays = inputs(m, n, seed)
        got = emulate.run(library, 0, source, block.placement.program, arrays, blocks=2)
        want = t.interpret(program(), arrays)
        assert all(np.allclose(got[x], want[x], rtol=1e-6) for x in ("o", "sums"))
    with pytest.raises(CheckFailed):
        emulate.run(library, 1, bare, block.placement.program, inputs(130, 70), blocks=2)


def test_with_two_slots_groups_meet_once_an_iteration():
    block = lowered("overlapped", staged_slots=2)
    text, twice = block_text(block), block_text(lowered("overlapped"))
    for role in ("compute0", "compute1"):
        once, again = (steps_of(one, role).count("Meet exp2_2") for one in (text, twice))
        assert once >= 1 and again == 2 * once
    source = emit(block)
    taken = re.search(r"// Take cast.*\n +(\w+_turn \^= 4096;)", source.text)
    assert taken is not None
    late = replace(source, text=source.text.replace(taken[0], ""))
    library = emulate.compile_all([source, late], None)
    for seed, (m, n) in enumerate(((130, 200), (64, 0), (64, 33))):
        arrays = inputs(m, n, seed)
        want = t.interpret(program(), arrays)
        got = simulate(block, arrays, seed=seed)
        assert all(np.array_equal(got[x], want[x]) for x in ("o", "sums"))
        got = emulate.run(library, 0, source, block.placement.program, arrays, blocks=2)
        assert all(np.allclose(got[x], want[x], rtol=1e-6) for x in ("o", "sums"))
    with pytest.raises(CheckFailed):
        emulate.run(library, 1, late, block.placement.program, inputs(130, 200), blocks=2)
    broken = parse_block(without_meeting(text, 0), program())
    with pytest.raises(CheckFailed, match=r"before the groups have met|writes exp2_2"):
        for seed in range(20):
            simulate(broken, inputs(200, 130, seed), seed=seed)


def test_what_does_not_fit_is_refused():
    def scheduled(made, one):
        return lower(made, schedule_for(made, one))

    with pytest.raises(InputError, match="vectors along these columns"):
        scheduled(program("bias"), policy())
    with pytest.raises(InputError, match="along 'e', which the schedule splits"):
        scheduled(program("tile"), policy())
    with pytest.raises(InputError, match="one group leads"):
        scheduled(program(), policy("pingpong"))
    with pytest.raises(InputError, match="stores from registers"):
        emit(lowered(store="tma"))
    with pytest.raises(InputError, match="split columns"):
        build(program(), schedule_for(program(), policy()), "sm_80")
