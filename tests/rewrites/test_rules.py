"""Every rule keeps the meaning of textbooks: in float64, to its last digits."""

import numpy as np
import pytest
from tests.rewrites.textbooks import attention, matmul

from warploom.errors import CheckFailed
from warploom.kernels.attention.program import AttentionConfig, textbook
from warploom.rewrites import rescaling
from warploom.rewrites.accumulators import cluster_reduce, swap_operands
from warploom.rewrites.arithmetic import divide_once_a_row
from warploom.rewrites.check import check_meaning
from warploom.rewrites.early_factors import load_factors_early
from warploom.rewrites.exponents import in_powers_of_two
from warploom.rewrites.in_place import mask_in_place
from warploom.rewrites.masks import skip_masked_blocks, split_mask_loop
from warploom.rewrites.online_softmax import find
from warploom.rewrites.ranges import least
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.rewrites.rescaling import lazy_rescale, optimistic_rescale
from warploom.tile import E4M3, FP16, Loop, Op, exp2, interpret, sum_along, verify

SHAPES = [(64, 64), (130, 200), (1, 70), (200, 200), (100, 37)]


def arrays_of(program, seed=0, spread=1.0, **sizes):
    random = np.random.default_rng(seed)
    known = {"batch": 1, "heads": 2, "d": 64, **sizes}
    return {
        one.name: random.normal(size=[known[dim] for dim in one.dims]) * spread
        for one in program.arrays
    }


def assert_same(program, rewritten, arrays):
    verify(rewritten)
    check_meaning(program, rewritten, arrays)


FORMS = [
    {"mask": "causal"},
    {"mask": "full", "natural": False, "early": False, "guard": True},
    {"mask": "window", "guard": True},
    {"mask": "causal", "lse": True, "dtype": FP16},
    {"mask": "causal", "natural": False},
    {"mask": "window", "sinks": True},
    {"mask": "causal", "lse": True, "sinks": True},
]
CHAINS = {
    "powers": [in_powers_of_two],
    "skip": [skip_masked_blocks],
    "split": [skip_masked_blocks, split_mask_loop],
    "in place": [in_powers_of_two, mask_in_place],
    "lazy": [in_powers_of_two, lambda p: lazy_rescale(p, 8.0)],
    "optimistic": [in_powers_of_two, lambda p: optimistic_rescale(p, 12.0)],
    "all, lazy": [
        in_powers_of_two,
        skip_masked_blocks,
        mask_in_place,
        split_mask_loop,
        lambda p: lazy_rescale(p, 8.0),
        divide_once_a_row,
    ],
    "all, optimistic": [
        in_powers_of_two,
        skip_masked_blocks,
        mask_in_place,
        split_mask_loop,
        lambda p: optimistic_rescale(p, 10.0),
        divide_once_a_row,
    ],
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_attention_means_the_same(form, chain) -> None:
    program = attention(**form)
    rewritten = program
    applied = 0
    for rule in CHAINS[chain]:
        try:
            rewritten = rule(rewritten)
            applied += 1
        except NotApplicable:
            assert rule in (in_powers_of_two, split_mask_loop)  # see the next tests
    if not applied:
        pytest.skip("no rule of the chain has a place here")
    for number, (rows, keys) in enumerate(SHAPES):
        arrays = arrays_of(program, number, rows=rows, keys=keys)
        assert_same(program, rewritten, arrays)


@pytest.mark.parametrize("chain", ["lazy", "all, lazy", "all, optimistic"])
@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_scores_that_rise_and_jump_keep_their_meaning(chain, spread) -> None:
    program = attention(mask="causal")
    rewritten = program
    for rule in CHAINS[chain]:
        rewritten = rule(rewritten)
    arrays = arrays_of(program, 7, rows=200, keys=200)
    steps = np.linspace(0.1, spread, 200)
    arrays["k"] *= steps[None, None, :, None]
    assert_same(program, rewritten, arrays)


def test_a_bias_is_loaded_before_the_sums_are_made() -> None:
    """And what the epilogue reads beside it, a tile, stays where it is."""
    program = matmul(bias=True, activation="gelu", residual=True)
    rewritten = load_factors_early(program)
    kinds = [item.array.name for item in rewritten.body if isinstance(item, Op) and item.array]
    (place,) = (n for n, item in enumerate(rewritten.body) if isinstance(item, Loop))
    before = [one.array.name for one in rewritten.body[:place] if one.array]
    assert before == ["bias"] and sorted(kinds) == ["bias", "c", "residual"]
    assert_same(program, rewritten, arrays_of(program, m=70, n=130, k=50))
    parts = cluster_reduce(rewritten, 2)
    assert_same(program, parts, arrays_of(program, m=70, n=130, k=50))


def test_rules_that_have_no_place_say_so() -> None:
    canonical = attention(natural=False, early=False, guard=True)
    with pytest.raises(NotApplicable, match="no online softmax with exp"):
        in_powers_of_two(canonical)
    with pytest.raises(NotApplicable, match="no loop has blocks that its mask leaves alone"):
        split_mask_loop(attention(mask="window"))
    with pytest.raises(NotApplicable, match="powers of 2"):
        lazy_rescale(attention(), 8.0)
    with pytest.raises(NotApplicable, match="expected above 0"):
        lazy_rescale(canonical, 0.0)
    with pytest.raises(NotApplicable, match="no loop has blocks"):
        skip_masked_blocks(matmul())
    with pytest.raises(NotApplicable, match="in a loop that should add up products"):
        swap_operands(attention())
    with pytest.raises(NotApplicable, match="in a loop that should add up products"):
        load_factors_early(attention())
    with pytest.raises(NotApplicable, match="no tile is divided"):
        divide_once_a_row(matmul())


def test_an_attention_loop_that_does_more_is_left_alone() -> None:
    """A second reader of the weights, or of the running maximum, is part of no online softmax."""
    program = attention(natural=False, early=False, guard=True)
    (softmax,) = find(program)
    assert softmax.masked and softmax.scale is not None and softmax.axis == "keys"

    class Twice(Replay):
        def op(self, op) -> None:
            self.copy(op)
            if op is softmax.packed:  # something else is made of the weights
                total = self.tile(softmax.total)
                total[:] = total + sum_along(self.tile(op.srcs[0]) * 2.0, "keys")

    assert not find(Twice(program).run())


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "activation": "gelu"}, {"residual": True}], ids=str
)
@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 130, 70), (1, 9, 33)])
def test_matmuls_mean_the_same(options, shape) -> None:
    program = matmul(**options)
    sizes = dict(zip("mnk", shape, strict=True))
    arrays = arrays_of(program, 3, **sizes)
    swapped = swap_operands(program)
    assert_same(program, swapped, arrays)
    # The same products in the same order: every bit in the types of the program, too.
    assert np.array_equal(interpret(program, arrays)["c"], interpret(swapped, arrays)["c"])
    for parts, width in ((2, None), (4, 16), (3, 32)):
        assert_same(program, cluster_reduce(program, parts, width), arrays)
        assert_same(program, cluster_reduce(swapped, parts, width), arrays)


