"""Programs an episode may be played on: the original, and others proved to do the same.

Giving scoreboards out anew makes another program of a kernel (see `search.lineage`), proved by its
checker. In the environment the choice of one is an action of its own, legal as an episode begins
and at no other time: the one taken says which program the episode is played on. The masks are what
the checker said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.rl.board import Board
from warploom.rl.profile import Profile
from warploom.search.game import Family, Game
from warploom.search.lineage import Base, make_base, prove, write_steps

Floats = npt.NDArray[np.float32]
COLUMNS: Final = 2


@dataclass(frozen=True)
class Program:
    """A program with the board it is played on. `legal`: proved, and something on it may move."""

    base: Base
    board: Board
    legal: bool

    @property
    def seen(self) -> list[float]:
        """What a player sees of it: that it may be chosen, and that it is not the original."""
        return [float(self.legal), float(bool(self.base.steps))]


def programs_of(game: Game, profile: Profile) -> list[Program]:
    """The original first, then up to `profile.programs` others, the same ones for the same cubin.

    Raises `InputError` where nothing of the original may move.
    """
    original, name, mode = game.original, game.kernel.name, game.verifier.mode
    found = [Program(Base(original), Board(game, profile), True)]
    for number in range(profile.programs):
        base = make_base(original, name, random.Random(f"0/{number}"))
        if any(base.cubin.data == other.base.cubin.data for other in found):
            continue
        played = Game(base.cubin, name, mode, Family.WIDE)
        try:
            board = Board(played, profile)
        except InputError:
            continue
        legal = not prove(original, name, base.steps, mode) and bool(board.mask().any())
        found.append(Program(base, board, legal))
    return found


def seen_of(programs: list[Program], profile: Profile) -> Floats:
    """What is seen of all programs [profile.programs + 1, COLUMNS]; rows of none are 0."""
    seen = np.zeros((profile.programs + 1, COLUMNS), np.float32)
    for row, program in enumerate(programs):
        seen[row] = program.seen
    return seen


def write_programs(folder: Path, programs: Sequence[Program]) -> None:
    """Write the lineage of every program but the original: `N/lineage.json` and its cubins."""
    for number, program in enumerate(programs):
        if program.base.steps:
            write_steps(folder / str(number), program.base.steps)
