"""Our actions on one block: moves by one, a few or many places and control edits, fields derived.

Each is worked out as a patch of the version that stands; patches of the last version that was
looked at are kept where nothing they depend on has changed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warploom.rl import carry
from warploom.rl.batch import BlockBatch
from warploom.rl.derive import Wishes, derive, derived_rules, settled
from warploom.rl.judge import Judge
from warploom.rl.offers import BlockNow, Offers, Patched, Windows
from warploom.rl.patches import Asked, Move, Patch, Wish
from warploom.rl.profile import KINDS, Kind
from warploom.rl.trace import Trace
from warploom.sass.rules.versions import Timed, Versions

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
AT_ONCE = 256  # versions that are judged at a time: more leave the caches


class WideActions:
    """The actions of some kinds on one block. `lines`: the line of each instruction that may move
    (-1: none)."""

    def __init__(self, batch: BlockBatch, lines: list[int], kinds: tuple[Kind, ...]) -> None:
        self.batch, self.lines, self.kinds = batch, lines, kinds
        self.rules = derived_rules(batch)
        self.windows = Windows(batch)
        self._coupled = self._coupled_lines()

    def _coupled_lines(self) -> frozenset[int]:
        """Instructions of the block with rows to other blocks or to the block's edges."""
        batch, tables = self.batch, self.batch.tables
        ends = tables.constraints.cross[:, :2].ravel()
        inside = ends[tables.block_of[ends] == batch.block] - batch.start
        return frozenset(inside.tolist()) | frozenset(batch.edge_rows[:, 0].tolist())

    def offers(self, now: BlockNow, before: Offers | None = None) -> Offers:
        """All actions on the block as it stands. `before`: those of a version it came from."""
        lines, kinds, actions = self._actions(now)
        trace = self._trace(now.version, now.wishes)
        if not self._stands(trace, now.version, now.wishes):
            return self.whole_offers(now)
        judge = Judge(trace, self._coupled)
        known: dict[Move | Wish, Patch] = {}
        change = None
        if before is not None and before.patched is not None:
            known = {patch.action: patch for patch in before.patched.patches}
            change = carry.beside(trace, before.patched.trace)
        worked: dict[Move | Wish, Patch] = {}
        fresh: list[Patch] = []
        for action in dict.fromkeys(actions):
            patch, kept = known.get(action), None
            if patch is not None and change is not None and carry.may_keep(trace, patch, change):
                kept = carry.rebase(trace, patch, change)
            if kept is None or patch is None or kept.odd != patch.odd:
                kept = trace.patch(action)
                kept.shifts = judge.shifts(kept)
                kept.sound = kept.odd
                fresh.append(kept)
            worked[action] = kept
        self._find_sound(now, trace, judge, [one for one in fresh if one.cells and not one.odd])
        self._find_legal(
            trace, [one for one in worked.values() if one is not known.get(one.action)]
        )
        patches = [worked[action] for action in actions]
        return self._judged(now, np.array(lines), np.array(kinds), Patched(trace, judge, patches))

    def _find_sound(self, now: BlockNow, trace: Trace, judge: Judge, patches: list[Patch]) -> None:
        """Judge patches inside the block, by the versions they lead to."""
        for begin in range(0, len(patches), AT_ONCE):
            some = patches[begin : begin + AT_ONCE]
            rows = np.arange(len(some))
            versions = self._assembled(now, Patched(trace, judge, some), rows)
            for patch, sound in zip(some, self.batch.inside(versions).tolist(), strict=True):
                patch.sound = sound

    def _find_legal(self, trace: Trace, patches: list[Patch]) -> None:
        """Patches that are sound and whose last place is, too."""
        last = trace.size - 1
        for patch in patches:
            patch.legal = bool(patch.cells) and patch.sound
        ended = [one for one in patches if one.legal and not one.odd and last in one.cells]
        if not ended:
            return
        cells = np.array([one.cells[last] for one in ended], np.int64)
        names = np.array(trace.name)[cells[:, :1]]
        bad = self.batch.misset(Versions(*np.split(cells, cells.shape[1], 1)), names)
        for patch, wrong in zip(ended, bad[:, 0].tolist(), strict=True):
            patch.legal = not wrong

    def _judged(self, now: BlockNow, lines: Ints, kinds: Ints, patched: Patched) -> Offers:
        """Offers of patches: odd ones as whole versions, those that touch the block's edges or
        other blocks with what `Coupling` needs of them, the rest as they are."""
        batch = self.batch
        patches = patched.patches
        legal = np.array([patch.legal for patch in patches], bool)
        odd = np.array([row for row, p in enumerate(patches) if p.odd and p.legal], np.int64)
        coupled: list[tuple[Ints, Timed]] = []
        if len(odd):
            versions = self._assembled(now, patched, odd)
            ok, timed = batch.check(versions)
            legal[odd] = ok & self._differs(batch, versions, now.version)
            coupled.append((odd, timed))
        rows = np.array(
            [
                row
                for row, patch in enumerate(patches)
                if legal[row] and not patch.odd and patched.judge.couples(patch)
            ],
            np.int64,
        )
        if len(rows):
            timed, ok = patched.judge.timed([patches[row] for row in _listed(rows)])
            legal[rows] = ok
            coupled.append((rows, timed))
        return Offers(lines, kinds, legal, coupled, patched=patched)

    def _trace(self, version: Versions, wishes: Wishes) -> Trace:
        asked = (wishes.stall[0], wishes.stay[0], wishes.reuse[0])
        return Trace(self.rules, version.order[0].tolist(), Asked(*(w.tolist() for w in asked)))

    def _stands(self, trace: Trace, version: Versions, wishes: Wishes) -> bool:
        """Whether a trace derives a version."""
        order, stall, wait = (
            np.array([values], np.int64) for values in (trace.order, trace.stalls, trace.waits)
        )
        derived = settled(self.batch, order, stall, wait, wishes)
        return not self._differs(self.batch, derived, version)[0]

    def _assembled(self, now: BlockNow, patched: Patched, rows: Ints) -> Versions:
        """Whole versions of some patches."""
        version = now.version
        stall = np.array([patched.trace.stalls], np.int64)  # as derived, not spread yet
        fields = [
            np.repeat(array, len(rows), 0)
            for array in (version.order, stall, version.stay, version.wait, version.reuse)
        ]
        odd = not patched.trace.regular
        for at, row in enumerate(_listed(rows)):
            patch = patched.patches[row]
            odd |= patch.odd
            for place, cell in patch.cells.items():
                values = (cell.number, cell.stall, cell.stay, cell.wait, cell.reuse)
                for array, value in zip(fields, values, strict=True):
                    array[at, place] = value
        if odd:
            order, stall, _, wait, _ = fields
            return settled(self.batch, order, stall, wait, self._wished(now, patched, rows))
        return Versions(*fields)

    def made(self, now: BlockNow, offers: Offers, rows: Ints) -> tuple[Versions, Wishes]:
        """The versions and wishes that some of the offers on the block lead to.

        A stall that had to be spread over the instructions before it is wished for there from now
        on, so that the version derives as it is.
        """
        patched = offers.patched
        if patched is None:
            return offers.held(rows)
        versions, wishes = self._assembled(now, patched, rows), self._wished(now, patched, rows)
        for at, row in enumerate(_listed(rows)):
            if patched.patches[row].odd:
                self._pin(patched, patched.patches[row], versions.take([at]), wishes, at)
        return versions, wishes

    def _pin(
        self, patched: Patched, patch: Patch, version: Versions, wishes: Wishes, at: int
    ) -> None:
        """Wish for the stalls that had to be spread, where the version then derives as it is."""
        derived = patched.trace.stalls.copy()
        for place, cell in patch.cells.items():
            derived[place] = cell.stall
        longer = np.flatnonzero(version.stall[0] > np.array(derived))
        if not len(longer):
            return
        pinned = wishes.take([at])  # a copy
        pinned.stall[0, version.order[0, longer]] = version.stall[0, longer]
        trace = self._trace(version, pinned)
        if trace.regular and self._stands(trace, version, pinned):
            wishes.stall[at] = pinned.stall[0]

    @staticmethod
    def _wished(now: BlockNow, patched: Patched, rows: Ints) -> Wishes:
        """The wishes of some actions."""
        wishes = now.wishes.repeated(len(rows))
        for at, row in enumerate(_listed(rows)):
            action = patched.patches[row].action
            if isinstance(action, Wish):
                getattr(wishes, action.name)[at, action.number] = action.value
        return wishes

    def _actions(self, now: BlockNow) -> tuple[list[int], list[int], list[Move | Wish]]:
        """(line, kind, action) of everything the profile may do to a block, legal or not."""
        batch, rules = self.batch, self.rules
        position = batch.positions(now.version.order)[0]
        places: list[int] = position.tolist()
        first, last = (side.tolist() for side in self.windows.of(position))
        stall: list[int] = now.version.stall[0][position].tolist()
        stay: list[int] = now.wishes.stay[0].tolist()
        reuse: list[int] = now.wishes.reuse[0].tolist()
        found: list[tuple[int, int, Move | Wish]] = []
        for number, line in enumerate(self.lines):
            if line < 0:
                continue
            here = places[number]
            for column, kind in enumerate(self.kinds):
                spec = KINDS[kind]
                if spec.reach:
                    to = _target(here, first[number], last[number], spec.reach, kind)
                    action = None if to is None else Move.moving(here, to)
                elif kind is Kind.TIGHTEN:
                    own = rules.own[number]
                    action = Wish("stall", number, own) if stall[number] > own else None
                elif kind is Kind.YIELD:
                    action = Wish("stay", number, 1 - stay[number])
                elif rules.bank[number][spec.slot] < 0 or not rules.keeps[number]:
                    action = None
                else:
                    action = Wish("reuse", number, reuse[number] ^ 1 << spec.slot)
                if action is not None:
                    found.append((line, column, action))
        return (
            [line for line, *_ in found],
            [column for _, column, _ in found],
            [action for *_, action in found],
        )

    def whole_offers(self, now: BlockNow) -> Offers:
        """The same offers from whole versions: what patches are tested against, and what is used
        where the version that stands has no trace."""
        lines, kinds, actions = self._actions(now)
        batch = self.batch
        orders = np.repeat(now.version.order, len(actions), 0)
        wishes = now.wishes.repeated(len(actions))
        for row, action in enumerate(actions):
            if isinstance(action, Move):
                moved: list[int] = orders[row].tolist()
                moved.insert(action.to, moved.pop(action.here))
                orders[row] = moved
            else:
                getattr(wishes, action.name)[row, action.number] = action.value
        versions = derive(self.rules, orders, wishes)
        legal, timed = batch.check(versions)
        legal &= self._differs(batch, versions, now.version)
        rows = np.arange(len(actions))
        return Offers(np.array(lines), np.array(kinds), legal, [(rows, timed)], versions, wishes)

    @staticmethod
    def _differs(batch: BlockBatch, versions: Versions, now: Versions) -> Bools:
        """Which versions are other words than the ones that stand."""
        differs = (batch.canonical(versions.order) != batch.canonical(now.order)).any(1)
        for name in ("stall", "stay", "wait", "reuse"):
            differs |= (getattr(versions, name) != getattr(now, name)).any(1)
        return differs


def _target(here: int, first: int, last: int, reach: tuple[int, int], kind: Kind) -> int | None:
    """Where a move of `reach` (least, most) positions ends, None when there is no such room."""
    least, most = reach
    up = kind in (Kind.UP, Kind.UP_FEW, Kind.UP_FAR)
    room = here - first if up else last - here
    if room < least:
        return None
    step = min(room, most)
    return here - step if up else here + step


def _listed(rows: Ints) -> list[int]:
    found: list[int] = rows.tolist()
    return found
