"""Axes with two layouts, operands that all groups write, and vectors that a group shares."""

from dataclasses import replace

import numpy as np
import pytest

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.axes import separate_axes
from warploom.codegen.ir.layout import vector_tile
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.spec import verify
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import PASSES, lower, verified
from warploom.errors import CheckFailed, InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile import TileType
from warploom.tile.interpret import interpret


def program(rows=128, columns=0):
    """d is a column axis of one result and a row axis of the other, or with `columns` of it too,
    which has rows for one group then."""

    def body(a, b, bias, c, e):
        m = t.span(0, rows)
        left = t.load(a, m, t.span(0, 128))
        acc = t.zeros(m=rows, d=128)
        for i in t.loop(t.cdiv(t.size("n"), 64)):
            n = t.span(i * 64, 64)
            right, row = t.load(b, n, t.span(0, 128)), t.load(bias, n)
            scores = (left @ right + row).cast(t.BF16)
            acc += scores @ right
            if columns:
                some = t.load(a, m, t.span(0, columns, "f"))
                t.store(e, n, t.span(0, columns, "f"), tile=scores @ some, add=True)
            else:
                t.store(e, t.span(0, 128), n, tile=left @ scores, add=True)
        t.store(c, m, t.span(0, 128), tile=acc)

    arrays = {"a": t.array(t.BF16, "m d"), "b": t.array(t.BF16, "n d")}
    arrays |= {"bias": t.array(t.FP32, "n"), "c": t.array(t.FP32, "m d")}
    arrays["e"] = t.array(t.FP32, "n d" if columns else "d n")
    return t.trace(body, arrays, name="both")


def schedule(vectors=False, **plan):
    return schedule_for(
        program(), Policy("multistage", LaunchPlan(split="m", **plan), groups=2, vectors=vectors)
    )


def test_columns_get_a_name_of_their_own():
    kinds = {op.dst.name: str(op.dst.type) for op in separate_axes(program()).ops() if op.dst}
    assert kinds["acc"] == "fp32[m=128, d_columns=128]"
    assert kinds["product_1"] == "fp32[d=128, n=64]"
    assert kinds["a_t"] == "bf16[m=128, d=128]", "what lies in shared memory keeps its names"
    plain = gemm(GemmConfig())
    assert separate_axes(plain) is plain


def test_rows_of_a_product_over_the_split_axis_are_shared_out():
    placement = place(program(), "m", 2)
    assert placement.splits == {"m", "d"} and placement.spread == {"bias_t"}
    (staged,) = placement.staged
    assert placement.common == {staged}
    assert place(program(64), "", 1).common == frozenset()


def test_columns_are_shared_out_where_a_group_would_have_less_than_64_rows():
    placement = place(program(columns=128), "m", 2)
    assert placement.splits == {"m", "f"}
    assert placement.local(TileType(t.FP32, (("n", 64), ("f", 128)))).shape == (64, 64)
    with pytest.raises(InputError, match=r"axis 'n' of .* is 64 long; over 2 groups"):
        place(program(columns=192), "m", 2)


@pytest.mark.parametrize(
    ("name", "before", "added", "after"),
    [
        ("shares", "Issue mma.4", "Share bias_t", "Run cast.6"),
        ("meetings", "Share bias_t", "Meet add_1", "Run cast.6"),
        ("meetings", "Issue mma.7", "Meet add_1", "Issue mma.8"),
    ],
)
def test_a_pass_adds_lines_to_the_text_of_both_groups_and_changes_none(name, before, added, after):
    seen = {}
    lower(program(), schedule(), lambda one, block: seen.setdefault(one, block_text(block)))
    given = list(seen.values())[list(seen).index(name) - 1]
    found = block_text(PASSES[name](parse_block(given, program()))).splitlines()
    new = [place for place, line in enumerate(found) if line.strip() == added]
    around = [(found[place - 1].strip(), found[place + 1].strip()) for place in new]
    assert around.count((before, after)) == 2
    assert [line for line in found if line.strip() != added] == given.splitlines()


