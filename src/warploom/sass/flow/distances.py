"""How far apart instructions issue, and which pairs distance alone covers.

Distance covers a pair whose producer has fixed latency and no scoreboard. Two instructions whose
guards are complementary never execute together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.resources import UNIFORM_BASE
from warploom.sass.flow.aliasing import is_sync
from warploom.sass.flow.dependence import Dependence, Hazard, dependences
from warploom.sass.flow.latency import SPACED, raw_key, war_key, waw_key

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
