"""Registers that variable-latency instructions have yet to write or read, with every way to know.

Unlike `scoreboard`, which ties each producer to the one wait a reordering must keep, this asks of
a finished cubin only whether some wait proves the register settled. An operation with no scoreboard
is proved done by any later operation of its pipe (a pipe completes in order).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.opcodes import Order, Pipe
from warploom.sass.flow.dependence import Hazard
from warploom.sass.flow.distances import never_both
from warploom.sass.flow.paths import states
from warploom.sass.flow.scoreboard import protected_sources, waited_scoreboards

NO_VALUE: Final = frozenset(("guard", "old", GROUP_SLOT))


@dataclass(frozen=True, slots=True)
class Unsettled:
    """`producer` has yet to write (`written`) or read `resource`; a wait for any scoreboard of
    `mask` proves it done. `joins`: it has none of its own, later ones of its pipe count."""

    producer: int
    resource: int
    written: bool
    mask: int
    joins: bool


State = frozenset[Unsettled]


def _left_open(item: Instruction) -> Iterator[Unsettled]:
    info, control = item.effects.info, item.control
    if item.line.guard == "!PT" or info.pipe is Pipe.ASYNC or info.order is Order.FIXED:
        return
    written = 0 if control.write_sb == NO_SCOREBOARD else 1 << control.write_sb
    read = 0 if control.read_sb == NO_SCOREBOARD else 1 << control.read_sb
    if written or info.variable:
        for access in item.effects.writes:
            yield Unsettled(item.index, access.resource, True, written, not written)
    # A result that has arrived proves that the sources were read.
    if read or info.variable:
        for resource in protected_sources(item):
            # Sources are read in the pipe's order: a later operation's scoreboard serves too.
            yield Unsettled(item.index, resource, False, read | written, not read)


def before_issue(state: State, item: Instruction) -> State:
    """What is still open once the waits of `item` are over."""
    waited = waited_scoreboards(item)
    return frozenset(entry for entry in state if not entry.mask & waited) if waited else state


def step(kernel: Kernel, of: Collection[str] | None, state: State, item: Instruction) -> State:
    """What is open after `item` issued; of instructions `of` these names alone, where given."""
    opened = tuple(_left_open(item)) if of is None or item.base in of else ()
    if not state and not opened:
        return state
    control, pipe = item.control, item.effects.info.pipe
    sets = 0 if control.write_sb == NO_SCOREBOARD else 1 << control.write_sb
    reads = 0 if control.read_sb == NO_SCOREBOARD else 1 << control.read_sb
    replaced: set[int] = set()
    if not item.effects.partial:
        replaced = {access.resource for access in item.effects.writes}
    after: set[Unsettled] = set()
    for entry in before_issue(state, item):
        if entry.resource in replaced:
            continue
        new = sets | (0 if entry.written else reads)
        if entry.joins and new & ~entry.mask:
            same = kernel.instructions[entry.producer].effects.info.pipe is pipe
            after.add(replace(entry, mask=entry.mask | new) if same else entry)
        else:
            after.add(entry)
    after.update(opened)
    return frozenset(after)


def walk(kernel: Kernel, of: Collection[str] | None = None) -> Iterator[tuple[Instruction, State]]:
    """Every instruction on every way to it, with what may be open before it."""
    return states(kernel, frozenset[Unsettled](), partial(step, kernel, of), State.union)


def conflicts(
    kernel: Kernel, state: State, item: Instruction
) -> Iterator[tuple[Unsettled, Hazard]]:
    """Open registers that `item` touches although no wait settled them.

    An overwrite from the same pipe is in order by itself, and so is a result that a fixed-latency
    pipe hands to its own kind.
    """
    read = {access.resource for access in item.effects.reads if access.slot not in NO_VALUE}
    read |= {access.resource for access in item.effects.reads if access.slot == "guard"}
    written = {access.resource for access in item.effects.writes if access.slot != GROUP_SLOT}
    info = item.effects.info
    for entry in before_issue(state, item):
        producer = kernel.instructions[entry.producer]
        if never_both(kernel, entry.producer, item.index):
            continue
        same_pipe = producer.effects.info.pipe is info.pipe
        if entry.written and entry.resource in read:
            if not same_pipe or producer.effects.info.variable:
                yield entry, Hazard.RAW
        elif entry.resource in written and not same_pipe:
            yield entry, Hazard.WAW if entry.written else Hazard.WAR
