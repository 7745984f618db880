"""Distances between instructions, counted in compiler output: what becomes a latency table.

Only pairs the compiler covered by distance alone are counted: the producer has fixed latency and
no scoreboard, both stand in one block, and their guards are not complementary (such a pair never
executes together). A distance counts when `ENOUGH` pairs of at least `KERNELS` kernels stand at or
below it; an observed minimum (`sass.flow.minima`) needs `ENOUGH_AT` pairs that keep it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.distances import (
    exclusive,
    issue_times,
    key_of,
    pipe_neighbours,
    spread,
    sync_pairs,
)
from warploom.sass.flow.latency import (
    LONGEST,
    SEVERAL_JOBS,
    SPACED,
    TWO_PASSES,
    job,
    spacing_key,
    sync_key,
)
from warploom.sass.flow.minima import minimum_keys

ENOUGH: Final = 5
KERNELS: Final = 2
ENOUGH_AT: Final = 50


def observed(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance in cycles) of every pair in one kernel that counts."""
    for block in kernel.blocks:
        for row, distance in spread(kernel, block):
            earlier, later = kernel.instructions[row.earlier], kernel.instructions[row.later]
            key = key_of(row, earlier, later)
            if key is not None and not exclusive(earlier, later):
                yield key, distance


def observed_spacings(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance) of neighbours in one pipe, and of syncs and what they order."""
    for block in kernel.blocks:
        items = kernel.items(block)
        times = dict(zip(items, issue_times(items), strict=True))
        for earlier, later in pipe_neighbours(items):
            yield spacing_key(earlier, later), times[later] - times[earlier]


def observed_syncs(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance) of synchronising instructions and what they order."""
    for block in kernel.blocks:
        items = kernel.items(block)
        times = dict(zip(items, issue_times(items), strict=True))
        for earlier, later in sync_pairs(items):
            yield sync_key(earlier, later), times[later] - times[earlier]


Counts = dict[str, Counter[int]]


@dataclass
class Mined:
    """What was seen: pairs by key and distance, and in how many kernels."""

    gaps: Counts = field(default_factory=Counts)
    stalls: Counts = field(default_factory=Counts)
    spacings: Counts = field(default_factory=Counts)
    kernels: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    pipes: dict[str, str] = field(default_factory=dict[str, str])
    instructions: int = 0
    read: int = 0

    def add(self, kernel: Kernel) -> None:
        """Count one kernel."""
        self.read += 1
        self.instructions += len(kernel.instructions)
        stalls = ((job(item), item.control.stall) for item in kernel.instructions)
        self._count(self.gaps, [*observed(kernel), *observed_syncs(kernel)])
        self._count(self.stalls, stalls)
        self._count(self.spacings, observed_spacings(kernel))
        for item in kernel.instructions:
            if item.effects.info.pipe in SPACED:
                self.pipes[spacing_key(item, item)] = item.effects.info.pipe.value

    def take(self, other: Mined) -> None:
        """Count what was counted apart."""
        self.read += other.read
        self.instructions += other.instructions
        self.pipes.update(other.pipes)
        for mine, theirs in (
            (self.gaps, other.gaps),
            (self.stalls, other.stalls),
            (self.spacings, other.spacings),
        ):
            for key, seen in theirs.items():
                mine.setdefault(key, Counter()).update(seen)
        for place, kernels in other.kernels.items():
            self.kernels[place] = self.kernels.get(place, 0) + kernels

    def _count(self, into: Counts, pairs: Iterable[tuple[str, int]]) -> None:
        seen = Counter(pairs)
        for (key, gap), count in seen.items():
            into.setdefault(key, Counter())[gap] += count
            self.kernels[key, gap] = self.kernels.get((key, gap), 0) + 1

    def least(self, counts: Counts) -> dict[str, int]:
        """The smallest distance of each key with `ENOUGH` pairs of `KERNELS` kernels below it or
        at it."""
        found: dict[str, int] = {}
        for key, seen in sorted(counts.items()):
            pairs = kernels = 0
            for gap in sorted(seen):
                pairs, kernels = pairs + seen[gap], kernels + self.kernels[key, gap]
                if pairs >= ENOUGH and kernels >= KERNELS:
                    found[key] = gap
                    break
        return found

    def table(self, sources: Sequence[str], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The table as JSON data, going on from `old`."""
        known: dict[str, dict[str, int]] = {
            name: {key: gap for key, gap in (old or {}).get(name, {}).items() if _holds(key)}
            for name in ("gaps", "stalls", "spacings", "pipes")
        }
        gaps = _lower(known["gaps"], self.least(self.gaps))
        apart = _lower(known["spacings"], self.least(self.spacings))
        pipes = known["pipes"]
        for key, pipe in self.pipes.items():
            pipes[pipe] = max(pipes.get(pipe, 1), apart.get(key, 1))
        stalls = {key: max(1, stall) for key, stall in self.least(self.stalls).items()}
        return {
            "provenance": "smallest distance seen at least five times; " + "; ".join(sources),
            "sources": list(sources),
            "pairs": (old or {}).get("pairs", 0) + sum(c.total() for c in self.gaps.values()),
            "gaps": gaps,
            "stalls": _lower(known["stalls"], stalls),
            "spacings": apart,
            "pipes": dict(sorted(pipes.items())),
            "interlocked": (old or {}).get("interlocked", {}),
            "minima": find_minima(self.gaps, known["gaps"], (old or {}).get("minima", {})),
        }


_SPLIT: Final = re.compile(rf"\b({'|'.join(SEVERAL_JOBS)})(?!\.[A-Z])")


def _holds(key: str) -> bool:
    """Whether a key of an older table says one thing: not so where it stands for an opcode of
    several jobs, or for either pass of a product."""
    if _SPLIT.search(key):
        return False
    writes = " = " in key or " < " in key
    return not (writes and any(name in key for name in TWO_PASSES))


def _lower(known: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    """The smaller of both by key."""
    keys = sorted({*known, *found})
    return {key: min(table[key] for table in (known, found) if key in table) for key in keys}


def find_minima(
    gaps: Mapping[str, Counter[int]], bounds: Mapping[str, int], known: Mapping[str, int]
) -> dict[str, int]:
    """Observed minima among counted distances by key, beside the `known` ones; `bounds`: distances
    by key that were seen elsewhere. Whatever was seen below a minimum lowers it."""
    counts: dict[str, Counter[int]] = {}
    for key, seen in gaps.items():
        for one in minimum_keys(key):
            counts.setdefault(one, Counter()).update(seen)
    minima = dict(known)
    for key, seen in counts.items():
        lowest = min(seen)
        if key in minima:
            minima[key] = min(minima[key], lowest)
        elif seen[lowest] >= ENOUGH_AT and lowest <= LONGEST:
            minima[key] = lowest
    for key, gap in bounds.items():
        for one in minimum_keys(key):
            if one in minima:
                minima[one] = min(minima[one], gap)
    return dict(sorted(minima.items()))
