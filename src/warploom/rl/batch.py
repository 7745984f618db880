"""Verdicts on many versions of one block at once, by the verifier's own constraints.

A player that wants to know all legal actions needs hundreds of verdicts on states that differ in
one block. `BlockBatch.check` takes K versions of a block and returns K verdicts in a few array
operations; what couples the block to the rest of the kernel is checked by `Coupling.check`.
Together they say what `Verifier.check_words` says (tests compare the two on legal and illegal
versions); the verifier stays the judge of everything that is measured or kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, SCOREBOARDS
from warploom.sass.rules.original import NO_REGISTER, SLOTS, Bools
from warploom.sass.rules.rules import BLOCK_EDGE, Ints
from warploom.sass.rules.versions import FAR, KernelTables, Timed, Versions

_BANKS: Final = 2


class BlockBatch:
    """Checks versions of one block. Rows are numbered inside the block."""

    def __init__(self, tables: KernelTables, block: int) -> None:
        self.tables, self.block = tables, block
        home = tables.kernel.blocks[block]
        self.start, self.size = home.start, home.size
        here = slice(home.start, home.end)
        constraints = tables.constraints
        start, block_of = self.start, tables.block_of
        inside = block_of[constraints.order[:, 0]] == block
        self.order_rows = constraints.order[inside, :2] - start
        inside = block_of[constraints.gaps[:, 0]] == block
        self.gap_rows = constraints.gaps[inside, :3] - (start, start, 0)
        edges = constraints.edge_gaps[constraints.edge_gaps[:, 1] == block]
        self.edge_rows = edges[:, [0, 2, 3]] - (start, 0, 0)
        waits = constraints.waits[constraints.waits[:, 3] == block][:, :3]
        self.wait_rows = np.where(
            (waits == BLOCK_EDGE) & (np.arange(3) < 2), BLOCK_EDGE, waits - (start, start, 0)
        )
        durations = constraints.durations[constraints.durations[:, 0] == block]
        self.least_duration = int(durations[:, 1].max()) if len(durations) else 0
        self.stall, self.stay = tables.stall[here], tables.stay[here]
        self.wait, self.reuse = tables.wait[here], tables.reuse[here]
        self.write_sb, self.read_sb = tables.write_sb[here], tables.read_sb[here]
        self.sets, self.own, self.depbar = tables.sets[here], tables.own[here], tables.depbar[here]
        self.sync_wait, self.no_wait = tables.sync_wait[here], tables.no_wait[here]
        self.sources, self.keeps = tables.sources[here], tables.keeps[here]
        self.pinned = np.flatnonzero(tables.pinned[here])
        self.pipe, self.family = tables.pipe[here], tables.family[here]
        self.close = np.full((self.size, self.size), FAR, np.int64)
        for (one, other), distance in tables.close.items():
            if block_of[one] == block_of[other] == block:
                self.close[one - start, other - start] = distance
        self.early = np.zeros((self.size, self.size), bool)
        for one, other in tables.early:
            if block_of[one] == block_of[other] == block:
                self.early[one - start, other - start] = True
        column = self.sources.T[:, None, :]
        banks = np.arange(_BANKS)[None, :, None]
        self._reads = (column != NO_REGISTER) & (column % _BANKS == banks)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, identity in enumerate(tables.identity[here]):
            groups.setdefault(identity, []).append(number)
        self.twins = [np.array(group) for group in groups.values() if len(group) > 1]
        rows = constraints.reuse[block_of[constraints.reuse[:, 0]] == block]
        self.reuse_rows = rows - (start, 0, 0, start)
        self.reuse_rows[:, 3] = np.where(
            rows[:, 3] == BLOCK_EDGE, BLOCK_EDGE, self.reuse_rows[:, 3]
        )
        # Reuse pairs the compiler itself left unconsumed are not held against a version.
        self.reuse_rows = self.reuse_rows[~self.stale_reuse(self.original())[0]]

    def original(self) -> Versions:
        """The block as compiled, as one version."""
        return Versions(
            np.arange(self.size)[None],
            self.stall[None].copy(),
            self.stay[None].copy(),
            self.wait[None].copy(),
            self.reuse[None].copy(),
        )

    def canonical(self, order: Ints) -> Ints:
        """Orders [K, n] with identical instructions named in ascending order, as the verifier
        names them: it cannot tell them apart either."""
        named = order.copy()
        for twins in self.twins:
            rows, places = np.nonzero(np.isin(order, twins))
            named[rows, places] = np.tile(twins, len(order))
        return named

    def positions(self, order: Ints) -> Ints:
        """The position [K, n] of each instruction."""
        position = np.empty_like(order)
        np.put_along_axis(position, order, np.arange(self.size)[None].repeat(len(order), 0), 1)
        return position

    def check(self, versions: Versions) -> tuple[Bools, Timed]:
        """(which versions break no rule inside the block [K], what `Coupling` needs of them)."""
        order, issue, start = self._placed(versions)
        first, last, ok = self._spaced(order, start)
        ok &= self._sound(versions, order, issue) & ~self.misset(versions, order)[:, -1]
        duration = versions.stall.sum(1)
        rows = self.edge_rows
        inside = issue[:, rows[:, 0]]
        away = np.where(rows[:, 2] == 1, duration[:, None] - inside, inside)
        ok &= (away >= rows[:, 1]).all(1)
        ok &= duration >= self.least_duration
        timed = Timed(
            issue=issue,
            duration=duration,
            first=first,
            last=last,
            first_instruction=order[:, 0],
            last_instruction=order[:, -1],
            first_wait=versions.wait[:, 0],
            last_sets=self.sets[order[:, -1]],
            last_stall=versions.stall[:, -1],
        )
        return ok, timed

    def inside(self, versions: Versions) -> Bools:
        """Which versions break no rule inside the block [K], but for what follows from how long it
        lasts: the distances to its edges, and the fields of its last place."""
        order, issue, start = self._placed(versions)
        return self._spaced(order, start)[2] & self._sound(versions, order, issue)

    def _placed(self, versions: Versions) -> tuple[Ints, Ints, Ints]:
        """Of versions the named order, when each instruction is issued, and when each place is."""
        order = self.canonical(versions.order)
        start = np.cumsum(versions.stall, 1) - versions.stall
        return order, np.take_along_axis(start, self.positions(order), 1), start

    def _sound(self, versions: Versions, order: Ints, issue: Ints) -> Bools:
        position = self.positions(order)
        ok = ~self.misset(versions, order)[:, :-1].any(1) & self._shown(versions, order)
        ok &= (position[:, self.pinned] == self.pinned).all(1)
        rows = self.order_rows
        ok &= (position[:, rows[:, 0]] < position[:, rows[:, 1]]).all(1)
        rows = self.gap_rows
        ok &= (issue[:, rows[:, 1]] - issue[:, rows[:, 0]] >= rows[:, 2]).all(1)
        stale = self.stale_reuse(replace(versions, order=order))
        return ok & ~stale.any(1) & self._waited(versions, order, position)

    def misset(self, versions: Versions, order: Ints) -> Bools:
        """Places whose control field breaks a rule by itself, of versions of that named order."""
        stall, stay, reuse = versions.stall, versions.stay == 1, versions.reuse
        changed = (
            (stall != self.stall[order])
            | (versions.stay != self.stay[order])
            | (reuse != self.reuse[order])
        )
        bad = changed & stay & ((stall < 1) | (stall > MAX_STALL_STAYING))
        bad |= changed & (reuse != 0) & ~stay
        bad |= (stall < self.own[order]) | (stall > MAX_STALL)
        bad |= self.sync_wait[order] & ~versions.wait != 0
        bad |= self.no_wait[order] & (versions.wait != self.wait[order])
        added = reuse & ~self.reuse[order]
        registers = self.sources[order]
        for slot in range(SLOTS):
            bad |= (added >> slot & 1 == 1) & (registers[:, :, slot] == NO_REGISTER)
        bad |= (reuse != 0) & (self.reuse[order] == 0) & ~self.keeps[order]
        # Identical words may set different scoreboards: a name given to a twin must fit.
        bad |= self.write_sb[versions.order] != self.write_sb[order]
        bad |= self.read_sb[versions.order] != self.read_sb[order]
        return bad

    def _shown(self, versions: Versions, order: Ints) -> Bools:
        """Scoreboards are shown one cycle after issue: none is awaited before."""
        one, other = order[:, :-1], order[:, 1:]
        early = (self.sets[one] & versions.wait[:, 1:] != 0) & (versions.stall[:, :-1] < 2)
        return ~(early & ~self.early[one, other]).any(1)

    def stale_reuse(self, versions: Versions) -> Bools:
        """[K, rows of `reuse_rows`]: kept operands neither read again nor displaced in time."""
        rows, order = self.reuse_rows, versions.order
        if not len(rows):
            return np.zeros((len(versions), 0), bool)
        position = self.positions(order)
        holder, slot, register, writer = rows.T
        kept = np.take_along_axis(versions.reuse, position[:, holder], 1) >> slot & 1 == 1
        if not kept.any():
            return kept
        # Short integers: this is the largest array of a check.
        where = np.arange(self.size, dtype=np.int16)
        last = np.empty((SLOTS, _BANKS, *order.shape), np.int16)
        needed = set(zip(slot.tolist(), (register % _BANKS).tolist(), strict=True))
        for number, bank in sorted(needed):
            reads = self._reads[number, bank][order]
            last[number, bank] = np.maximum.accumulate(np.where(reads, where, np.int16(-1)), 1)
        versions_axis = np.arange(len(order))[:, None]
        until = np.where(writer == BLOCK_EDGE, self.size - 1, position[:, np.maximum(writer, 0)])
        refreshed = last[slot, register % _BANKS, versions_axis, until]
        return kept & ~(refreshed > position[:, holder])

    def _waited(self, versions: Versions, order: Ints, position: Ints) -> Bools:
        rows = self.wait_rows
        if not len(rows):
            return np.ones(len(versions), bool)
        where = np.arange(self.size)
        mask = versions.wait | self.depbar[order]
        last = np.stack(
            [
                np.maximum.accumulate(np.where(mask >> number & 1 == 1, where, -1), 1)
                for number in range(SCOREBOARDS)
            ]
        )
        holder, consumer, scoreboard = rows.T
        floor = np.where(holder == BLOCK_EDGE, -1, position[:, holder])
        until = np.where(consumer == BLOCK_EDGE, self.size - 1, position[:, consumer])
        waited: Ints = last[scoreboard, np.arange(len(order))[:, None], until]
        return np.all(waited > floor, axis=1)

    def _spaced(self, order: Ints, start: Ints) -> tuple[Ints, Ints, Bools]:
        """(first and last instruction in each pipe [K, pipes], distances inside the block kept)."""
        count = len(order)
        first = np.full((count, self.tables.pipes), -1, np.int64)
        last = first.copy()
        ok = np.ones(count, bool)
        pipes = self.pipe[order]
        for pipe in range(self.tables.pipes):
            rows, places = np.nonzero(pipes == pipe)
            if not len(rows):
                continue
            places = places.reshape(count, -1)
            members = np.take_along_axis(order, places, 1)
            first[:, pipe], last[:, pipe] = members[:, 0], members[:, -1]
            times = np.take_along_axis(start, places, 1)
            earlier, later = members[:, :-1], members[:, 1:]
            need = self.tables.spacing[self.family[earlier], self.family[later]]
            need = np.minimum(need, self.close[earlier, later])
            ok &= (times[:, 1:] - times[:, :-1] >= need).all(1)
        return first, last, ok
