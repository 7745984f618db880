"""The assembly game: a kernel's machine code, the legal actions on it, apply and undo.

Every state a player is shown has passed `verify`'s rules, read from the bytes; an action that
breaks one is undone and reported with the rule. The two families of actions are those of SIP
(memory instructions, one step up or down, control fields unchanged) and the wide one (any
instruction, any distance, control fields re-derived, plus pure control edits).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final

from warploom.errors import InputError
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.opcodes import Order
from warploom.sass.decode.operand_slots import slot_registers
from warploom.sass.decode.words import Words
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.rules.verdict import Verdict
from warploom.sass.rules.verify import Verifier
from warploom.sass.timing.timing_model import TimingModel
from warploom.search.actions import STEPS, Action, Move, Reorder, SetControl

MEMORY_MOVES: Final = frozenset("LDG STG LDGSTS LDS STS LDSM STSM LD ST".split())
CONTROL_SHARE: Final = 0.25
FAR: Final = 24
# Kinds of control edit, the likelier ones more than once, and the move that allows each.
CONTROL_EDITS: Final = ("tighten", "tighten", "yield", "reuse")
EDIT_MOVES: Final = {"tighten": "stall", "yield": "yield", "reuse": "reuse"}
UNWANTED: Final = "UNWANTED"  # the rule of a refusal that is the player's own


class Family(Enum):
    """Which actions the game offers."""

    MEMORY = "memory"
    WIDE = "wide"


@dataclass(frozen=True)
class Candidate:
    """One legal state: the file, its digest, and how it differs from the original."""

    cubin: bytes
    digest: str
    verdict: Verdict


@dataclass(frozen=True)
class Refusal:
    """An action that was undone: the rule it broke, in words."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """All blocks of a state with their control fields, to return to it."""

    states: tuple[BlockState, ...]
    controls: tuple[tuple[Control, ...], ...]


class Game:
    """One kernel being rearranged. `tally` counts what became of the actions tried.

    `moves` restricts what is proposed (`actions.STEPS`, all by default). `elsewhere` says that play
    starts from a state that is not the one scores are relative to: players have it scored first.
    """

    def __init__(
        self,
        original: Cubin,
        kernel: str | None = None,
        mode: AliasMode = AliasMode.STRICT,
        family: Family = Family.WIDE,
        verifier: Verifier | None = None,
        moves: frozenset[str] | None = None,
    ) -> None:
        self.original = original
        self.elsewhere = False
        self.family = family
        allowed = frozenset(STEPS) if moves is None else moves
        self._edits = tuple(kind for kind in CONTROL_EDITS if EDIT_MOVES[kind] in allowed)
        self.editor = Editor(original, kernel, mode)
        self.verifier = verifier or Verifier(original, kernel, mode)
        self.kernel = self.editor.kernel
        self.tally: Counter[str] = Counter()
        self._movable = [
            item.index
            for item in self.kernel.instructions
            if not item.pinned
            and (
                family is Family.WIDE
                or (item.effects.info.order is Order.MEMORY and item.base in MEMORY_MOVES)
            )
        ]
        if not self._movable:
            raise InputError(
                f"{self.kernel.name}: no instruction of the {family.value} family may move"
            )
        self._weights = self._instruction_weights()

    def fork(self) -> Game:
        """A game of the same kernel in the same state, played apart from this one."""
        other = copy(self)
        other.editor = self.editor.fork()
        other.tally = Counter()
        return other

    def _instruction_weights(self) -> list[float]:
        """Sums of weights: inner loops are chosen more often, that is where cycles are."""
        depth = depths(self.kernel, natural_loops(self.kernel))
        base = 1.0 if self.family is Family.MEMORY else 4.0
        return list(accumulate(base ** depth[self.kernel.block_of[i]] for i in self._movable))

    # --- proposing -------------------------------------------------------------------------

    def propose(self, rng: random.Random) -> Action | None:
        """A random action of the family that order alone permits; None when none was found."""
        for _ in range(64):
            index = rng.choices(self._movable, cum_weights=self._weights)[0]
            if self._edits and self.family is Family.WIDE and rng.random() < CONTROL_SHARE:
                action = self._control_edit(index, rng)
            else:
                action = self._move(index, rng)
            if action is not None:
                return action
        return None

    def _move(self, index: int, rng: random.Random) -> Move | None:
        _, here = self.editor.position(index)
        if self.family is Family.MEMORY:
            first, last = self.editor.window(index, 1)
            step = rng.choice((-1, 1))
            return Move(index, here + step, True) if first <= here + step <= last else None
        first, last = self.editor.window(index, FAR if rng.random() < 0.8 else 1 << 30)
        if first == last:
            return None
        to = rng.randint(first, last - 1)
        return Move(index, to if to < here else to + 1)

    def _control_edit(self, index: int, rng: random.Random) -> SetControl | None:
        kind = rng.choice(self._edits)
        slots = sorted(slot_registers(self.kernel.instructions[index]))
        if kind == "tighten":
            return SetControl(index, self.editor.tightened(index), kind)
        if kind == "reuse" and slots:
            return SetControl(index, self.editor.toggled_reuse(index, rng.choice(slots)), kind)
        if "yield" not in self._edits:
            return None
        return SetControl(index, self.editor.toggled_stay(index), "yield")

    # --- acting ----------------------------------------------------------------------------

    def apply(
        self, action: Action, wanted: Callable[[], bool] = lambda: True
    ) -> Candidate | Refusal:
        """Take an action: the new legal state, or a refusal that changed nothing.

        `wanted` looks at the editor before the rules do, which cost more than the timing model.
        """
        self.tally["proposed"] += 1
        block = action.block if isinstance(action, Reorder) else self.kernel.block_of[action.index]
        before = (self.editor.states[block], self.editor.controls(block))
        try:
            self._act(action)
        except InputError as error:
            self.editor.restore(block, *before)
            self.tally["refused by the editor"] += 1
            return Refusal("EDITOR", str(error))
        if not wanted():
            self.editor.restore(block, *before)
            self.tally["not wanted"] += 1
            return Refusal(UNWANTED, "the player does not want it")
        words = self.editor.words()
        verdict = self.verifier.check_words(words, self.editor.info())
        if not verdict.legal:
            self.editor.restore(block, *before)
            self.tally["refused by the verifier"] += 1
            return Refusal(verdict.findings[0].rule, str(verdict.findings[0]))
        self.tally["legal"] += 1
        return self._candidate(words, verdict)

    def _act(self, action: Action) -> None:
        if isinstance(action, Move):
            self.editor.move(action.index, action.to, rederive=not action.kept)
        elif isinstance(action, SetControl):
            self.editor.wish(action.index, action.control)
        else:
            self.editor.reorder(action.block, action.order)

    def current(self) -> Candidate:
        """The state as it stands."""
        words = self.editor.words()
        return self._candidate(words, self.verifier.check_words(words, self.editor.info()))

    def _candidate(self, words: Words, verdict: Verdict) -> Candidate:
        data = bytearray(self.original.data)
        code = self.original.kernel(self.kernel.name)
        data[code.text.offset : code.text.offset + code.text.size] = words.astype("<u8").tobytes()
        if code.info is not None:
            info = self.editor.info()
            data[code.info.offset : code.info.offset + len(info)] = info
        image = bytes(data)
        return Candidate(image, hashlib.sha256(image).hexdigest(), verdict)

    def snapshot(self) -> Snapshot:
        """The state, to come back to."""
        blocks = range(len(self.kernel.blocks))
        return Snapshot(
            tuple(self.editor.states), tuple(self.editor.controls(block) for block in blocks)
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot."""
        for block, (state, controls) in enumerate(
            zip(snapshot.states, snapshot.controls, strict=True)
        ):
            if self.editor.states[block] is not state:
                self.editor.restore(block, state, controls)

    def model(self) -> TimingModel:
        """A timing model of this kernel."""
        return TimingModel(self.kernel)
