"""What each rule requires, one requirement at a time: without it the rule has no place, or the
program it gives still means the same."""

from dataclasses import replace

import numpy as np
import pytest
from tests.rewrites.test_rules import SHAPES, arrays_of, assert_same
from tests.rewrites.textbooks import attention, matmul

from warploom import tile as t
from warploom.errors import CheckFailed
from warploom.kernels.attention.program import AttentionConfig, textbook
from warploom.rewrites.accumulators import cluster_reduce, swap_operands
from warploom.rewrites.arithmetic import divide_once_a_row
from warploom.rewrites.check import check_meaning
from warploom.rewrites.exponents import in_powers_of_two
from warploom.rewrites.in_place import mask_in_place
from warploom.rewrites.masks import masked_loops, skip_masked_blocks, split_mask_loop
from warploom.rewrites.online_softmax import find
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.rewrites.rescaling import lazy_rescale, optimistic_rescale


class Beside(Replay):
    """A program with something done after one of its ops."""

    def __init__(self, program, at, do) -> None:
        super().__init__(program)
        self.at, self.do = at, do

    def op(self, op) -> None:
        self.copy(op)
        if op is self.at:
            self.do(self)


def ops_of(program, kind):
    return [op for op in program.ops() if op.kind == kind]


def edited(program, wanted, **changes):
    """The program with one op changed."""

    def visit(body):
        return tuple(
            replace(item, body=visit(item.body))
            if isinstance(item, t.Loop)
            else replace(item, **changes)
            if item is wanted
            else item
            for item in body
        )

    return replace(program, body=visit(program.body))


def number_of(program, var):
    """The op that makes a number."""
    (op,) = [op for op in ops_of(program, "fill") if op.dst == var]
    return op


# ---- the check of meaning


def scaled(factor):
    def body(x, y):
        t.store(y, t.span(0, 8), tile=t.load(x, t.span(0, 8)) * factor)

    return t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")}, name="scaled")


def logs():
    def body(x, y):
        t.store(y, t.span(0, 8), tile=t.log(t.load(x, t.span(0, 8))) * 0.0)

    return t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")}, name="logs")


@pytest.mark.parametrize("off", [1e-3, 1e-6, 1e-8])
def test_what_is_off_by_more_than_float64_rounds_is_refused(off) -> None:
    arrays = {"x": np.arange(1.0, 9.0), "y": np.zeros(8)}
    with pytest.raises(CheckFailed, match="difference of"):
        check_meaning(scaled(1.0), scaled(1.0 + off), arrays)
    assert check_meaning(scaled(1.0), scaled(1.0), arrays) == 0.0
    assert check_meaning(scaled(1.0), scaled(1.0 + 1e-12), arrays) == pytest.approx(1e-12, rel=0.01)


def test_a_result_that_is_no_number_is_no_result() -> None:
    arrays = {"x": np.arange(-3.0, 5.0), "y": np.zeros(8)}
    with pytest.raises(CheckFailed, match="difference of nan"):
        check_meaning(scaled(0.0), logs(), arrays)
    # Where the textbook gives no number, anything may stand.
    assert check_meaning(logs(), scaled(0.0), arrays) == 0.0


# ---- loops whose masked blocks change nothing


def test_a_mask_that_hides_with_a_number_hides_no_block() -> None:
    """Scores of -3 count: a block of them has weights."""
    program = attention()
    (mask,) = [op for op in ops_of(program, "where") if op.srcs[0].type.axes[1:]]
    assert masked_loops(program)
    other = edited(program, number_of(program, mask.srcs[2]), value=-3.0)
    for rule in (skip_masked_blocks, split_mask_loop):
        rule(program)
        with pytest.raises(NotApplicable):
            rule(other)


def count(replay, softmax) -> None:
    total = replay.tile(softmax.total)
    total[:] = total + 1.0


def add_other_products(replay, softmax) -> None:
    (var,) = [var for var in softmax.sums if var != softmax.total]
    acc = replay.tile(var)
    values = replay.tile(ops_of(replay.program, "load")[-1].dst)
    ones = t.full(1.0, values.type.dtype, **dict(softmax.scores.type.axes))
    acc += ones @ values


def store_a_block(replay, softmax) -> None:
    target = replay.program.array("o")
    tile = t.zeros(rows=64, d=64).cast(target.dtype)
    t.store(target, 0, 0, t.span(0, 64), t.span(0, 64), tile=tile)


