"""Mine latency tables from cubins: `python -m warploom.sass.mining OUT.json CUBIN...`.

Only pairs the compiler covered by distance alone are counted: the producer has fixed latency and
no scoreboard, both stand in one block, and their guards are not complementary (such a pair never
executes together).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.sass.aliasing import is_sync
from warploom.sass.control import NO_SCOREBOARD
from warploom.sass.cubin import load
from warploom.sass.dependence import Dependence, Hazard, dependences
from warploom.sass.effects import UNIFORM_BASE
from warploom.sass.kernel import Instruction, Kernel, decode_all
from warploom.sass.latency import (
    SPACED,
    merge_counts,
    raw_key,
    smallest_supported,
    spacing_key,
    sync_key,
    war_key,
    waw_key,
)
from warploom.sass.opcodes import Pipe

# Lane exchanges keep their place between barriers too: which lanes take part may depend on it.
BETWEEN_SYNCS = frozenset(
    "LDG LDS LDSM LD LDL STG STS STSM ST STL LDGSTS SHFL VOTE VOTEU MATCH REDUX CREDUX".split()
)


def exclusive(first: Instruction, second: Instruction) -> bool:
    """True when the two guards are complementary, as in @P0 and @!P0."""
    one, other = first.line.guard, second.line.guard
    return bool(one and other and one != other and one.lstrip("!") == other.lstrip("!"))


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
        return waw_key(earlier, later)
    return raw_key(earlier, dependence.earlier_slot, later, dependence.later_slot)


def observed(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance in cycles) of every pair in one kernel that counts."""
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        times = issue_times(items)
        for dependence in dependences(items):
            earlier = kernel.instructions[dependence.earlier]
            later = kernel.instructions[dependence.later]
            key = key_of(dependence, earlier, later)
            if key is not None and not exclusive(earlier, later):
                yield (
                    key,
                    times[dependence.later - block.start] - times[dependence.earlier - block.start],
                )


def observed_spacings(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance) of neighbours in one pipe, and of syncs and what they order."""
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        times = dict(zip(items, issue_times(items), strict=True))
        for earlier, later in pipe_neighbours(items):
            yield spacing_key(earlier, later), times[later] - times[earlier]


def observed_syncs(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """(key, distance) of synchronising instructions and what they order."""
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
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


def mine(kernels: Sequence[Kernel], provenance: str) -> dict[str, Any]:
    """The table as JSON data."""
    gaps: dict[str, dict[int, int]] = {}
    stalls: dict[str, dict[int, int]] = {}
    for kernel in kernels:
        merge_counts(gaps, observed(kernel))
        merge_counts(
            stalls,
            ((item.effects.info.name, item.control.stall) for item in kernel.instructions),
        )
    spacings: dict[str, dict[int, int]] = {}
    pipes: dict[str, int] = {}
    for kernel in kernels:
        merge_counts(gaps, observed_syncs(kernel))
        merge_counts(spacings, observed_spacings(kernel))
    apart = {key: smallest_supported(counts) for key, counts in sorted(spacings.items())}
    for kernel in kernels:
        for item in kernel.instructions:
            pipe = item.effects.info.pipe
            least = apart.get(spacing_key(item, item))
            if pipe in SPACED and least is not None:
                pipes[pipe.value] = max(pipes.get(pipe.value, 1), least)
    found = {key: smallest_supported(counts) for key, counts in sorted(gaps.items())}
    own = {key: smallest_supported(counts) for key, counts in sorted(stalls.items())}
    return {
        "provenance": provenance,
        "pairs": sum(sum(counts.values()) for counts in gaps.values()),
        "gaps": {key: gap for key, gap in found.items() if gap is not None},
        "stalls": {key: max(1, gap) for key, gap in own.items() if gap is not None},
        "spacings": {key: gap for key, gap in apart.items() if gap is not None},
        "pipes": dict(sorted(pipes.items())),
    }


def main(arguments: Sequence[str]) -> None:
    """Command line: the output file, then the cubins to read."""
    if len(arguments) < 2:
        raise InputError("usage: python -m warploom.sass.mining OUT.json CUBIN...")
    kernels: list[Kernel] = []
    compilers: set[str] = set()
    for path in arguments[1:]:
        cubin = load(path)
        compilers.add(cubin.compiler)
        kernels.extend(decode_all(cubin).values())
    instructions = sum(len(kernel.instructions) for kernel in kernels)
    provenance = (
        f"smallest distance seen at least five times over {len(kernels)} kernels, "
        f"{instructions} instructions, compiled by {', '.join(sorted(compilers))} at -O3 "
        "(Triton kernels, CUB device algorithms, hand-written CUDA)"
    )
    write_text_atomically(
        Path(arguments[0]), json.dumps(mine(kernels, provenance), indent=0) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