def test_groups_meet_around_what_they_write_together_and_share_vectors():
    block = lower(program(), schedule(), verified)
    text = block_text(block)
    assert parse_block(text, program()) == block
    steady = text.split("role compute0")[1].split("steady\n")[1].split("straight")[0]
    steps = [line.split(":")[0].split(".")[0].strip() for line in steady.strip().splitlines()]
    assert steps == [
        "Run load", "Wait b", "Issue mma", "Share bias_t", "Meet add_1", "Join <= 0", "Run cast",
        "Issue mma", "Meet add_1", "Issue mma", "Join <= 0", "Run store_add", "Release b",
    ]  # fmt: skip


def steps_of(**changes):
    """The steps of a group's iteration under other schedules."""
    block = lower(program(), schedule(**changes), verified)
    text = block_text(block)
    assert parse_block(text, program()) == block
    steady = text.split("role compute0")[1].split("steady\n")[1]
    steady = steady.split("epilogue")[0].split("straight")[0]
    return [step.split(":")[0].split(".")[0].strip() for step in steady.strip().splitlines()]


def test_with_two_slots_for_what_they_write_groups_meet_once():
    meets = [step for step in steps_of(staged_slots=2) if step.startswith("Meet")]
    assert meets == ["Meet add_1"]
    with pytest.raises(InputError, match="staged_slots=3, expected 1 or 2"):
        LaunchPlan(staged_slots=3)


IN_TURN = {"staged_slots": 2, "store_warps": True, "in_turn": True}


def test_groups_make_the_whole_of_a_product_over_the_split_axis_in_turn():
    placement = place(program(), "m", 2, in_turn=True)
    assert placement.splits == {"m"}
    product, store = (op for op in placement.program.ops() if op.id in placement.in_turn)
    assert product.kind == "mma" and store.kind == "store_add"
    assert placement.local(product.dst.type).shape == (128, 64)
    assert [placement.does(product, 1, n) for n in range(3)] == [False, True, False]
    steps = steps_of(**IN_TURN)
    at = steps.index("Join in turn <= 0")
    assert steps[at - 1 : at + 2] == ["Meet add_1", "Join in turn <= 0", "Issue mma"]


def in_turn_case(**changes):
    """(block program, arrays) of groups in turn, in a task of three iterations."""
    random = np.random.default_rng(0)
    sizes = {"m": 128, "n": 192, "d": 128}
    values = {
        array.name: random.integers(-2, 3, [sizes[dim] for dim in array.dims]).astype(np.float32)
        for array in program().arrays
    }
    values |= {name: np.zeros_like(values[name]) for name in ("c", "e")}
    return lower(program(), schedule(**IN_TURN, **changes), verified), values


def test_iterations_in_turn_give_the_sums_and_none_is_left_out():
    block, values = in_turn_case()
    want = interpret(program(), values)
    for seed in range(3):
        got = simulate(block, values, seed=seed)
        assert (got["e"] == want["e"]).all() and (got["c"] == want["c"]).all()

    def without(kind, part):
        def change(role, section):
            if role.part != part or not hasattr(section, "steady"):
                return [section]
            kept = (step for step in section.steady if not str(step).startswith(kind))
            return [replace(section, steady=tuple(kept))]

        return block.rewritten(change)

    with pytest.raises(CheckFailed, match=r"compute1 does not have store_add"):
        verify(without("Run store_add", 1), list(PASSES))
    with pytest.raises(CheckFailed, match="while mma"):
        verify(without("Join <=", 0), list(PASSES))
    with pytest.raises(CheckFailed, match=r"race: .* before the groups have met|deadlock"):
        for seed in range(8):
            simulate(without("Meet", 1), values, seed=seed)


def test_what_groups_cannot_do_in_turn_is_refused():
    with pytest.raises(InputError, match="expected several groups that share out rows"):
        place(program(), "m", 1, in_turn=True)
    with pytest.raises(InputError, match="with fence_at_meeting or in_turn"):
        LaunchPlan(in_turn=True, store_warps=True)

    def summed(a, b, c):
        m = t.span(0, 128)
        left, total = t.load(a, m, t.span(0, 128)), t.zeros(d=128, n=64)
        for i in t.loop(t.cdiv(t.size("n"), 64)):
            right = t.load(b, t.span(i * 64, 64), t.span(0, 128))
            total += left @ (left @ right).cast(t.BF16)
        t.store(c, t.span(0, 128), t.span(0, 64, "n"), tile=total)

    arrays = {"a": t.array(t.BF16, "m d"), "b": t.array(t.BF16, "n d"), "c": t.array(t.FP32, "d e")}
    with pytest.raises(InputError, match="no sum over iterations"):
        place(t.trace(summed, arrays, name="summed"), "m", 2, in_turn=True)