def test_sums_that_are_more_than_sums_of_products_are_left_alone() -> None:
    with pytest.raises(NotApplicable, match="already cut"):
        cluster_reduce(cluster_reduce(matmul(), 2), 2)
    with pytest.raises(NotApplicable, match="at least 2"):
        cluster_reduce(matmul(), 1)


@pytest.mark.parametrize(
    "program", [attention(), attention(lse=True, mask="window"), matmul(bias=True)]
)
def test_a_replay_without_a_rule_gives_the_program(program) -> None:
    assert Replay(program).run() == program


@pytest.mark.parametrize("rise", [0.0, 0.5, 40.0])
def test_narrow_weights_that_saturate_are_weighed_again(rise, monkeypatch) -> None:
    """Scores rise so much from block to block, slowly or at once; without the second weighing
    weights would be cut at 448."""
    program = textbook(AttentionConfig(dtype=E4M3, head_dim=32, tile=(64, 64), scale=1.0))
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "rows": 64, "keys": 1024, "places": 1024}
    arrays = arrays_of(program, 3, **sizes, d=32, one=1)
    for name in ("scale_q", "scale_k", "scale_v"):
        arrays[name][:] = 1.0
    arrays["q"] *= 0.25
    arrays["q"][..., 0] = 1.0
    arrays["k"][..., 0] = np.arange(1024)[None, None] // 64 * rise
    want = interpret(program, arrays)["o"]
    found = interpret(optimistic_rescale(program, 12.0), arrays)["o"]
    assert np.abs(found - want).max() < 0.06 * np.abs(want).max()
    monkeypatch.setattr(rescaling, "bearable", lambda kind: 2.0**100)
    lost = interpret(optimistic_rescale(program, 12.0), arrays)["o"]
    assert (np.abs(lost - want).max() > 0.1 * np.abs(want).max()) == (rise == 0.5)


def test_scores_that_something_else_reads_are_not_weighed_in_place() -> None:
    program = attention(natural=False, early=False, guard=True)
    (softmax,) = find(program)

    class Read(Replay):
        def op(self, op) -> None:
            self.copy(op)
            if op is softmax.own[-1]:  # the scores once more, after they were weighed
                total = self.tile(softmax.total)
                total[:] = total + sum_along(self.tile(softmax.scores) * 0.0, "keys")

    read = Read(program).run()
    with pytest.raises(NotApplicable, match="reads the scores"):
        optimistic_rescale(read, 12.0)


@pytest.mark.parametrize("rule", ["scale", "bound", "sum"])
def test_a_rule_that_breaks_the_meaning_is_seen(rule, monkeypatch) -> None:
    """Planted faults: another factor, one block too few, a sum without its rescaling."""
    program = attention()
    if rule == "scale":
        monkeypatch.setattr("warploom.rewrites.exponents.LOG2E", 1.4426)
        wrong = in_powers_of_two(program)
    elif rule == "bound":
        monkeypatch.setattr(
            "warploom.rewrites.masks.least", lambda bounds, other: least(bounds, other) - 1
        )
        wrong = skip_masked_blocks(program)
    else:
        monkeypatch.setattr(
            "warploom.rewrites.rescaling.exp2",
            lambda x: exp2(x) if x.type.axes[1:] else exp2(x * 0.5),
        )
        wrong = optimistic_rescale(in_powers_of_two(program), 12.0)
    arrays = arrays_of(program, 1, rows=200, keys=200)
    arrays["k"] *= np.linspace(0.1, 30.0, 200)[None, None, :, None]  # scores that rise
    with pytest.raises(CheckFailed, match="difference of"):
        check_meaning(program, wrong, arrays)
