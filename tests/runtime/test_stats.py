"""The statistics tell the truth: A/A covers 1 at the stated rate, a planted 2 % is found."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.runtime.stats import Ratio, bootstrap_ratio, median_interval, palindrome, round_ratios


def simulate(
    rng: np.random.Generator, speedup: float, noise: float = 0.01, reload_noise: float = 0.0
) -> list[np.ndarray]:
    """Round ratios of 4 reloads of 12 rounds; noise as a heavy-tailed multiplicative error."""
    groups = []
    for _ in range(4):
        offset = 1 + reload_noise * rng.standard_normal()
        base = 100 * (1 + noise * rng.standard_t(4, 12))
        other = 100 / speedup * (1 + noise * rng.standard_t(4, 12))
        groups.append(round_ratios(base, other) * offset)
    return groups


def test_a_copy_of_the_base_covers_one_at_about_the_stated_rate() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    trials = 200
    for trial in range(trials):
        ratio = bootstrap_ratio(simulate(rng, 1.0), seed=trial, resamples=300)
        covered += ratio.low <= 1 <= ratio.high
    assert covered / trials >= 0.90


def test_the_interval_holds_95_percent_of_the_resampled_medians() -> None:
    """Of distinct values the median of a resample is at most the k-th smallest when at least half
    of it are among the k smallest: a binomial, whose quantiles the interval's ends must be."""
    count = 1001

    def at_most(k: int) -> float:
        share = k / count
        sigma = math.sqrt(share * (1 - share) / count)
        # With so many draws the binomial is normal; half a draw of continuity correction.
        return NormalDist().cdf((share - (count + 1) / 2 / count + 0.5 / count) / sigma)

    quantile = [next(k for k in range(1, count) if at_most(k) >= p) for p in (0.025, 0.975)]
    values = np.random.default_rng(5).permutation(np.arange(1.0, count + 1))
    ratio = bootstrap_ratio([values])
    # 90 % would end 5 ranks further in, 99 % 10 further out; 2,000 resamples err by about one.
    assert [ratio.low, ratio.high] == pytest.approx(quantile, abs=3)
    assert ratio.median == (count + 1) / 2


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_planted_two_percent_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratio = bootstrap_ratio(simulate(rng, 1.02, noise=0.005), seed=seed, resamples=300)
    assert ratio.verdict == "win"
    assert abs(ratio.median - 1.02) < 0.01
    control = bootstrap_ratio(simulate(rng, 1.0, noise=0.002), seed=seed, resamples=300)
    assert ratio.clears(control)


def test_reload_spread_widens_the_interval() -> None:
    rng = np.random.default_rng(3)
    still = bootstrap_ratio(simulate(rng, 1.0, noise=0.001), resamples=500)
    moving = bootstrap_ratio(simulate(rng, 1.0, noise=0.001, reload_noise=0.01), resamples=500)
    assert moving.high - moving.low > 5 * (still.high - still.low)


def test_a_slower_candidate_is_a_loss_and_a_close_one_no_win() -> None:
    rng = np.random.default_rng(4)
    assert bootstrap_ratio(simulate(rng, 0.95)).verdict == "loss"
    assert Ratio(1.001, 0.999, 1.003, 10, 1).verdict == "no win"
    assert not Ratio(1.01, 1.005, 1.02, 10, 1).clears(Ratio(1.0, 0.994, 1.001, 10, 1))


@given(st.integers(1, 6), st.integers(0, 100))
def test_a_round_is_a_palindrome_of_every_function(functions: int, seed: int) -> None:
    order = palindrome(functions, np.random.default_rng(seed))
    assert order == order[::-1]
    assert sorted(order) == sorted([*range(functions), *range(functions)])


@given(st.floats(0.001, 0.05), st.floats(0.8, 1.2), st.integers(0, 50))
def test_a_palindrome_cancels_linear_drift(drift: float, speedup: float, seed: int) -> None:
    order = palindrome(2, np.random.default_rng(seed))
    times = np.array([1.0, 1 / speedup])
    seen = [times[index] + drift * place for place, index in enumerate(order)]
    sums = [sum(t for t, index in zip(seen, order, strict=True) if index == f) for f in (0, 1)]
    assert sums[0] - 2 * times[0] == pytest.approx(sums[1] - 2 * times[1])


def test_bad_series_are_refused() -> None:
    with pytest.raises(InputError, match="equal, non-empty"):
        round_ratios([1.0], [])
    with pytest.raises(InputError, match="finite times above zero"):
        round_ratios([1.0], [0.0])
    with pytest.raises(InputError, match="equal, non-empty"):
        round_ratios([], [])
    for groups in ([[]], [], [[1.0], []]):
        with pytest.raises(InputError, match="at least one ratio"):
            bootstrap_ratio(groups)


def test_one_round_and_one_reload_are_enough() -> None:
    assert round_ratios([3.0], [2.0]).tolist() == [1.5]
    assert round_ratios([0.5], [0.25]).tolist() == [2.0]  # milliseconds
    assert bootstrap_ratio([[1.5]]) == Ratio(1.5, 1.5, 1.5, 1, 1)


def test_two_reloads_are_resampled() -> None:
    """A ratio of 1 in one and 2 in the other: the interval has both."""
    ratio = bootstrap_ratio([[1.0] * 9, [2.0] * 9])
    assert (ratio.low, ratio.high) == (1.0, 2.0)


def test_both_ends_leave_out_the_same_share() -> None:
    """Where nothing is to be held, they meet in the middle."""
    values = np.random.default_rng(6).uniform(1, 2, 10_001)
    none, half, whole = (
        bootstrap_ratio([values], resamples=300, confidence=c) for c in (0.0, 0.5, 1.0)
    )
    assert none.low == none.high
    assert whole.low < half.low < none.low < half.high < whole.high


@pytest.mark.parametrize("count", range(1, 41))
def test_a_median_lies_between_places_that_leave_it_out_in_5_percent_of_runs(count: int) -> None:
    """The true median is outside where so few of the rounds, as of tosses of a coin, are on one
    side of it: the innermost places for which that is seldom enough."""
    outside = [2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count for k in range(count)]
    places = [k for k in range(count // 2) if outside[k] <= 0.05]
    ratios = [1.0 + place / 100 for place in range(count)]
    ours = [1.0 / ratio for ratio in ratios]
    if not places:
        with pytest.raises(InputError, match=f"interval of {count} rounds"):
            median_interval(ours, [1.0] * count)
        return
    middle, low, high = median_interval(ours, [1.0] * count)
    assert (low, high) == pytest.approx((ratios[max(places)], ratios[-1 - max(places)]))
    assert middle == pytest.approx(np.median(ratios))


def test_an_interval_of_many_rounds_leaves_out_what_the_normal_law_does() -> None:
    """Half of the rounds, less 1.96 of their root's halves, at each end: 2,000 and more, too."""
    for count in (400, 2500):
        ratios = np.linspace(1, 2, count)
        _, low, high = median_interval(1 / ratios, np.ones(count))
        outside = np.searchsorted(ratios, low), count - 1 - np.searchsorted(ratios, high - 1e-9)
        assert outside == pytest.approx([count / 2 - 1.96 * math.sqrt(count) / 2] * 2, abs=1.5)
