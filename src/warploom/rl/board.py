"""The state of an assembly game and every action on it, worked out before it is taken.

A `Board` holds a version of each block. `offers` lists, for one block, every action of the profile
with the version it leads to and whether that version is legal by the verifier's rules. Offers of
blocks that did not change are kept, and those of states seen before are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.errors import CheckFailed, InputError
from warploom.rl.batch import BlockBatch
from warploom.rl.coupling import Coupling
from warploom.rl.derive import NO_WISH, Wishes
from warploom.rl.offers import BlockNow, Offers, Windows
from warploom.rl.profile import Profile
from warploom.rl.wide import WideActions
from warploom.sass.decode.control import Control
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.rules.versions import KernelTables, Versions
from warploom.search.game import Candidate, Game

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
REMEMBERED: Final = 24  # states of blocks whose offers are kept: a few megabytes each


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
        self.movable = self._movable()
        if not self.movable.any():
            raise InputError(f"{self.kernel.name}: no instruction of the profile may move")
        self.wide = {} if profile.kept else {block: self._wide(block) for block in self.scope}
        self._windows = {block: Windows(self.batches[block]) for block in self.scope}
        self._memory: OrderedDict[tuple[int, bytes], Offers] = OrderedDict()
        self.now = [self._read(block) for block in range(len(self.batches))]
        self.start = list(self.now)
        self._synced: list[BlockNow | None] = [None] * len(self.batches)
        self._offers: dict[int, tuple[BlockNow, Offers]] = {}

    def _scope(self) -> list[int]:
        """Blocks worth playing, deepest loops and largest first, in layout order: those that fit
        into the profile's hot lines, and at least one."""
        wanted = [b for b in self.kernel.blocks if b.size > 1 and self._has_moves(b.index)]
        wanted.sort(key=lambda block: (-self.depth[block.index], -block.size))
        chosen: list[int] = []
        lines = 0
        for block in wanted:
            if not chosen or lines + block.size <= self.profile.hot:
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
        room = self.profile.lines
        begin = min(first, max(0, len(lines) - room))
        return lines[begin : begin + room]

    def _has_moves(self, block: int) -> bool:
        home = self.kernel.blocks[block]
        return any(self._may_move(index) for index in range(home.start, home.end))

    def _may_move(self, index: int) -> bool:
        item = self.kernel.instructions[index]
        return not item.pinned and (not self.profile.moves or item.base in self.profile.moves)

    def _movable(self) -> Bools:
        return np.array([self._may_move(int(index)) for index in self.lines], bool)

    def _wide(self, block: int) -> WideActions:
        batch = self.batches[block]
        lines = [self.line_of.get(batch.start + number, -1) for number in range(batch.size)]
        lines = [line if line >= 0 and self.movable[line] else -1 for line in lines]
        return WideActions(batch, lines, self.profile.kinds)

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
            mask[self._numbers(offers)[offers.fitting(block, self.coupling)]] = True
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
        if not len(row) or not offers.fitting(block, self.coupling)[row[0]]:
            raise InputError(f"action {action} is not legal in this state")
        kept = self.profile.kept
        version, wishes = (
            offers.held(row[:1])
            if kept
            else self.wide[block].made(self.now[block], offers, row[:1])
        )
        # Judged once more as a whole: what a mask allowed in parts must stand as one version.
        legal, timed = self.batches[block].check(version)
        if not kept and not (legal & self.coupling.check(block, timed))[0]:
            raise CheckFailed(
                f"{self.kernel.name}: the mask allowed what is illegal: {self.words(action)}"
            )
        self._place(block, BlockNow(version, wishes, timed, 0))

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
        before = kept[1] if kept is not None else None
        if offers is None:
            kept_fields = self.profile.kept
            offers = self._steps(block) if kept_fields else self.wide[block].offers(now, before)
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
        return Offers(lines, kinds, legal, [(rows, timed)], versions, wishes)

    def windows(self, block: int) -> tuple[Ints, Ints]:
        """First and last position each instruction may move to, by order alone."""
        position = self.batches[block].positions(self.now[block].version.order)[0]
        return self._windows[block].of(position)

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
