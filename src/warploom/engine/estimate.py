"""What a point is likely to take, from those that were tried: which one a search compiles next.

A Gaussian process over the points of a space. What is estimated is log(time / ideal), where the
ideal is the launch with its loops at their bounds: how much longer than that a kernel takes depends
on rewrites, order and options much alike at all sizes of a tile. Points are the nearer the fewer
choices they differ in; sizes of a tile differ by the octaves between them. A point that the
compiler refuses counts as slow as the slowest, so that its neighbours are tried late. Rasmussen and
Williams, Gaussian Processes for Machine Learning (2006), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log, log2, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from warploom.autosched.plans import CODE, GRID
from warploom.autosched.points import Point
from warploom.rewrites.rules import RULES

# Standard deviations of log(time / ideal): of loops, of what options do to any of them, and of what
# they do to one; of a point beside all that its choices tell; of one before anything is known.
LOOPS, OPTIONS, OWN, NOISE = 0.3, 0.03, 0.02, 0.01
SPREAD = sqrt(LOOPS**2 + OPTIONS**2 + OWN**2 + NOISE**2)
REACH = 4.0  # choices in which loops differ that tell each other a third of what they know
REFUSED = 0.4  # log(time / ideal) of a point that is of no use, where none is of use yet
# What a choice counts for: an octave of a size; rules and order, whose end is "-early"; options
# that change the code, and those that lay the grid out and leave the loops as they are.
OCTAVE = 3.0
OF_LOOPS = (*(1.0 for _ in RULES), 1.0, 0.5)
OF_OPTIONS = (*(1.0 for _ in CODE), *(0.5 for _ in GRID))
Numbers = NDArray[np.float64]


@dataclass
class Estimate:
    """What was tried, and what follows of other points; `ideal` gives a point's."""

    ideal: Callable[[Point], float]
    points: list[Point] = field(default_factory=list[Point])
    found: list[float | None] = field(default_factory=list[float | None])
    codes: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, point: Point, time: float | None) -> None:
        """A point takes so long, or (None) is of no use."""
        self.points.append(point)
        self.found.append(time)

    def asked(self, points: Sequence[Point]) -> tuple[Numbers, Numbers]:
        """The log of each point's time, and its standard deviation."""
        ideals = np.log([self.ideal(point) for point in points])
        known = [
            log(time / self.ideal(point))
            for point, time in zip(self.points, self.found, strict=True)
            if time is not None
        ]
        middle = fmean(known) if known else REFUSED
        if not self.points:
            return ideals + middle, np.full(len(points), SPREAD)
        slow, left = max(known, default=middle), iter(known)
        found = np.array([slow if time is None else next(left) for time in self.found])
        tried, asked = self._placed(self.points), self._placed(points)
        own = _alike(tried, tried) + NOISE**2 * np.eye(len(found))
        beside = _alike(asked, tried)
        both = np.linalg.solve(own, np.column_stack([found - middle, beside.T]))
        off = SPREAD**2 - np.einsum("ij,ji->i", beside, both[:, 1:])
        return ideals + middle + beside @ both[:, 0], np.sqrt(np.maximum(off, NOISE**2))

    def _placed(self, points: Sequence[Point]) -> tuple[Numbers, Numbers]:
        """[points, sizes] in octaves, and [points, other choices] as numbers that are the same or
        not."""
        sizes: list[list[float]] = []
        others: list[list[int]] = []
        for point in points:
            options, settings = point.options, dict(sorted(point.settings))
            order, _, end = point.order.partition("-")
            named = (*(options.get(name, "") for name in (*CODE, *GRID)),)
            words = (*(name if name in point.rules else "" for name in RULES), order, end, *named)
            texts = [part for text in settings.values() for part in text.split(",")]
            sizes.append([self._octaves(text) for text in texts])
            others.append([self.codes.setdefault(word, len(self.codes)) for word in words])
        return np.array(sizes, float), np.array(others, float)

    def _octaves(self, text: str) -> float:
        """Of a size, times what one counts for; another setting is a number of its own."""
        if text.isdigit() and int(text) > 0:
            return OCTAVE * log2(int(text))
        return float(self.codes.setdefault(text, len(self.codes)))


def _alike(one: tuple[Numbers, Numbers], other: tuple[Numbers, Numbers]) -> Numbers:
    """The covariance of points, but for what each has of its own."""
    differ = one[1][:, None] != other[1][None]
    loops = np.abs(one[0][:, None] - other[0][None]).sum(-1)
    loops = (loops + differ[..., : len(OF_LOOPS)] @ np.array(OF_LOOPS)) / REACH
    options = differ[..., len(OF_LOOPS) :] @ np.array(OF_OPTIONS)
    of_loops, of_options = LOOPS**2 * np.exp(-loops), OPTIONS**2 * np.exp(-options)
    return of_loops + of_options + OWN**2 * np.exp(-loops - options)
