"""Attention on values made to be hard: each way of weighing against float64 and the exact one."""

from dataclasses import replace

import numpy as np
import pytest

from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import reference
from warploom.kernels.attention.variants import ATTENTION, choose_attention
from warploom.kernels.library import configure
from warploom.tile import BF16, FP16, interpret
from warploom.tile.interpret import bind

D, BLOCK = 32, 32
GUESS, LAZY, EXACT = {"optimistic_threshold": 12.0}, {"rescale_threshold": 8.0}, {"exact": True}
WAYS = {"optimistic_threshold": GUESS, "lazy": LAZY, "exact": EXACT}


def made(rows=64, keys=320, seed=0):
    rng = np.random.default_rng(seed)
    found = {"q": rng.normal(size=(1, 1, rows, D))}
    return found | {x: rng.normal(size=(1, 1, keys, D)) for x in "kv"}


def along(found, powers):
    """Scores that are so many powers of 2, by key, whatever the row."""
    found["q"][:], found["k"][:] = 0.0, 0.0
    # The factor of scores is 1 / sqrt(D), and e is taken for 2; two columns hold more bits.
    found["q"][..., :2] = 1.0
    scores = np.asarray(powers) * (D**0.5 * np.log(2.0))
    found["k"][0, 0, :, 0] = np.round(scores)
    found["k"][0, 0, :, 1] = scores - np.round(scores)


