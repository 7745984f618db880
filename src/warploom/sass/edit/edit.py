"""Editing machine code: move any instruction inside its block, and change control fields.

The editor keeps, for every block, an order and what each instruction's control field should be if
nothing forbids it. From these it re-derives stalls, waits, `stay` and `reuse` for the whole block,
so that a move is possible whenever some control code makes it legal. It works from its own
bookkeeping (bit masks and one forward scan) and proves nothing: `verify` decides, from the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from warploom.errors import InputError
from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import CONTROL_MASK, NO_SCOREBOARD, Control
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.decode.words import Words, instruction_words
from warploom.sass.edit.rederive import BlockDeriver, BlockState
from warploom.sass.flow.aliasing import (
    AliasMode,
    MemoryAccess,
    is_sync,
    memory_accesses,
    must_keep_order,
)
from warploom.sass.flow.latency import table_for
from warploom.sass.flow.provenance import address_pointers
from warploom.sass.flow.scoreboard import counting_waits, outstanding_at_entry

EDITABLE: Final = frozenset((80, 86, 87, 89, 90))
LANE_EXCHANGES: Final = frozenset("SHFL VOTE VOTEU MATCH REDUX CREDUX".split())


@dataclass(frozen=True, slots=True)
class _Masks:
    """An instruction's effects as bit masks over all resources, and its ordering class."""

    reads: int
    writes: int
    sync: bool
    lanes: bool
    memory: MemoryAccess | None
    counted: int  # scoreboards whose setter order matters and that it sets or counts


