"""What every player shares: scores, the generator's type, the next random legal state."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from warploom.search.game import Candidate, Family, Game

PATIENCE: Final = 200


@dataclass(frozen=True)
class Score:
    """How a candidate did: `speedup` over the original (> 1 is faster); 0 when it failed."""

    speedup: float
    outcome: str = "ok"


Play = Generator[Candidate, Score, None]


@dataclass(frozen=True)
class Player:
    """A named player: its family of actions, how it plays and how many chains it is worth."""

    name: str
    family: Family
    play: Callable[[Game, random.Random], Play]
    about: str
    most_chains: int = 64


def opening(game: Game) -> Generator[Candidate, Score, float]:
    """The score of the state a game begins with: 1 for the original, asked for otherwise."""
    if not game.elsewhere:
        return 1.0
    score = yield game.current()
    return score.speedup if score.outcome == "ok" else 0.0


def next_legal(game: Game, rng: random.Random) -> Candidate | None:
    """The next random legal state, or None when none was found in many tries."""
    for _ in range(PATIENCE):
        action = game.propose(rng)
        if action is None:
            return None
        result = game.apply(action)
        if isinstance(result, Candidate):
            return result
    return None
