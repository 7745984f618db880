"""Mine latency tables: `python -m warploom.sass.flow.mining OUT.json [--with OLD.json] CUBIN...`.

Only pairs the compiler covered by distance alone are counted: the producer has fixed latency and
no scoreboard, both stand in one block, and their guards are not complementary (such a pair never
executes together). A distance counts when `ENOUGH` pairs of at least `KERNELS` kernels stand at or
below it. `--with` goes on from an older table, whose cubins need not be there any more.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import Block, Instruction, Kernel, decode_all
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.resources import UNIFORM_BASE
from warploom.sass.flow.aliasing import is_sync
from warploom.sass.flow.dependence import Dependence, Hazard, dependences
from warploom.sass.flow.latency import (
    SEVERAL_JOBS,
    SPACED,
    TWO_PASSES,
    job,
    raw_key,
    spacing_key,
    sync_key,
    war_key,
    waw_key,
)
from warploom.sass.flow.minima import find_minima

ENOUGH: Final = 5
KERNELS: Final = 2

# Lane exchanges keep their place between barriers too: which lanes take part may depend on it.
BETWEEN_SYNCS = frozenset(
    "LDG LDS LDSM LD LDL STG STS STSM ST STL LDGSTS SHFL VOTE VOTEU MATCH REDUX CREDUX".split()
)


def exclusive(first: Instruction, second: Instruction) -> bool:
    """True when the two guards are complementary, as in @P0 and @!P0."""
    one, other = first.line.guard, second.line.guard
    return bool(one and other and one != other and one.lstrip("!") == other.lstrip("!"))


def stays_exclusive(items: Sequence[Instruction], one: int, other: int) -> bool:
    """`exclusive` of two of the items, by place, with the predicate unchanged in between."""
    if not exclusive(items[one], items[other]):
        return False
    guards = {access.resource for access in items[one].effects.reads if access.slot == "guard"}
    between = (access.resource for item in items[one:other] for access in item.effects.writes)
    return guards.isdisjoint(between)


def fixed_latency(item: Instruction) -> bool:
    """True when only stall counts cover this instruction's result."""
    return not item.effects.info.variable and item.control.write_sb == NO_SCOREBOARD


def key_of(dependence: Dependence, earlier: Instruction, later: Instruction) -> str | None:
    """The table key of a dependence covered by distance; None when distance does not cover it."""
    if dependence.hazard is Hazard.WAR:
        # General registers read by a variable-latency unit are released by a scoreboard.
        if dependence.resource < UNIFORM_BASE and not fixed_latency(earlier):
            return None
        return war_key(earlier, later, dependence.resource)
    if not fixed_latency(earlier):
        return None
    if dependence.hazard is Hazard.WAW or dependence.later_slot == "old":
        return waw_key(earlier, later, dependence.resource)
    return raw_key(earlier, dependence.earlier_slot, later, dependence.later_slot)


def never_both(kernel: Kernel, one: int, other: int) -> bool:
    """Whether the one or the other executes, both being in one block."""
    same = kernel.block_of[one] == kernel.block_of[other] and one < other
    return same and stays_exclusive(kernel.instructions, one, other)


def spread(kernel: Kernel, block: Block) -> Iterator[tuple[Dependence, int]]:
    """The dependences inside a block, with the cycles from one issue to the other."""
    items = kernel.items(block)
    times = issue_times(items)
    for row in dependences(items):
        yield row, times[row.later - block.start] - times[row.earlier - block.start]


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


def pipe_neighbours(items: Sequence[Instruction]) -> Iterator[tuple[Instruction, Instruction]]:
    """Pairs that follow each other in one spaced pipe."""
    last: dict[Pipe, Instruction] = {}
    for item in items:
        pipe = item.effects.info.pipe
        if pipe in SPACED:
            if pipe in last:
                yield last[pipe], item
            last[pipe] = item


def sync_pairs(items: Sequence[Instruction]) -> Iterator[tuple[Instruction, Instruction]]:
    """(sync, later) and (earlier, sync) pairs whose order a sync fixes, nearest syncs only."""
    last_sync: Instruction | None = None
    since: list[Instruction] = []
    for item in items:
        if is_sync(item):
            if last_sync is not None:
                yield last_sync, item
            yield from ((other, item) for other in since)
            last_sync, since = item, []
        elif item.effects.info.name in BETWEEN_SYNCS:
            if last_sync is not None:
                yield last_sync, item
            since.append(item)


def issue_times(items: Sequence[Instruction]) -> list[int]:
    """Issue cycle of each instruction from the start of its block, stalls only."""
    times: list[int] = []
    now = 0
    for item in items:
        times.append(now)
        now += item.control.stall
    return times


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


def main(arguments: Sequence[str]) -> None:
    """Command line: the output file, an older table to go on from, the cubins to read."""
    usage = "usage: python -m warploom.sass.flow.mining OUT.json [--with OLD.json] CUBIN..."
    paths = list(arguments[1:])
    old: dict[str, Any] = {}
    if paths[:1] == ["--with"] and len(paths) > 1:
        old = json.loads(Path(paths[1]).read_text())
        paths = paths[2:]
    if not paths:
        raise InputError(usage)
    mined, compilers = Mined(), set[str]()
    for path in paths:
        cubin = load(path)
        compilers.add(cubin.compiler)
        for kernel in decode_all(cubin).values():
            mined.add(kernel)
    said = (
        f"{mined.read} kernels, {mined.instructions} instructions, "
        f"compiled by {', '.join(sorted(compilers))} at -O3"
    )
    table = mined.table([*old.get("sources", [old["provenance"]] if old else []), said], old)
    write_text_atomically(Path(arguments[0]), json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
