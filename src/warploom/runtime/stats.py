"""Statistics of interleaved timings: the median ratio and its bootstrap interval.

A round times every function the same number of times in a palindromic order (ABBA for two), so a
drift that is linear over the round cancels in the round's ratio. Rounds come in reloads (the
modules freshly loaded, at other addresses). The interval resamples reloads first and rounds inside
them second, so that it is as wide as reloading really makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A median ratio with its 95 % interval; above 1 the second of the two is the faster one."""

    median: float
    low: float
    high: float
    rounds: int
    reloads: int

    @property
    def verdict(self) -> str:
        """'win' when the whole interval is above 1, 'loss' when below, else 'no win'."""
        if self.low > 1:
            return "win"
        return "loss" if self.high < 1 else "no win"

    def clears(self, control: Ratio) -> bool:
        """Whether this is a win even against the spread of an A/A control."""
        return self.low > max(control.high, 1 / control.low, 1.0)

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def round_ratios(base: Sequence[float], other: Sequence[float]) -> npt.NDArray[np.float64]:
    """Base time over other time, round by round: above 1 the other is faster. Shapes [rounds]."""
    first, second = np.asarray(base, np.float64), np.asarray(other, np.float64)
    if first.shape != second.shape or first.size == 0:
        raise InputError(
            f"ratios need two equal, non-empty series, got {first.size}, {second.size}"
        )
    if not (
        np.all(np.isfinite(first) & (first > 0)) and np.all(np.isfinite(second) & (second > 0))
    ):
        raise InputError("ratios need finite times above zero")
    return first / second


def bootstrap_ratio(
    ratios: Sequence[Sequence[float]] | Sequence[npt.NDArray[np.float64]],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Ratio:
    """The median over all rounds and its percentile interval.

    `ratios` holds one series per reload. Two levels are resampled with replacement: the reloads
    (only when there are at least two), then the rounds of each.
    """
    groups = [np.asarray(group, np.float64) for group in ratios]
    if not groups or any(group.size == 0 for group in groups):
        raise InputError("a bootstrap needs at least one ratio in every reload")
    rng = np.random.default_rng(seed)
    samples: list[npt.NDArray[np.float64]] = []
    for _ in range(resamples):
        chosen = rng.integers(0, len(groups), len(groups)) if len(groups) > 1 else (0,)
        drawn = [groups[int(index)] for index in chosen]
        samples.append(np.concatenate([one[rng.integers(0, one.size, one.size)] for one in drawn]))
    even = len({one.size for one in samples}) == 1  # one call for all is ten times as fast
    medians = np.median(samples, 1) if even else np.array([np.median(one) for one in samples])
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, [tail, 100 - tail])
    everything = np.concatenate(groups)
    return Ratio(
        float(np.median(everything)), float(low), float(high), int(everything.size), len(groups)
    )


def median_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Median of other/ours a round and its 95 % interval; > 1 means ours is faster.

    The interval lies between two of the sorted ratios, as many places from both ends as leave the
    true median outside in at most 5 % of runs whatever the ratios' distribution; so it needs six
    rounds. (Percentiles of resampled medians cover 88 % with seven.)
    """
    ratios = sorted(round_ratios(other, ours))
    count = len(ratios)
    outside, place = 2.0 ** (1 - count), 0
    if outside > 0.05:
        raise InputError(f"a 95 % interval of {count} rounds: expected at least 6")
    while True:
        more = outside + 2 * math.comb(count, place + 1) / 2**count
        if more > 0.05:
            return float(np.median(ratios)), float(ratios[place]), float(ratios[-1 - place])
        outside, place = more, place + 1


def palindrome(functions: int, rng: np.random.Generator) -> list[int]:
    """One round's order: a random order followed by its mirror image (ABBA or BAAB for two)."""
    order = [int(index) for index in rng.permutation(functions)]
    return order + order[::-1]