def test_vectors_of_the_producer_have_a_ring_and_nobody_shares_them():
    steps = steps_of(vectors=True)
    assert "Wait bias" in steps and "Release bias" in steps
    assert not {step for step in steps if step.startswith("Share") or step == "Run load"}
    block = lower(program(), schedule(vectors=True))
    assert (
        block.copied_bytes(block.ring("bias"), "") == 64 * 4
        and block.placement.spread == frozenset()
    )
    assert "into bias" in block_text(block).split("role compute0")[0].split("role load")[1]


def test_vectors_that_the_copy_engine_cannot_bring_are_refused():
    with pytest.raises(InputError, match="brings at most 256 elements, a multiple of 16 B"):
        vector_tile(TileType(t.FP32, (("n", 260),)))
    with pytest.raises(InputError, match="a multiple of 16 B"):
        vector_tile(TileType(t.BF16, (("n", 60),)))
    assert vector_tile(TileType(t.FP32, (("n", 60),))).bytes == 240


@pytest.mark.parametrize("columns", [0, 128])
@pytest.mark.parametrize("seed", range(3))
def test_what_groups_write_together_is_right_in_every_order(seed, columns):
    random = np.random.default_rng(seed)
    arrays = {"a": random.integers(-2, 3, (128, 128)), "b": random.integers(-2, 3, (200, 128))}
    arrays |= {"bias": random.integers(-2, 3, 200), "c": np.zeros((128, 128))}
    arrays["e"] = np.zeros((200, 128) if columns else (128, 200))
    plan = LaunchPlan(split="m", staged_slots=2)
    made = program(columns=columns)
    order = schedule_for(made, Policy("multistage", plan, groups=2, vectors=True))
    got = simulate(lower(made, order, verified), arrays, seed=seed)
    want = t.interpret(made, arrays)
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("old", "new"), [("Meet add_1", "Meet acc"), ("Share bias_t", "Share acc")]
)
def test_the_text_of_other_tiles_is_refused(old, new):
    text = block_text(lower(program(), schedule()))
    with pytest.raises(InputError, match=r"into shared memory|no vector"):
        parse_block(text.replace(old, new), program())


def _nested(a, c):
    acc = t.zeros(m=64, n=64)
    for i in t.loop(2):
        for j in t.loop(2):
            left = t.load(a, t.span(i * 64, 64), t.span(j * 64, 64, "k"))
            acc += left @ t.load(a, t.span(j * 64, 64, "n"), t.span(i * 64, 64, "k"))
    t.store(c, t.span(0, 64), t.span(0, 64), tile=acc)


def _alone(a, c):
    m, n = t.span(0, 64), t.span(0, 64, "n")
    t.store(c, m, t.span(0, 64), tile=t.load(a, m, t.span(0, 64)) @ t.load(a, n, t.span(0, 64)))


@pytest.mark.parametrize(
    ("body", "message"),
    [(_nested, r"make one loop of both: for n in loop\(a \* b\)"), (_alone, r"in loop\(1\)")],
)
def test_what_no_schedule_is_for_says_what_to_write(body, message):
    arrays = {"a": t.array(t.BF16, "m k"), "c": t.array(t.FP32, "m n")}
    with pytest.raises(InputError, match=message):
        lower(
            traced := t.trace(body, arrays),
            schedule_for(traced, Policy("inflight", LaunchPlan(split="m"), groups=1, depth=2)),
        )


def test_a_loop_of_one_step_has_a_matmul():
    def body(a, c):
        for _ in t.loop(1):
            _alone(a, c)

    arrays = {"a": t.array(t.BF16, "m k"), "c": t.array(t.FP32, "m n")}
    traced = t.trace(body, arrays)
    assert lower(
        traced,
        schedule_for(traced, Policy("inflight", LaunchPlan(split="m"), groups=1, depth=2)),
        verified,
    )
