"""Warp-group matrix instructions in flight: which may still be running where.

HGMMA and its kin read their A registers and update their accumulators after they issue. The
one that carries `gsb0` commits a group; `WARPGROUP.DEPBAR.LE gsb0, N` waits until at most N groups
run. Here the *age* of an instruction is the number of groups committed since it issued, its own
included, the fewest over all paths: a DEPBAR with N retires every age above N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.operands import Kind
from warploom.sass.decode.resources import UNIFORM_BASE
from warploom.sass.flow.paths import states

# More groups than this are never kept in flight: N is a small immediate.
OLDEST: Final = 16
UNCOMMITTED: Final = 0

InFlight = dict[int, int]


def is_asynchronous(item: Instruction) -> bool:
    """True for a warp-group matrix instruction that executes."""
    return item.effects.info.pipe is Pipe.ASYNC and item.line.guard != "!PT"


def commits(item: Instruction) -> bool:
    """True when the instruction closes a group (`gsb0` among its operands)."""
    return is_asynchronous(item) and any(
        operand.kind is Kind.GROUP_SCOREBOARD for operand in item.effects.operands
    )


def groups_left(item: Instruction) -> int | None:
    """N of `WARPGROUP.DEPBAR.LE gsb0, N`; None for any other instruction."""
    if not item.line.opcode.startswith("WARPGROUP.DEPBAR"):
        return None
    try:
        return int(item.effects.operands[-1].text, 16)
    except ValueError:
        return None


def step(state: InFlight, item: Instruction) -> InFlight:
    """What may be in flight after `item` issued."""
    left = groups_left(item)
    if left is not None:
        return {index: age for index, age in state.items() if age <= left}
    if not is_asynchronous(item):
        return state
    after = {**state, item.index: UNCOMMITTED}
    if commits(item):
        after = {index: min(age + 1, OLDEST) for index, age in after.items()}
    return after


def walk(kernel: Kernel) -> Iterator[tuple[Instruction, InFlight]]:
    """Every instruction on every way to it, with what may be in flight before it."""

    def merge(known: InFlight, new: InFlight) -> InFlight:
        return {
            index: min(known.get(index, OLDEST), new.get(index, OLDEST))
            for index in known.keys() | new.keys()
        }

    return states(kernel, {}, step, merge)


@dataclass(frozen=True)
class GroupRegisters:
    """Registers a warp-group matrix instruction uses while it runs."""

    sources: frozenset[int]
    accumulators: frozenset[int]


def group_registers(item: Instruction) -> GroupRegisters:
    """A registers (register-operand form only) and accumulators of one instruction."""
    sources = frozenset(
        access.resource
        for access in item.effects.reads
        if access.resource < UNIFORM_BASE and access.slot.startswith("a")
    )
    touched = frozenset(
        access.resource
        for access in (*item.effects.reads, *item.effects.writes)
        if access.resource < UNIFORM_BASE and access.slot != "guard"
    )
    return GroupRegisters(sources, touched - sources)


def touched_registers(item: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """(registers read, registers written), without the accesses that only model a group's wait."""
    read = frozenset(
        access.resource
        for access in item.effects.reads
        if access.resource < UNIFORM_BASE and access.slot != GROUP_SLOT
    )
    written = frozenset(
        access.resource
        for access in item.effects.writes
        if access.resource < UNIFORM_BASE and access.slot != GROUP_SLOT
    )
    return read, written