def carry(replay, softmax) -> None:
    """A tile that the loop keeps for itself."""
    outside = replay.tile(ops_of(replay.program, "load")[0].dst)
    outside[:] = outside * 0.5


@pytest.mark.parametrize("do", [count, add_other_products, store_a_block, carry])
def test_a_loop_that_does_more_keeps_its_masked_blocks(do) -> None:
    program = attention(guard=True)
    (softmax,) = find(program)
    last = softmax.loop.body[-1]
    other = Beside(program, last, lambda replay: do(replay, softmax)).run()
    for rule in (skip_masked_blocks, split_mask_loop):
        with pytest.raises(NotApplicable):
            rule(other)


def test_positions_that_change_after_they_were_made_tell_nothing() -> None:
    program = attention(mask="causal")
    row_at = next(op for op in ops_of(program, "coordinate") if op.axis == "rows")

    def later(replay) -> None:
        replay.tile(row_at.dst)[:] = replay.tile(row_at.dst) + 64

    moved = Beside(program, row_at, later).run()
    assert moved != program
    rewritten = skip_masked_blocks(moved)
    for number, (rows, keys) in enumerate(SHAPES):
        assert_same(moved, rewritten, arrays_of(moved, number, rows=rows, keys=keys))


# ---- online softmaxes


def test_one_number_scales_the_weights_and_their_maximum() -> None:
    """With another number in one of the two places it is no such softmax."""
    program = attention(early=False, natural=False, guard=True)
    (softmax,) = find(program)
    assert softmax.scale == 0.125
    factors = [op for op in ops_of(program, "fill") if op.value == 0.125]
    assert len(factors) == 2
    for op in factors:
        assert not find(edited(program, op, value=0.25))


def test_the_base_of_rows_without_scores_is_0() -> None:
    program = attention(early=False, natural=False, guard=True)
    (softmax,) = find(program)
    assert softmax.under is not None
    for place, other in ((1, 1.0), (1, -1e30)):
        number = number_of(program, softmax.under.srcs[place])
        assert number.value == 0.0
        assert not find(edited(program, number, value=other))


@pytest.mark.parametrize("factor", [-0.125, 0.0])
def test_scores_times_a_number_that_is_not_above_0_keep_their_maximum(factor) -> None:
    program = attention(mask="full")
    (scaling,) = [op for op in ops_of(program, "fill") if op.value == 0.125]
    turned = edited(program, scaling, value=factor)
    arrays = arrays_of(turned, 5, rows=64, keys=200)
    arrays["k"] *= 20.0
    assert_same(turned, in_powers_of_two(turned), arrays)


def test_scaled_scores_that_something_else_reads_stay() -> None:
    program = attention(mask="full")
    (softmax,) = find(program)
    scaling = next(op for op in softmax.loop.body if op.kind == "mul")
    (var,) = [var for var in softmax.sums if var != softmax.total]

    def read(replay) -> None:
        acc = replay.tile(var)
        acc[:] = acc + t.sum_along(replay.tile(scaling.dst), "keys")

    other = Beside(program, scaling, read).run()
    assert_same(other, in_powers_of_two(other), arrays_of(other, 2, rows=64, keys=200))


# ---- rescaling


def test_weights_of_8_bits_do_not_saturate() -> None:
    """In the program's own types, where scores rise from block to block by less than the threshold:
    weights above 448 would all be 448."""
    program = textbook(AttentionConfig(dtype=t.E4M3))
    arrays = arrays_of(program, 4, rows=128, keys=512, d=128, kv_heads=2, one=1, places=512)
    for name in ("q", "scale_q", "scale_k", "scale_v"):
        arrays[name][:] = 1.0
    arrays["k"][:] = np.linspace(0.0, 0.9, 512)[None, None, :, None]
    right = t.interpret(program, arrays)["o"]
    found = t.interpret(lazy_rescale(program, 15.0), arrays)["o"]
    assert np.abs(found - right).max() < 0.05 * np.abs(right).max()


