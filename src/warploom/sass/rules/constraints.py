"""What any legal reordering of a kernel must satisfy, derived from the original code alone.

The result is a set of flat integer arrays, so that checking a candidate is a few vector operations
over its positions, issue times and control fields. Each row remembers the rule it stands for.
"""

from __future__ import annotations

import numpy as np

from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.decode.resources import UNIFORM_BASE
from warploom.sass.flow.aliasing import AliasMode, memory_accesses, must_keep_order
from warploom.sass.flow.dependence import dependences
from warploom.sass.flow.distances import issue_times, key_of, stays_exclusive, sync_pairs
from warploom.sass.flow.latency import LatencyTable, sync_key, table_for
from warploom.sass.flow.liveness import Later, touched_later
from warploom.sass.flow.pools import REALLOCATES
from warploom.sass.flow.provenance import address_pointers
from warploom.sass.flow.scoreboard import Pending, counting_waits, outstanding_at_entry
from warploom.sass.rules.boundaries import across_blocks
from warploom.sass.rules.rules import BLOCK_EDGE, Builder, Constraints, Ints, Rule
from warploom.sass.rules.wait_rules import WaitTracker


def _array(rows: list[tuple[int, ...]], width: int) -> Ints:
    unique = sorted(set(rows))
    return np.array(unique, dtype=np.int64).reshape(len(unique), width)


def derive(kernel: Kernel, mode: AliasMode, table: LatencyTable | None = None) -> Constraints:
    """Every constraint on reorderings of `kernel` under an alias mode."""
    latencies = table or table_for(kernel.sm)
    builder = Builder()
    pointers = address_pointers(kernel) if mode is AliasMode.TRITON else {}
    entry = outstanding_at_entry(kernel)
    later = touched_later(kernel)
    counted = {counting_waits(item) for item in kernel.instructions} - {None}
    for block in kernel.blocks:
        items = kernel.items(block)
        times = issue_times(items)
        _registers(builder, kernel, block, times, latencies)
        _memory(builder, items, mode, pointers)
        _synchronisation(builder, items, times, latencies)
        _pools(builder, items)
        _scoreboards(builder, kernel, block, entry[block.index], later[block.index], times)
        _setter_order(builder, counted, items)
        _reuse(builder, items)
    across_blocks(builder.cross, builder.durations, kernel, latencies)
    return Constraints(
        order=_array(list(builder.order), 4),
        gaps=_array(list(builder.gaps), 5),
        edge_gaps=_array(list(builder.edge_gaps), 4),
        waits=_array(list(builder.waits), 5),
        cross=_array(list(builder.cross), 3),
        durations=_array(list(builder.durations), 2),
        reuse=_array(list(builder.reuse), 4),
    )


def _registers(
    builder: Builder, kernel: Kernel, block: Block, times: list[int], table: LatencyTable
) -> None:
    items = kernel.items(block)
    for dependence in dependences(items):
        earlier = kernel.instructions[dependence.earlier]
        later = kernel.instructions[dependence.later]
        builder.order.append((earlier.index, later.index, Rule.REGISTER_ORDER, dependence.resource))
        key = key_of(dependence, earlier, later)
        if key is None:
            continue
        original = times[later.index - block.start] - times[earlier.index - block.start]
        # Guards that exclude each other never let the pair execute together.
        apart = stays_exclusive(items, earlier.index - block.start, later.index - block.start)
        need = min(1, original) if apart else table.gap(key, original)
        if need > 0:
            builder.gaps.append(
                (earlier.index, later.index, need, Rule.LATENCY, dependence.resource)
            )


def _memory(
    builder: Builder,
    items: tuple[Instruction, ...],
    mode: AliasMode,
    pointers: dict[int, frozenset[int]],
) -> None:
    accesses = memory_accesses(items, pointers)
    for position, second in enumerate(accesses):
        for first in accesses[:position]:
            if must_keep_order(first, second, mode):
                builder.order.append((first.index, second.index, Rule.MEMORY_ORDER, 0))


def _synchronisation(
    builder: Builder, items: tuple[Instruction, ...], times: list[int], table: LatencyTable
) -> None:
    """Syncs form a chain; memory operations stay between the syncs they stood between.

    The compiler also keeps a distance: a shared load in the cycle after a BAR reads too early.
    """
    when = {item.index: time for item, time in zip(items, times, strict=True)}
    for earlier, later in sync_pairs(items):
        builder.order.append((earlier.index, later.index, Rule.SYNC_ORDER, 0))
        need = table.gap(sync_key(earlier, later), when[later.index] - when[earlier.index])
        builder.gaps.append((earlier.index, later.index, need, Rule.SYNC_DISTANCE, 0))


def _pools(builder: Builder, items: tuple[Instruction, ...]) -> None:
    """What touches registers stays on its side of a change of how many the warp has."""
    for change in (item for item in items if item.base == REALLOCATES):
        for item in items:
            if any(
                access.resource < UNIFORM_BASE
                for access in (*item.effects.reads, *item.effects.writes)
            ):
                pair = sorted((change.index, item.index))
                builder.order.append((pair[0], pair[1], Rule.SYNC_ORDER, 0))


def _setter_order(
    builder: Builder, counted: set[int | None], items: tuple[Instruction, ...]
) -> None:
    """Where a DEPBAR counts down to more than zero, the setters of its scoreboard keep order."""
    for scoreboard in counted:
        last: int | None = None
        for item in items:
            sets = scoreboard in (item.control.write_sb, item.control.read_sb)
            if sets or counting_waits(item) == scoreboard:
                if last is not None:
                    builder.order.append((last, item.index, Rule.SCOREBOARD_ORDER, 0))
                last = item.index


def _scoreboards(
    builder: Builder,
    kernel: Kernel,
    block: Block,
    entry: frozenset[Pending],
    later: Later,
    times: list[int],
) -> None:
    """Walk the block once, tying every conflicting instruction to the wait that protects it."""
    tracker = WaitTracker(builder, kernel, block, entry, later, times)
    for item in kernel.items(block):
        tracker.visit(item)
    tracker.finish()


def _reuse(builder: Builder, items: tuple[Instruction, ...]) -> None:
    """An operand kept for reuse must be read again or displaced before a word of it changes.

    An instruction that overwrites its own source changes it at once: the row can never be kept.
    Where no later instruction of the block writes the register, the block's end is what it must
    have been consumed by: what another block or the next pass finds in the cache is not known.
    """
    next_writer: dict[int, int] = {}
    for item in reversed(items):
        written = {access.resource for access in item.effects.writes}
        for slot, words in sorted(item.slot_words.items()):
            for word in words:
                writer = item.index if word in written else next_writer.get(word, BLOCK_EDGE)
                builder.reuse.append((item.index, slot, words[0], writer))
        next_writer.update(dict.fromkeys(written, item.index))
