"""Operands kept in the operand cache (`.reuse`), followed along every path.

A kept operand lives until the next read of its source slot and bank (even or odd registers). One
whose register was rewritten meanwhile is stale: the next reader of that register through that slot
gets the old value. It lives on into the next block: on an H200 a kept R15 was read by a 64-bit
operand R14-R15 behind a loop's edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.opcodes import UNKNOWN
from warploom.sass.flow.paths import states

BANKS: Final = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """`holder` keeps `register` in `slot`; `writer` rewrote it since (-1: nobody did)."""

    slot: int
    register: int
    holder: int
    writer: int = -1

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies: slot and bank."""
        return self.slot, self.register % BANKS


State = frozenset[Kept]


def slot_reads(item: Instruction) -> Iterator[tuple[int, int]]:
    """(slot, register) of every register read through a slot, all words of a wide operand."""
    for slot, words in item.slot_words.items():
        yield from ((slot, register) for register in words)


def step(state: State, item: Instruction) -> State:
    """What is kept after an instruction issued."""
    known = item.effects.info.name != UNKNOWN.name
    asked = item.control.reuse if item.control.stay and known else 0
    if not state and not asked:
        return state  # most instructions keep nothing
    read = {(slot, register % BANKS) for slot, register in slot_reads(item)}
    after = {entry for entry in state if entry.place not in read}
    after |= {
        Kept(slot, register, item.index) for slot, register in slot_reads(item) if asked >> slot & 1
    }
    # A WARPGROUP instruction changes no register itself.
    written = {a.resource for a in item.effects.writes if a.slot != GROUP_SLOT}
    if not after or not written:
        return frozenset(after)
    return frozenset(
        replace(entry, writer=item.index)
        if entry.register in written and entry.writer < 0
        else entry
        for entry in after
    )


def walk(kernel: Kernel) -> Iterator[tuple[Instruction, State]]:
    """Every instruction on every way to it, with what may be kept before it."""
    return states(kernel, frozenset[Kept](), step, State.union)


def stale(state: State, item: Instruction) -> Iterator[Kept]:
    """Kept operands that an instruction reads although their register was rewritten."""
    reads = set(slot_reads(item))
    for entry in sorted(state, key=lambda entry: (entry.slot, entry.register, entry.holder)):
        if entry.writer >= 0 and (entry.slot, entry.register) in reads:
            yield entry
