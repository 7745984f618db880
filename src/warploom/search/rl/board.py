"""The state of an assembly game and every action on it, worked out before it is taken.

A `Board` holds a version of each block. `offers` lists, for one block, every action of the profile
with the version it leads to and whether that version is legal by the verifier's rules. Offers of
blocks that did not change are kept, and those of states seen before are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.errors import CheckFailed, InputError
from warploom.sass.batch import BlockBatch, Coupling, KernelTables, Timed, Versions
from warploom.sass.control import Control
from warploom.sass.loops import depths, natural_loops
from warploom.sass.rederive import BlockState
from warploom.search.game import Candidate, Game
from warploom.search.rl.derive import NO_WISH, BatchDeriver, Wishes
from warploom.search.rl.profile import KINDS, Kind, Profile

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
REMEMBERED: Final = 48  # states of blocks whose offers are kept: a few megabytes each

FEWEST: Final = 32


@dataclass(frozen=True)
class BlockNow:
    """One block as it stands: its version, what was wished for, its interface to the others."""

    version: Versions
    wishes: Wishes
    timed: Timed
    row: int


@dataclass(frozen=True)
class Offers:
    """The actions on one block: (line, kind) of each, the versions they lead to, local verdicts."""

    lines: Ints
    kinds: Ints
    versions: Versions
    wishes: Wishes
    legal: Bools
    timed: Timed


class Board:
    """One kernel's game for a profile. Lines are instructions of the blocks in `scope`."""

    def __init__(self, game: Game, profile: Profile) -> None:
        self.game, self.profile = game, profile
        self.kernel = game.kernel
        self.tables = KernelTables(game.verifier)
        self.batches = [BlockBatch(self.tables, block.index) for block in self.kernel.blocks]
        self.coupling = Coupling(self.tables, self.batches)
        self.depth = depths(self.kernel, natural_loops(self.kernel))
        self.scope = self._scope()
        self.lines = self._lines()
        self.line_of = {int(index): line for line, index in enumerate(self.lines)}
        self._derivers = (
            {} if profile.kept else {b: BatchDeriver(self.batches[b]) for b in self.scope}
        )
        self._must = {block: self._must_precede(self.batches[block]) for block in self.scope}
        self.movable = self._movable()
        if not self.movable.any():
            raise InputError(f"{self.kernel.name}: no instruction of the profile may move")
        self._memory: OrderedDict[tuple[int, bytes], Offers] = OrderedDict()
        self.now = [self._read(block) for block in range(len(self.batches))]
        self.start = list(self.now)
        self._synced: list[BlockNow | None] = [None] * len(self.batches)
        self._offers: dict[int, tuple[BlockNow, Offers]] = {}

    def _scope(self) -> list[int]:
        """Blocks worth playing, deepest loops and largest first, in layout order: those that fit
        into the profile's lines, and at least one."""
        wanted = [b for b in self.kernel.blocks if b.size > 1 and self._has_moves(b.index)]
        wanted.sort(key=lambda block: (-self.depth[block.index], -block.size))
        chosen: list[int] = []
        lines = 0
        for block in wanted:
            if not chosen or lines + block.size <= self.profile.lines:
                chosen.append(block.index)
                lines += block.size
        if not chosen:
            raise InputError(f"{self.kernel.name}: no block with an instruction that may move")
        return sorted(chosen)

    def _lines(self) -> Ints:
        """The instructions of the scope; where there is no room for all, from the first that may
        move on."""
        batches = [self.batches[block] for block in self.scope]
        lines = np.concatenate([np.arange(b.start, b.start + b.size) for b in batches])
        first = next(place for place, index in enumerate(lines) if self._may_move(int(index)))
        room = self._room()
        begin = min(first, max(0, len(lines) - room))
        return lines[begin : begin + room]

    def _room(self) -> int:
        """How many lines are played: fewer in a block larger than the profile's lines, because
        every action costs a version of the whole block."""
        largest = max(self.batches[block].size for block in self.scope)
        if self.profile.kept or largest <= self.profile.lines:
            return self.profile.lines
        return max(FEWEST, self.profile.lines**2 // largest)

    def _has_moves(self, block: int) -> bool:
        home = self.kernel.blocks[block]
        return any(self._may_move(index) for index in range(home.start, home.end))

    def _may_move(self, index: int) -> bool:
        item = self.kernel.instructions[index]
        return not item.pinned and (not self.profile.moves or item.base in self.profile.moves)

    def _movable(self) -> Bools:
        return np.array([self._may_move(int(index)) for index in self.lines], bool)

    @staticmethod
    def _must_precede(batch: BlockBatch) -> Bools:
        must = np.zeros((batch.size, batch.size), bool)
        must[batch.order_rows[:, 0], batch.order_rows[:, 1]] = True
        return must

    def _read(self, block: int) -> BlockNow:
        """A block as the editor has it (as compiled, or taken over from an earlier search)."""
        editor, batch = self.game.editor, self.batches[block]
        controls = editor.controls(block)
        order = np.array(editor.states[block].order, np.int64)[None] - batch.start
        version = Versions(
            order,
            *(
                np.array([[int(getattr(control, name)) for control in controls]], np.int64)
                for name in ("stall", "stay", "wait", "reuse")
            ),
        )
        original = batch.original()
        compiled = all(
            np.array_equal(getattr(version, name), getattr(original, name))
            for name in ("order", "stall", "stay", "wait", "reuse")
        )
        wishes = Wishes(*(np.empty_like(order) for _ in range(3)))
        for wish, field in (
            (wishes.stall, np.full_like(order, NO_WISH) if compiled else version.stall),
            (wishes.stay, version.stay),
            (wishes.reuse, version.reuse),
        ):
            np.put_along_axis(wish, order, field, 1)
        ok, timed = batch.check(version)
        if not ok[0]:
            raise CheckFailed(f"{self.kernel.name}: block {block} is illegal as it stands")
        self.coupling.set(block, timed, 0)
        return BlockNow(version, wishes, timed, 0)

    # --- actions ---------------------------------------------------------------------------

    @property
    def actions(self) -> int:
        """The size of the action space: every line the profile has room for, times the kinds."""
        return self.profile.lines * len(self.profile.kinds)

    def mask(self) -> Bools:
        """Which actions are legal now [actions]."""
        mask = np.zeros(self.actions, bool)
        for block in self.scope:
            offers = self.offers(block)
            legal = offers.legal & self.coupling.check(block, offers.timed)
            mask[self._numbers(offers)[legal]] = True
        return mask

    def _numbers(self, offers: Offers) -> Ints:
        return offers.lines * len(self.profile.kinds) + offers.kinds

    def words(self, action: int) -> str:
        """An action in words: its kind, and the instruction by its offset as compiled."""
        line, kind = divmod(int(action), len(self.profile.kinds))
        item = self.kernel.instructions[int(self.lines[line])]
        return f"{self.profile.kinds[kind].value}: {item}"

    def take(self, action: int) -> None:
        """Take an action; raises `InputError` when it is not legal now."""
        line, kind = divmod(int(action), len(self.profile.kinds))
        if line >= len(self.lines):
            raise InputError(f"action {action} is not legal in this state")
        block = int(self.tables.block_of[self.lines[line]])
        offers = self.offers(block)
        row = np.flatnonzero((offers.lines == line) & (offers.kinds == kind))
        legal = offers.legal & self.coupling.check(block, offers.timed)
        if not len(row) or not legal[row[0]]:
            raise InputError(f"action {action} is not legal in this state")
        chosen = row[:1]
        wishes = Wishes(
            offers.wishes.stall[chosen], offers.wishes.stay[chosen], offers.wishes.reuse[chosen]
        )
        now = BlockNow(offers.versions.take(chosen), wishes, offers.timed, int(row[0]))
        self._place(block, now)

    def _place(self, block: int, now: BlockNow) -> None:
        self.now[block] = now
        self.coupling.set(block, now.timed, now.row)

    def snapshot(self) -> list[BlockNow]:
        """The state, to come back to."""
        return list(self.now)

    def restore(self, snapshot: list[BlockNow]) -> None:
        """Return to a snapshot."""
        for block, now in enumerate(snapshot):
            if self.now[block] is not now:
                self._place(block, now)

    def offers(self, block: int) -> Offers:
        """All actions on a block as it stands."""
        kept = self._offers.get(block)
        now = self.now[block]
        if kept is not None and kept[0] is now:
            return kept[1]
        version, wishes = now.version, now.wishes
        key = (
            block,
            b"".join(
                array.astype(np.int16).tobytes()
                for array in (
                    *(version.order, version.stall, version.stay, version.wait, version.reuse),
                    *(wishes.stall, wishes.stay, wishes.reuse),
                )
            ),
        )
        offers = self._memory.get(key)
        if offers is None:
            offers = self._steps(block) if self.profile.kept else self._wide(block)
            self._memory[key] = offers
            if len(self._memory) > REMEMBERED:
                self._memory.popitem(last=False)
        else:
            self._memory.move_to_end(key)
        self._offers[block] = (now, offers)
        return offers

    def _steps(self, block: int) -> Offers:
        """CuAsmRL's actions: a memory instruction swaps with the line above or below, control
        fields travelling unchanged."""
        batch, now = self.batches[block], self.now[block].version
        order = now.order[0]
        found: list[tuple[int, int, int]] = []
        for place, number in enumerate(order.tolist()):
            line = self.line_of.get(number + batch.start)
            if line is None or not self.movable[line]:
                continue
            for kind, step in enumerate((-1, 1)):
                other = place + step
                if 0 <= other < batch.size:
                    found.append((line, kind, min(place, other)))
        rows = np.arange(len(found))
        upper = np.array([place for *_, place in found], np.int64)
        versions = Versions(
            *(
                _swapped(np.repeat(array, len(found), 0), rows, upper)
                for array in (now.order, now.stall, now.stay, now.wait, now.reuse)
            )
        )
        legal, timed = batch.check(versions)
        wishes = Wishes(*(np.zeros((len(found), batch.size), np.int64) for _ in range(3)))
        lines = np.array([line for line, *_ in found], np.int64)
        kinds = np.array([kind for _, kind, _ in found], np.int64)
        return Offers(lines, kinds, versions, wishes, legal, timed)

    def _wide(self, block: int) -> Offers:
        """Moves by one, a few or many positions and control edits, fields re-derived."""
        batch, now = self.batches[block], self.now[block]
        order: list[int] = now.version.order[0].tolist()
        position = batch.positions(now.version.order)[0]
        first, last = self.windows(block)
        found: list[tuple[int, int]] = []
        orders: list[list[int]] = []
        edits: list[tuple[int, str, int, int]] = []
        stall = now.version.stall[0][position]
        for number in range(batch.size):
            line = self.line_of.get(number + batch.start)
            if line is None or not self.movable[line]:
                continue
            here = int(position[number])
            for column, kind in enumerate(self.profile.kinds):
                spec = KINDS[kind]
                if spec.reach:
                    to = _target(here, int(first[number]), int(last[number]), spec.reach, kind)
                    if to is None:
                        continue
                    moved = order.copy()
                    moved.insert(to, moved.pop(here))
                    orders.append(moved)
                elif kind is Kind.TIGHTEN:
                    if stall[number] <= batch.own[number]:
                        continue
                    edits.append((len(found), "stall", number, int(batch.own[number])))
                    orders.append(order)
                elif kind is Kind.YIELD:
                    edits.append((len(found), "stay", number, 1 - int(now.wishes.stay[0, number])))
                    orders.append(order)
                else:
                    if batch.sources[number, spec.slot] == 255 or not batch.arithmetic[number]:
                        continue
                    flipped = int(now.wishes.reuse[0, number]) ^ 1 << spec.slot
                    edits.append((len(found), "reuse", number, flipped))
                    orders.append(order)
                found.append((line, column))
        wishes = Wishes(
            *(
                np.repeat(wish, len(found), 0)
                for wish in (now.wishes.stall, now.wishes.stay, now.wishes.reuse)
            )
        )
        for row, name, number, value in edits:
            getattr(wishes, name)[row, number] = value
        array = np.array(orders, np.int64).reshape(len(found), batch.size)
        versions = self._derivers[block].derive(array, wishes)
        legal, timed = batch.check(versions)
        legal &= self._differs(batch, versions, now.version)
        lines = np.array([line for line, _ in found], np.int64)
        kinds = np.array([column for _, column in found], np.int64)
        return Offers(lines, kinds, versions, wishes, legal, timed)

    def windows(self, block: int) -> tuple[Ints, Ints]:
        """First and last position each instruction may move to, by order alone."""
        batch, must = self.batches[block], self._must[block]
        position = batch.positions(self.now[block].version.order)[0]
        first = np.where(must, position[:, None], -1).max(0) + 1
        last = np.where(must, position[None, :], batch.size).min(1) - 1
        # What is pinned stands at its own number and is not crossed.
        pins = batch.pinned
        behind = np.where(pins[:, None] < position, pins[:, None] + 1, 0)
        ahead = np.where(pins[:, None] > position, pins[:, None] - 1, batch.size - 1)
        first = np.maximum(first, behind.max(0, initial=0))
        last = np.minimum(last, ahead.min(0, initial=batch.size - 1))
        return first, last

    @staticmethod
    def _differs(batch: BlockBatch, versions: Versions, now: Versions) -> Bools:
        """Which versions are other words than the ones that stand."""
        differs = (batch.canonical(versions.order) != batch.canonical(now.order)).any(1)
        for name in ("stall", "stay", "wait", "reuse"):
            differs |= (getattr(versions, name) != getattr(now, name)).any(1)
        return differs

    # --- the state for others ----------------------------------------------------------------

    def controls(self, block: int) -> tuple[tuple[int, ...], tuple[Control, ...]]:
        """(order in the kernel's numbering, control fields by position) of a block."""
        batch, version = self.batches[block], self.now[block].version
        order = batch.canonical(version.order)[0]
        fields = zip(
            version.stall[0].tolist(),
            version.stay[0].tolist(),
            batch.write_sb[order].tolist(),
            batch.read_sb[order].tolist(),
            version.wait[0].tolist(),
            version.reuse[0].tolist(),
            strict=True,
        )
        controls = tuple(Control(s, bool(y), w, r, m, u) for s, y, w, r, m, u in fields)
        return tuple((order + batch.start).tolist()), controls

    def sync(self) -> None:
        """Put this state into the game's editor."""
        for block, now in enumerate(self.now):
            if self._synced[block] is not now:
                order, controls = self.controls(block)
                state = BlockState(order, dict(zip(order, controls, strict=True)), True)
                self.game.editor.restore(block, state, controls)
                self._synced[block] = now

    def candidate(self) -> Candidate:
        """The state as a file, judged by the verifier itself.

        Raises `CheckFailed` when the verifier refuses what the mask allowed: a defect here, never
        to be passed over.
        """
        self.sync()
        candidate = self.game.current()
        if not candidate.verdict.legal:
            raise CheckFailed(f"{self.kernel.name}: the mask allowed what is {candidate.verdict}")
        return candidate


def _swapped(array: Ints, rows: Ints, upper: Ints) -> Ints:
    array[rows, upper], array[rows, upper + 1] = array[rows, upper + 1], array[rows, upper]
    return array


def _target(here: int, first: int, last: int, reach: tuple[int, int], kind: Kind) -> int | None:
    """Where a move of `reach` (least, most) positions ends, None when there is no such room."""
    least, most = reach
    up = kind in (Kind.UP, Kind.UP_FEW, Kind.UP_FAR)
    room = here - first if up else last - here
    if room < least:
        return None
    step = min(room, most)
    return here - step if up else here + step
