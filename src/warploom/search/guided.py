"""The model-guided player: between two measurements the timing model climbs for free.

A measurement costs milliseconds of a GPU and has noise larger than what one move gains; the model
costs no GPU. So each candidate is where a short climb under the model ends, begun from the best
measured state, and the measurement decides whether to stay there. How far the model is trusted
follows from how its last climbs measured (a trust region): twice as far after a gain, half as far
after a loss. A share of the candidates are single free moves, for what the model does not know.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from warploom.sass.timing.timing_model import TimingModel
from warploom.search.game import UNWANTED, Candidate, Game
from warploom.search.play import PATIENCE, Play, next_legal, opening


@dataclass(frozen=True)
class Guidance:
    """`least`, `most`: moves tried in one climb; `free`: share of candidates that ignore the
    model; `plateau`: how much slower than the best (as a share) is still followed."""

    first: int = 24
    least: int = 4
    most: int = 48
    free: float = 0.2
    plateau: float = 5e-4


def guided(game: Game, rng: random.Random, settings: Guidance | None = None) -> Play:
    """Climb under the model from the best measured state, measure, keep or go back."""
    chosen = settings or Guidance()
    model = game.model()
    best, reach = (yield from opening(game)), chosen.first
    state = game.snapshot()
    seen: set[str] = set()
    while True:
        game.restore(state)
        free = rng.random() < chosen.free
        candidate = None if free else climb(game, rng, reach, model)
        if candidate is None or candidate.digest in seen:
            # Nothing the model likes, or measured before: one move the model is not asked about.
            free, candidate = True, next_legal(game, rng)
        if candidate is None:
            return
        seen.add(candidate.digest)
        score = yield candidate
        right = score.outcome == "ok"
        if right and score.speedup >= best * (1.0 - chosen.plateau):
            state = game.snapshot()
        if not free:
            gained = right and score.speedup > best
            lost = not right or score.speedup < best * (1.0 - chosen.plateau)
            reach = min(2 * reach, chosen.most) if gained else reach
            reach = max(reach // 2, chosen.least) if lost else reach
        best = max(best, score.speedup if right else 0.0)


def climb(game: Game, rng: random.Random, tries: int, model: TimingModel) -> Candidate | None:
    """Try so many random legal moves and keep those the model does not call slower.

    Returns the state it ends in, or None when it is the one it began in.
    """
    here = there = model.kernel_cycles(game.editor.signature())

    def no_slower() -> bool:
        nonlocal there
        there = model.kernel_cycles(game.editor.signature())
        return there <= here

    reached: Candidate | None = None
    refused = 0
    while tries and refused < PATIENCE:
        action = game.propose(rng)
        if action is None:
            break
        result = game.apply(action, no_slower)
        if isinstance(result, Candidate):
            here, reached = there, result
        if isinstance(result, Candidate) or result.rule == UNWANTED:
            tries, refused = tries - 1, 0
        else:
            refused += 1
    return reached