def jumps(found, each):
    """A row's largest score grows by so many powers of 2 in every block of keys."""
    keys = found["k"].shape[2]
    noise = np.random.default_rng(1).uniform(0, 3, keys)
    along(found, np.arange(keys) // BLOCK * each + noise)


def peak(found, height, at):
    """One key that outweighs all before it, and one more beside it."""
    powers = np.zeros(found["k"].shape[2])
    powers[at : at + 2] = height, height - 1
    along(found, powers)


def huge_equal(found):
    found["q"][:] = found["k"][:] = 4096.0
    half = found["v"].shape[2] // 2
    found["v"][:, :, :half], found["v"][:, :, half:] = 1.5, -0.5


def one_hot(found):
    found["v"][:] = found["v"] > 2.0


def scaled(by, change=None):
    def apply(found):
        if change:
            change(found)
        found["v"] *= by

    return apply


def huge_values(found):
    # bf16 reaches 3.39e38.
    found["v"][:] = np.where(found["v"] < 0, -3e38, 3e38)


PATTERNS = {
    "normal": lambda f: None,
    "jump of 5": lambda f: jumps(f, 5),
    "jump of 17": lambda f: jumps(f, 17),
    "jump of 30": lambda f: jumps(f, 30),
    "fall of 17": lambda f: jumps(f, -17),
    "huge equal": huge_equal,
    "late peak of 10.4": lambda f: peak(f, 10.4, 200),
    "late peak of 20.4": lambda f: peak(f, 20.4, 200),
    "late peak of 60.4": lambda f: peak(f, 60.4, 200),
    "one-hot values": one_hot,
    "huge values": huge_values,
    "huge values, jump of 17": lambda f: [jumps(f, 17), huge_values(f)],
    "huge values, peaks": lambda f: [peak(f, 60, 2), peak(f, 60, 200), huge_values(f)],
    "tiny values": scaled(1e-30),
    "tiny values, jump of 17": scaled(1e-30, lambda f: jumps(f, 17)),
}  # fmt: skip


def error(config, found):
    """Relative error of o against float64; no number where one is due is an error of 1."""
    program = attention(config)
    rows = found["q"].shape[2]
    arrays = {**found, "o": np.full((1, 1, rows, D), np.nan)}
    if config.lse:
        arrays["lse"] = np.full((1, 1, rows), np.nan)
    got, (want, lse) = interpret(program, arrays), reference(config, bind(program, arrays))
    largest = np.abs(want).max() or 1.0
    gap = np.where(np.isfinite(got["o"]), (got["o"] - want) / largest, 1.0)
    if config.lse:
        seen = np.isfinite(lse)
        assert np.array_equal(np.isfinite(got["lse"]), seen)
        # A score and what becomes of it is fp32.
        np.testing.assert_allclose(got["lse"][seen], lse[seen], rtol=1e-6, atol=1e-5)
    return np.linalg.norm(gap) / np.linalg.norm(want / largest)


@pytest.mark.parametrize("kind", [BF16, FP16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pattern_loses_more_than_its_element_type_does(pattern, way, kind):
    found = made(keys=8192 if pattern == "huge equal" else 320)
    PATTERNS[pattern](found)
    if kind is FP16:
        found["v"] = np.clip(found["v"], -6e4, 6e4)
        found["q"], found["k"] = (np.clip(found[x], -4096, 4096) for x in "qk")
        if pattern.startswith("tiny"):
            found["v"] *= 1e27
    if pattern.startswith("huge values") and way != "optimistic_threshold":
        # A sum of 320 weights, each up to 1, times values: FlashAttention overflows there too.
        found["v"] /= 320
    # Two rounded numbers: a weight and a result.
    rounding = 2.0**-8 if kind is BF16 else 2.0**-11
    # With the sums written and without: every pattern and way is run in both programs.
    config = AttentionConfig(dtype=kind, lse=kind is BF16, head_dim=D, tile=(64, BLOCK))
    assert error(replace(config, **WAYS[way]), found) <= 1.1 * rounding


PEAKED = {
    "sharp": (lambda f: f.update(q=f["q"] * 4), 1.15),
    "very sharp": (lambda f: f.update(q=f["q"] * 20), 1.15),
    "late peak of 8.4": (lambda f: peak(f, 8.4, 200), 1.02),
    "late peak of 12.4": (lambda f: peak(f, 12.4, 200), 1.02),
}


@pytest.mark.parametrize("pattern", PEAKED)
def test_a_guess_is_as_good_as_the_maximum_on_peaked_rows(pattern):
    """Under the maximum the largest weight is a power of 2, which rounding does not change."""
    found = made()
    change, more = PEAKED[pattern]
    change(found)
    config = AttentionConfig(head_dim=D, tile=(64, BLOCK))
    exact = error(replace(config, exact=True), found)
    assert error(replace(config, optimistic_threshold=12.0), found) <= more * exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", ["normal", "jump of 17", "huge values", "huge equal"])
@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_see_few_keys_or_none(pattern, way, window):
    """More rows than keys under a causal mask: the first rows see none."""
    found = made(rows=192, keys=100)
    PATTERNS[pattern](found)
    found["v"] /= 1.0 if way == "optimistic_threshold" else 100
    config = AttentionConfig(
        head_dim=D, causal=True, window=window, lse=True, tile=(64, BLOCK), **WAYS[way]
    )
    assert error(config, found) <= 1.1 * 2.0**-8


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf"), 1e-40])
def test_a_scale_that_is_not_above_zero_is_refused(scale):
    with pytest.raises(InputError, match=r"attention scale=\S+: expected a number above 0"):
        AttentionConfig(scale=scale)


def test_a_scale_of_any_size_is_taken():
    for scale in (1e-20, 3.0, 1e9):
        found = made()
        found["q"] /= scale
        for way in WAYS.values():
            config = AttentionConfig(head_dim=D, scale=scale, lse=True, tile=(64, BLOCK), **way)
            assert error(config, found) <= 1.1 * 2.0**-8


def test_exact_takes_no_variant_that_guesses():
    with pytest.raises(InputError, match=r"exact=True optimistic_threshold=12\.0"):
        AttentionConfig(exact=True, optimistic_threshold=12.0)
    with pytest.raises(
        InputError, match=r"exact=True optimistic_threshold=0\.0 rescale_threshold=8\.0"
    ):
        AttentionConfig(exact=True, rescale_threshold=8.0)
    for d in (64, 96, 128, 256):
        for causal in (False, True):
            near = AttentionConfig(head_dim=d, causal=causal)
            assert weighs_near(choose_attention(8192, near).config(near))
            base = replace(near, exact=True)
            chosen = choose_attention(8192, base)
            assert not weighs_near(chosen.config(base))
            for choice in ATTENTION.variants.values():
                assert choice.takes(base) <= (not weighs_near(choice.config(near)))


@pytest.mark.parametrize("lse", [False, True])
def test_the_kernel_of_long_rows_has_registers_enough(lse):
    """Three groups with 160 registers a thread: one value more and the build is refused."""
    choice = choose_attention(8192, AttentionConfig(lse=lse))
    config = choice.config(AttentionConfig(lse=lse))
    assert config.optimistic_threshold and config.tile == (192, 80)
    assert build(attention(config), choice.schedule(config)).resources.spill_bytes == 0


def test_exact_is_a_setting_of_the_command_line():
    assert configure("attention", {"exact": "true"})[0].exact
    assert not configure("attention", {})[0].exact
    with pytest.raises(InputError, match="exact='maybe', expected true or false"):
        configure("attention", {"exact": "maybe"})


def weighs_near(one):
    return one.optimistic_threshold > 0 or one.rescale_threshold > 0