def test_weights_whose_sum_only_normalises_are_rounded_before_they_are_summed() -> None:
    """In one loop or, after a split, in two of them; not where the sum is itself a result."""

    def rounds(program) -> bool:
        weighed = optimistic_rescale(program, 12.0)
        back = [op for op in ops_of(weighed, "cast") if op.dst.type.dtype is t.FP32]
        return any(op.srcs[0].type.axes[1:] for op in back)

    for lse in (False, True):
        program = in_powers_of_two(attention(lse=lse))
        split = split_mask_loop(skip_masked_blocks(program))
        assert len(find(split)) == 2
        assert rounds(program) is rounds(split) is not lse


def test_a_threshold_is_above_0_and_no_higher_than_weights_bear() -> None:
    canonical = attention(natural=False, early=False, guard=True)
    for rule in (lazy_rescale, optimistic_rescale):
        rule(canonical, 15.0)
        for wrong in (-1.0, 0.0, 15.5):
            with pytest.raises(NotApplicable, match="expected above 0, at most 15"):
                rule(canonical, wrong)


# ---- sums of products


def test_sums_begin_at_0() -> None:
    program = matmul()
    other = edited(program, number_of(program, ops_of(program, "mma")[0].srcs[2]), value=1.0)
    for rule in (swap_operands, lambda p: cluster_reduce(p, 2)):
        rule(program)
        with pytest.raises(NotApplicable, match="a sum that begins at 1"):
            rule(other)


@pytest.mark.parametrize("along", [t.sum_along, t.max_along])
def test_an_epilogue_goes_along_what_a_block_has_whole(along) -> None:
    """The last axis is cut into parts; along the other one each block has all of it."""

    def normalised(axis):
        def body(a, b, c):
            t.grid(m=1)
            rows, cols = t.span(0, 64), t.span(0, 64)
            acc = t.zeros(m=64, n=64)
            for i in t.loop(4):
                depth = t.span(i * 16, 16)
                acc += t.load(a, rows, depth) @ t.load(b, depth, cols)
            t.store(c, rows, cols, tile=(acc - along(acc, axis)).cast(c.dtype))

        kinds = {"a": "m k", "b": "k n", "c": "m n"}
        arrays = {
            name: replace(matmul().array(name), dims=tuple(d.split())) for name, d in kinds.items()
        }
        return t.trace(body, arrays, name="normalised")

    with pytest.raises(NotApplicable, match="which blocks have in parts"):
        cluster_reduce(normalised("n"), 2)
    program = normalised("m")
    arrays = arrays_of(program, 6, m=64, n=64, k=64)
    assert_same(program, cluster_reduce(program, 2), arrays)


def test_only_a_division_by_a_vector_is_made_a_product() -> None:
    def body(x, y):
        rows, cols = t.span(0, 8), t.span(0, 16)
        tile = t.load(x, rows, cols)
        t.store(
            y, rows, cols, tile=tile / t.sum_along(tile, "n") + tile / (tile + 3.0) + tile / 7.0
        )

    program = t.trace(
        body, {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n")}, name="divided"
    )
    rewritten = divide_once_a_row(program)
    arrays = {"x": np.random.default_rng(0).uniform(1.0, 2.0, (8, 16)), "y": np.zeros((8, 16))}
    assert_same(program, rewritten, arrays)
    assert len(ops_of(program, "div")) == 3 and len(ops_of(rewritten, "div")) == 2


# ---- masks in place


def masks_of(program):
    """The choices of one element for each of scores."""
    return [op for op in ops_of(program, "where") if len(op.dst.type.axes) == 2]


def test_a_mask_is_written_over_the_product_that_it_is_of() -> None:
    program = attention(natural=False, early=False)
    assert all(op.dst != op.srcs[1] for op in masks_of(program))
    assert all(op.dst == op.srcs[1] for op in masks_of(mask_in_place(program)))


def test_a_mask_of_what_is_no_product_makes_another_tile() -> None:
    with pytest.raises(NotApplicable, match="alone in reading a matmul's result"):
        mask_in_place(attention())  # scores are scaled before they are masked


def test_a_product_that_is_read_behind_its_mask_stays() -> None:
    program = attention(natural=False, early=False)
    (mask,) = masks_of(program)
    (total, *_) = [op.dst for op in ops_of(program, "add") if len(op.dst.type.axes) == 1]

    def read(replay) -> None:
        sums = replay.tile(total)
        sums[:] = sums + t.sum_along(replay.tile(mask.srcs[1]) * 0.5, "keys")

    with pytest.raises(NotApplicable, match="alone in reading"):
        mask_in_place(Beside(program, mask, read).run())
