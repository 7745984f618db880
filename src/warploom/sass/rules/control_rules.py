"""Rules on control fields alone: defined values, least stalls, scoreboards, reuse, pins."""

from __future__ import annotations

from typing import Final

import numpy as np

from warploom.sass.decode.control import MAX_STALL_STAYING
from warploom.sass.rules.original import NO_REGISTER, SLOTS, Bools, Original, State, scoreboards_set
from warploom.sass.rules.rules import BLOCK_EDGE, Ints
from warploom.sass.rules.verdict import Finding

_BANKS: Final = 2


class ControlRules:
    """Checks the control fields of states of one original."""

    def __init__(self, original: Original) -> None:
        self.original = original
        # Reuse pairs the compiler itself left unconsumed are not held against a candidate.
        identity = np.arange(original.count)
        reuse = original.constraints.reuse
        broken = self._stale_reuse(identity, identity, original.before.reuse, reuse)
        self._reuse_rows = reuse[~broken]

    def check(self, state: State) -> list[Finding]:
        """Findings about fields, pins and kept operands."""
        return [
            *self._encoding(state),
            *self._waits(state),
            *self._operands(state),
            *self._pins(state),
            *self._visible(state),
        ]

    def _report(self, rule: str, state: State, bad: Bools, reason: str) -> list[Finding]:
        places = np.flatnonzero(bad).tolist()
        return [self.original.finding(rule, int(state.order[p]), reason) for p in places]

    def _encoding(self, state: State) -> list[Finding]:
        """Changed fields that are undefined, and stalls below the least of an opcode."""
        order, fields, before = state.order, state.fields, self.original.before
        stall, stay = fields.stall, fields.stay == 1
        changed = (
            (stall != before.stall[order])
            | (fields.stay != before.stay[order])
            | (fields.reuse != before.reuse[order])
        )
        undefined = changed & stay & ((stall < 1) | (stall > MAX_STALL_STAYING))
        least = f"stay needs a stall of 1 to {MAX_STALL_STAYING}"
        lost = changed & (fields.reuse != 0) & ~stay
        short = stall < self.original.own[order]
        return [
            *self._report("CONTROL_L1", state, undefined, least),
            *self._report("CONTROL_L2", state, lost, "reuse without stay"),
            *self._report("OWN_STALL", state, short, "stall below the least seen for this opcode"),
        ]

    def _waits(self, state: State) -> list[Finding]:
        """Waits where none is defined, waits that a sync lost, scoreboards set anew."""
        order, fields, before = state.order, state.fields, self.original.before
        undefined = self.original.no_wait[order] & (fields.wait != before.wait[order])
        # A barrier, fence or arrival may wait for what no register shows (an earlier fence).
        lost = self.original.sync_wait[order] & ~fields.wait != 0
        found = self._report("CONTROL_WAIT", state, undefined, "the instruction takes no wait")
        found += self._report("WAIT", state, lost, "a sync lost a wait it had")
        for name in ("write_sb", "read_sb"):
            moved = getattr(fields, name) != getattr(before, name)[order]
            found += self._report("SCOREBOARD", state, moved, f"{name} changed")
        return found

    def _operands(self, state: State) -> list[Finding]:
        """Operands kept that are none, or that are rewritten before they are read again."""
        order, now = state.order, state.fields.reuse
        before, registers = self.original.before.reuse[order], self.original.sources[order]
        found: list[Finding] = []
        for slot in range(SLOTS):
            added = (now >> slot & 1 == 1) & (before >> slot & 1 == 0)
            none = added & (registers[:, slot] == NO_REGISTER)
            found += self._report("REUSE", state, none, "reuse of no register source")
        added = (now != 0) & (before == 0) & ~self.original.keeps[order]
        found += self._report("REUSE", state, added, "reuse on an opcode that takes none")
        stale = self._stale_reuse(state.position, order, now, self._reuse_rows)
        return found + [
            self.original.finding("REUSE", int(row[0]), self._lost(row))
            for row in self._reuse_rows[stale]
        ]

    def _pins(self, state: State) -> list[Finding]:
        pinned, items = self.original.pinned, self.original.kernel.instructions
        moved: list[int] = pinned[state.position[pinned] != pinned].tolist()
        return [self.original.finding("PINNED", index, items[index].pinned) for index in moved]

    def _visible(self, state: State) -> list[Finding]:
        """A scoreboard's increment shows one cycle after issue."""
        order, fields = state.order, state.fields
        sets = scoreboards_set(fields)
        early = (sets[:-1] & fields.wait[1:] != 0) & (fields.stall[:-1] < 2)
        return [
            self.original.finding(
                "SCOREBOARD_VISIBLE", int(order[where]), "waited for in the next cycle"
            )
            for where in np.flatnonzero(early).tolist()
            if (int(order[where]), int(order[where + 1])) not in self.original.early
        ]

    def _stale_reuse(self, position: Ints, order: Ints, reuse: Ints, rows: Ints) -> Bools:
        """Rows of `reuse` whose kept operand is neither read again nor displaced in time."""
        original = self.original
        if not len(rows):
            return np.zeros(0, bool)
        holder, slot, register, writer = rows.T
        where = np.arange(original.count)
        sources = original.sources[order]
        last = np.empty((SLOTS, _BANKS, original.count), np.int64)
        for number in range(SLOTS):
            column = sources[:, number]
            for bank in range(_BANKS):
                reads = (column != NO_REGISTER) & (column % _BANKS == bank)
                last[number, bank] = np.maximum.accumulate(np.where(reads, where, -1))
        kept = reuse[position[holder]] >> slot & 1 == 1
        end = original.block_end[original.block_of[holder]] - 1
        until = np.where(writer == BLOCK_EDGE, end, position[np.maximum(writer, 0)])
        refreshed = last[slot, register % _BANKS, until] > position[holder]
        return kept & ~refreshed

    def _lost(self, row: Ints) -> str:
        kept = f"kept R{row[2]}"
        if row[3] == BLOCK_EDGE:
            return f"{kept} is not read again in its block"
        if row[3] == row[0]:
            return f"{kept} is overwritten by the instruction itself"
        return f"{kept} is rewritten by {self.original.name(int(row[3]))}"
