"""One kernel as compiled, as arrays: what a candidate is compared with, and how it is named.

A `State` is a candidate in the same terms: where each original instruction stands now, and the
control fields by position. The rules (`control_rules`, `order_rules`, `distance_rules`) are
functions of these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.sass.decode.control import CONTROL_MASK, NO_SCOREBOARD
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel
from warploom.sass.decode.operand_slots import keeps_operands, slot_registers
from warploom.sass.decode.words import ControlFields, Words, control_fields, instruction_words
from warploom.sass.flow.aliasing import is_sync
from warploom.sass.flow.latency import LatencyTable
from warploom.sass.flow.scoreboard import takes_no_wait, waited_scoreboards
from warploom.sass.rules.rules import Constraints, Ints
from warploom.sass.rules.verdict import Finding

Bools = npt.NDArray[np.bool_]
CLEAR: Final = np.uint64(~CONTROL_MASK & (1 << 64) - 1)
SLOTS: Final = 3
NO_REGISTER: Final = 255


@dataclass(frozen=True)
class State:
    """A candidate: `position` [n] of each original instruction, `order` [n] the original
    instruction at each position, control fields by position."""

    position: Ints
    order: Ints
    fields: ControlFields


def scoreboards_set(fields: ControlFields) -> Ints:
    """The scoreboards [n] that each instruction sets, as bits."""
    sets = np.zeros(len(fields.stall), np.int64)
    for number in (fields.write_sb, fields.read_sb):
        sets |= np.where(number != NO_SCOREBOARD, 1 << number, 0)
    return sets


class Original:
    """A decoded kernel, its constraints, and both as arrays over its instructions."""

    def __init__(
        self, cubin: Cubin, kernel: Kernel, table: LatencyTable, constraints: Constraints
    ) -> None:
        self.kernel, self.table, self.constraints = kernel, table, constraints
        words = instruction_words(cubin, kernel.name)
        self.low: Words = words[:, 0].copy()
        self.high: Words = words[:, 1].copy()
        self.identity_high = self.high & CLEAR
        self.before = control_fields(self.high)
        self.count = len(kernel.instructions)
        self.block_start = np.array([block.start for block in kernel.blocks], np.int64)
        self.block_end = np.array([block.end for block in kernel.blocks], np.int64)
        self.block_of = np.array(kernel.block_of, np.int64)
        self.pinned = np.array(
            [item.index for item in kernel.instructions if item.pinned], np.int64
        )
        self.own = np.array([table.own_stall(item) for item in kernel.instructions], np.int64)
        depbar = [waited_scoreboards(item) & ~item.control.wait for item in kernel.instructions]
        self.depbar = np.array(depbar, np.int64)
        self.sources = np.array(
            [
                [slot_registers(item).get(slot, NO_REGISTER) for slot in range(SLOTS)]
                for item in kernel.instructions
            ],
            np.int64,
        ).reshape(self.count, SLOTS)
        self.sync_wait = np.array(
            [item.control.wait if is_sync(item) else 0 for item in kernel.instructions], np.int64
        )
        self.no_wait = np.array([takes_no_wait(item) for item in kernel.instructions], np.bool_)
        self.keeps = np.array([keeps_operands(item) for item in kernel.instructions], np.bool_)
        self.sets = scoreboards_set(self.before)
        early = (self.sets[:-1] & self.before.wait[1:] != 0) & (self.before.stall[:-1] < 2)
        # Pairs that the compiler itself lets await a scoreboard in the cycle after it was set.
        self.early = {(index, index + 1) for index in np.flatnonzero(early).tolist()}

    def finding(
        self, rule: str, index: int, reason: str, other: int | None = None, remedy: str = ""
    ) -> Finding:
        """A finding about an instruction, and an `other` one, by their indices as compiled."""
        item = self.kernel.instructions[index]
        named = "" if other is None else self.name(other)
        return Finding(rule, item.offset, item.line.text, reason, named, remedy)

    def name(self, index: int) -> str:
        """An instruction in words; a negative index is a block's edge."""
        return str(self.kernel.instructions[index]) if index >= 0 else "the block's edge"

    def times(self, fields: ControlFields) -> tuple[Ints, Ints]:
        """(issue time at each position from the kernel's start, duration of each block)."""
        ends = np.cumsum(fields.stall)
        times = ends - fields.stall
        duration = ends[self.block_end - 1] - times[self.block_start]
        return times, duration
