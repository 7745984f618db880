"""Fixed-latency results used in a later block: the distance every path must keep.

Between the two blocks lie others whose duration a candidate may change. Each lasts at least the sum
of its instructions' least stalls, so a pair needs only its own two ends checked:
`to the producer's block end + from the consumer's block start >= need - least time in between`.
Where that bound is too weak to explain the original, the blocks on the path keep their duration.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.flow.dependence import Dependence, Hazard
from warploom.sass.flow.distances import issue_times, key_of
from warploom.sass.flow.latency import LONGEST, LatencyTable
from warploom.sass.flow.liveness import mask_of


@dataclass(frozen=True, slots=True)
class _Touch:
    """The first accesses to a resource in a block: instruction, slot, cycles from the start."""

    item: Instruction
    slot: str
    written: bool
    head: int


@dataclass
class _Summary:
    """One block as its neighbours see it."""

    duration: int
    least: int
    touches: dict[int, list[_Touch]]
    touched: int  # what `touches` has, and what the block writes, as bits
    kills: int
    live: dict[int, list[tuple[Instruction, str, Hazard, int]]]


def _summarise(kernel: Kernel, block: Block, table: LatencyTable) -> _Summary:
    items = kernel.items(block)
    times = issue_times(items)
    duration = times[-1] + items[-1].control.stall
    touches: dict[int, list[_Touch]] = {}
    killed: set[int] = set()
    live: dict[int, list[tuple[Instruction, str, Hazard, int]]] = {}
    for item, when in zip(items, times, strict=True):
        for access in item.effects.reads:
            if access.resource not in killed:
                touch = _Touch(item, access.slot, False, when)
                touches.setdefault(access.resource, []).append(touch)
            if duration - when < LONGEST:
                row = (item, access.slot, Hazard.WAR, duration - when)
                live.setdefault(access.resource, []).append(row)
        for access in item.effects.writes:
            if access.resource not in killed:
                touch = _Touch(item, access.slot, True, when)
                touches.setdefault(access.resource, []).append(touch)
                killed.add(access.resource)
            live[access.resource] = [(item, access.slot, Hazard.RAW, duration - when)]
    least = sum(table.own_stall(item) for item in items)
    return _Summary(duration, least, touches, mask_of(touches), mask_of(killed), live)


def across_blocks(
    cross: list[tuple[int, int, int]],
    durations: list[tuple[int, int]],
    kernel: Kernel,
    table: LatencyTable,
) -> None:
    """Append the rows for every fixed-latency pair that control flow may bring together."""
    summaries = [_summarise(kernel, block, table) for block in kernel.blocks]
    for dependence, tail, reached in _pairs(kernel, summaries):
        touch, least, actual, path = reached
        producer = kernel.instructions[dependence.earlier]
        key = key_of(dependence, producer, touch.item)
        if key is None:
            continue
        need = table.gap(key, tail + actual + touch.head)
        ends = need - least
        if ends > tail + touch.head:
            # The original relies on how long the blocks in between last.
            durations.extend((number, summaries[number].duration) for number in path)
            ends = need - actual
        if ends > 1:
            cross.append((producer.index, touch.item.index, ends))


def pairs_across(kernel: Kernel, table: LatencyTable) -> Iterator[tuple[Dependence, int]]:
    """Every dependence over a block edge within `LONGEST` cycles, and its least distance.

    Blocks in between count with the sum of their instructions' least stalls.
    """
    summaries = [_summarise(kernel, block, table) for block in kernel.blocks]
    for dependence, tail, (touch, least, _, _) in _pairs(kernel, summaries):
        yield dependence, tail + least + touch.head


_Reached = tuple[_Touch, int, int, tuple[int, ...]]


def _pairs(kernel: Kernel, summaries: list[_Summary]) -> Iterator[tuple[Dependence, int, _Reached]]:
    """(dependence, cycles from the producer to its block's end, how the consumer is reached)."""
    for block in kernel.blocks:
        reached = _reach(kernel, summaries, block)
        for resource, producers in summaries[block.index].live.items():
            for producer, slot, source, tail in producers:
                for found in reached.get(resource, ()):
                    touch = found[0]
                    hazard = source
                    if source is Hazard.RAW and touch.written:
                        hazard = Hazard.WAW
                    elif source is Hazard.WAR and not touch.written:
                        continue
                    yield (
                        Dependence(
                            producer.index, touch.item.index, hazard, resource, slot, touch.slot
                        ),
                        tail,
                        found,
                    )


def _reach(
    kernel: Kernel, summaries: list[_Summary], block: Block
) -> dict[int, list[tuple[_Touch, int, int, tuple[int, ...]]]]:
    """By resource: (touch, least cycles in between, cycles in between as compiled, blocks between).

    The shortest way in least cycles to every block within reach that touches a resource alive at
    the block's end. All resources go together, as the bits of an integer: a way carries those that
    no block on it has written and that did not come there by a shorter one.
    """
    found: dict[int, list[tuple[_Touch, int, int, tuple[int, ...]]]] = {}
    alive = mask_of(summaries[block.index].live)
    ways: list[tuple[int, int, int, tuple[int, ...], int]] = [
        (0, 0, successor, (), alive) for successor in block.successors
    ]
    heapq.heapify(ways)
    done: dict[int, int] = {}
    while ways:
        least, actual, number, path, mask = heapq.heappop(ways)
        mask &= ~done.get(number, 0)
        if not mask or least >= LONGEST:
            continue
        done[number] = done.get(number, 0) | mask
        summary = summaries[number]
        for resource in bits_of(mask & summary.touched):
            rows = found.setdefault(resource, [])
            rows.extend((touch, least, actual, path) for touch in summary.touches[resource])
        mask &= ~summary.kills
        further = (least + summary.least, actual + summary.duration)
        for successor in kernel.blocks[number].successors:
            if carried := mask & ~done.get(successor, 0):
                heapq.heappush(ways, (*further, successor, (*path, number), carried))
    return found


def bits_of(mask: int) -> Iterator[int]:
    """The places of the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