class Editor:
    """Edits one kernel. All positions and indices are those of the kernel's instructions."""

    def __init__(
        self, original: Cubin, kernel: str | None = None, mode: AliasMode = AliasMode.STRICT
    ) -> None:
        if original.sm not in EDITABLE:
            raise InputError(
                f"{original.origin} is for {original.arch}: it can be shown and linted; editing "
                f"needs a latency table, which there is for sm_80 and sm_90"
            )
        self.original = original
        self.kernel: Kernel = decode(original, kernel)
        self.mode = mode
        self.table = table_for(original.sm)
        pointers = address_pointers(self.kernel) if mode is AliasMode.TRITON else {}
        counted = {counting_waits(item) for item in self.kernel.instructions} - {None}
        self.masks: list[_Masks] = []
        for block in self.kernel.blocks:
            items = self.kernel.items(block)
            accesses = {a.index: a for a in memory_accesses(items, pointers)}
            self.masks.extend(_masks(item, accesses.get(item.index), counted) for item in items)
        entries = outstanding_at_entry(self.kernel)
        self._blocks = [
            BlockDeriver(self.kernel, block, entries[block.index], self.table)
            for block in self.kernel.blocks
        ]
        self.states: list[BlockState] = [
            BlockState(tuple(range(block.start, block.end)), {}, True)
            for block in self.kernel.blocks
        ]
        self._controls: list[tuple[Control, ...]] = [
            tuple(item.control for item in self.kernel.items(block)) for block in self.kernel.blocks
        ]
        # High words of each block by the control fields they were made of, as last asked for.
        self._high: list[tuple[tuple[Control, ...], Words]] = [
            ((), np.empty(0, np.uint64)) for _ in self.kernel.blocks
        ]
        self._original_words = instruction_words(original, self.kernel.name)

    def fork(self) -> Editor:
        """An editor of the same kernel in the same state, edited apart from this one."""
        other = copy(self)
        other.states, other._controls = list(self.states), list(self._controls)
        other._high = list(self._high)
        return other

    # --- moves -----------------------------------------------------------------------------

    def ordered(self, first: int, second: int) -> bool:
        """True when two instructions of a block must keep the order they have."""
        one, other = self.masks[first], self.masks[second]
        if one.writes & (other.reads | other.writes) or one.reads & other.writes:
            return True
        if one.sync and (other.sync or other.lanes or other.memory is not None):
            return True
        if other.sync and (one.lanes or one.memory is not None):
            return True
        if one.counted & other.counted:
            return True
        if one.memory is not None and other.memory is not None:
            early, late = (
                (one.memory, other.memory) if first < second else (other.memory, one.memory)
            )
            return must_keep_order(early, late, self.mode)
        return False

    def window(self, index: int, reach: int = 1 << 30) -> tuple[int, int]:
        """First and last position `index` may move to, by order alone, at most `reach` away."""
        instructions = self.kernel.instructions
        block = self.kernel.block_of[index]
        order = self.states[block].order
        here = order.index(index)
        if instructions[index].pinned:
            return here, here
        first = last = here
        while first > 0 and here - first < reach:
            above = order[first - 1]
            if instructions[above].pinned or self.ordered(above, index):
                break
            first -= 1
        while last + 1 < len(order) and last - here < reach:
            below = order[last + 1]
            if instructions[below].pinned or self.ordered(index, below):
                break
            last += 1
        return first, last

    def position(self, index: int) -> tuple[int, int]:
        """(block, position inside its block's order) of an instruction."""
        block = self.kernel.block_of[index]
        return block, self.states[block].order.index(index)

    def move(self, index: int, to: int, rederive: bool = True) -> BlockState:
        """Move an instruction to position `to` of its block; returns the state before, for undo.

        `rederive=False` lets control fields travel unchanged with their instructions.
        Raises `InputError` when something on the way must keep its order.
        """
        block, here = self.position(index)
        first, last = self.window(index)
        if not first <= to <= last:
            raise InputError(
                f"{self.kernel.instructions[index]} may move to positions {first} to {last} of "
                f"its block, not {to}"
            )
        order = list(self.states[block].order)
        order.insert(to, order.pop(here))
        before = self.states[block]
        self.restore(block, BlockState(tuple(order), before.wishes, before.kept and not rederive))
        return before

    def reorder(self, block: int, order: Iterable[int]) -> BlockState:
        """Give a whole block a new order (checked by `verify`, not here)."""
        before = self.states[block]
        new = tuple(order)
        if sorted(new) != sorted(before.order):
            raise InputError(f"block {block}: the new order is not a permutation of the block")
        self.restore(block, BlockState(new, before.wishes, False))
        return before

    def adopt(self, words: Sequence[tuple[int, int]]) -> None:
        """Take over the order and control fields of another version of the kernel.

        Raises `InputError` when a block does not hold the same instructions.
        """
        identities = [item.identity for item in self.kernel.instructions]
        for block in self.kernel.blocks:
            places: dict[tuple[int, int], list[int]] = {}
            for index in range(block.end - 1, block.start - 1, -1):
                places.setdefault(identities[index], []).append(index)
            order: list[int] = []
            wishes: dict[int, Control] = {}
            for low, high in words[block.start : block.end]:
                found = places.get((low, high & ~CONTROL_MASK))
                if not found:
                    raise InputError(
                        f"{self.kernel.name}: block {block.index} of the other version does not "
                        "hold the same instructions"
                    )
                order.append(found.pop())
                wishes[order[-1]] = Control.decode(high)
            self.restore(block.index, BlockState(tuple(order), wishes, True))

    def wish(self, index: int, control: Control) -> BlockState:
        """Ask for a control field (stall as a floor, stay, reuse); the derivation may raise it."""
        block = self.kernel.block_of[index]
        before = self.states[block]
        self.restore(block, BlockState(before.order, {**before.wishes, index: control}, False))
        return before

    def restore(
        self, block: int, state: BlockState, controls: tuple[Control, ...] | None = None
    ) -> None:
        """Set a block to a state, deriving its control fields unless they are given."""
        if controls is None:
            controls = self._blocks[block].derive(state)
        self.states[block], self._controls[block] = state, controls

    def controls(self, block: int) -> tuple[Control, ...]:
        """The control fields of a block as they stand, in its order."""
        return self._controls[block]

    # --- control edits ---------------------------------------------------------------------

    def control(self, index: int) -> Control:
        """The control field an instruction has now."""
        block, here = self.position(index)
        return self._controls[block][here]

    def tightened(self, index: int) -> Control:
        """The control field with the least stall its opcode allows as the wish."""
        item = self.kernel.instructions[index]
        return replace(self.control(index), stall=self.table.own_stall(item))

    def toggled_stay(self, index: int) -> Control:
        """The control field with the yield hint flipped."""
        now = self.control(index)
        return replace(now, stay=not now.stay, reuse=0 if now.stay else now.reuse)

    def toggled_reuse(self, index: int, slot: int) -> Control:
        """The control field with the operand-cache hint of one source slot flipped.

        The hint is dropped again where its register is not read in the same slot soon after.
        """
        now = self.control(index)
        return replace(now, reuse=now.reuse ^ 1 << slot) if now.stay else now

    # --- output ----------------------------------------------------------------------------

    def words(self) -> Words:
        """The instruction words as they stand now, (low, high) [n, 2]."""
        order = np.fromiter((index for state in self.states for index in state.order), np.int64)
        words = self._original_words[order]
        words[:, 1] &= np.uint64(~CONTROL_MASK & (1 << 64) - 1)
        words[:, 1] |= np.concatenate([self._fields(block) for block in range(len(self.states))])
        return words

    def _fields(self, block: int) -> Words:
        """The control fields of a block where they stand in its high words."""
        controls = self._controls[block]
        known, fields = self._high[block]
        if known is not controls:
            fields = np.fromiter((control.encode(0) for control in controls), np.uint64)
            self._high[block] = controls, fields
        return fields

    def offset_map(self) -> dict[int, int]:
        """{old byte offset: new byte offset} of every instruction that moved."""
        moved: dict[int, int] = {}
        position = 0
        for state in self.states:
            for index in state.order:
                if index != position:
                    moved[index * WORD_BYTES] = position * WORD_BYTES
                position += 1
        return moved

    def info(self) -> bytes:
        """The kernel's `.nv.info` bytes with their offset tables rewritten."""
        moved = self.offset_map()
        return nvinfo.rewrite(self.kernel.info, lambda offset: moved.get(offset, offset))

    def cubin(self) -> Cubin:
        """The edited file."""
        words = [(int(low), int(high)) for low, high in self.words()]
        return self.original.replace(self.original.kernel(self.kernel.name), words, self.info())

    def signature(self) -> tuple[tuple[tuple[int, ...], tuple[Control, ...]], ...]:
        """Orders and control fields of all blocks: equal exactly when the words are."""
        return tuple(
            (state.order, controls)
            for state, controls in zip(self.states, self._controls, strict=True)
        )


def _masks(item: Instruction, memory: MemoryAccess | None, counted: set[int | None]) -> _Masks:
    reads = writes = 0
    for access in item.effects.reads:
        reads |= 1 << access.resource
    for access in item.effects.writes:
        writes |= 1 << access.resource
    setters = 0
    for number in (item.control.write_sb, item.control.read_sb, counting_waits(item)):
        if number is not None and number != NO_SCOREBOARD and number in counted:
            setters |= 1 << number
    lanes = item.effects.info.name in LANE_EXCHANGES
    return _Masks(reads, writes, is_sync(item), lanes, memory, setters)
