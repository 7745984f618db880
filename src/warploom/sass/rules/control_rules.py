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
        position, order, fields = state.position, state.order, state.fields
        found: list[Finding] = []

        def report(rule: str, bad: Bools, reason: str) -> None:
            found.extend(
                self.original.finding(rule, int(order[where]), reason)
                for where in np.flatnonzero(bad).tolist()
            )

        stall, stay = fields.stall, fields.stay == 1
        changed = (
            (stall != self.original.before.stall[order])
            | (fields.stay != self.original.before.stay[order])
            | (fields.reuse != self.original.before.reuse[order])
        )
        report(
            "CONTROL_L1",
            changed & stay & ((stall < 1) | (stall > MAX_STALL_STAYING)),
            f"stay needs a stall of 1 to {MAX_STALL_STAYING}",
        )
        report("CONTROL_L2", changed & (fields.reuse != 0) & ~stay, "reuse without stay")
        report(
            "OWN_STALL",
            stall < self.original.own[order],
            "stall below the least seen for this opcode",
        )
        report(
            "CONTROL_WAIT",
            self.original.no_wait[order] & (fields.wait != self.original.before.wait[order]),
            "the instruction takes no wait",
        )
        # A barrier, fence or arrival may wait for what no register shows (an earlier fence).
        report(
            "WAIT", self.original.sync_wait[order] & ~fields.wait != 0, "a sync lost a wait it had"
        )
        for name in ("write_sb", "read_sb"):
            now, before = getattr(fields, name), getattr(self.original.before, name)[order]
            report("SCOREBOARD", now != before, f"{name} changed")
        registers = self.original.sources[order]
        for slot in range(SLOTS):
            added = (fields.reuse >> slot & 1 == 1) & (
                self.original.before.reuse[order] >> slot & 1 == 0
            )
            report(
                "REUSE", added & (registers[:, slot] == NO_REGISTER), "reuse of no register source"
            )
        added = (fields.reuse != 0) & (self.original.before.reuse[order] == 0)
        report("REUSE", added & ~self.original.keeps[order], "reuse on an opcode that takes none")
        bad_pins = self.original.pinned[position[self.original.pinned] != self.original.pinned]
        found.extend(
            self.original.finding(
                "PINNED", int(index), self.original.kernel.instructions[int(index)].pinned
            )
            for index in bad_pins
        )
        stale = self._stale_reuse(position, order, fields.reuse, self._reuse_rows)
        found.extend(
            self.original.finding("REUSE", int(row[0]), self._lost(row))
            for row in self._reuse_rows[stale]
        )
        # A scoreboard's increment shows one cycle after issue.
        sets = scoreboards_set(fields)
        early = (sets[:-1] & fields.wait[1:] != 0) & (stall[:-1] < 2)
        found.extend(
            self.original.finding(
                "SCOREBOARD_VISIBLE", int(order[where]), "waited for in the next cycle"
            )
            for where in np.flatnonzero(early).tolist()
            if (int(order[where]), int(order[where + 1])) not in self.original.early
        )
        return found

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
