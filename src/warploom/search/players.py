"""Players of the assembly game behind one interface.

A player is a generator: it yields the candidate it wants scored and is sent the score. The driver
runs several at once, so that one measures while another thinks.

Simulated annealing follows SIP (arXiv 2403.16863, algorithm 1); the paper gives no numbers, those
here are the ones left in the CuAsmRL code base: T0 = 1.0, factor 0.997, stop at 0.05, at most 5000
steps, energy in percent of the original's time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from warploom.search.actions import Move
from warploom.search.block_exact import solved_orders
from warploom.search.evolve import evolve
from warploom.search.game import Family, Game, Refusal
from warploom.search.guided import guided
from warploom.search.play import Play, Player, Score, next_legal, opening

PLATEAU: Final = 5e-4


@dataclass(frozen=True)
class Annealing:
    """Annealing parameters; the temperature is in percent of the original's time."""

    start: float = 1.0
    factor: float = 0.997
    stop: float = 0.05
    steps: int = 5000


def random_walk(game: Game, rng: random.Random) -> Play:
    """Legal random steps, back to the original every 64: the baseline every method owes."""
    start = game.snapshot()
    steps = 0
    while True:
        candidate = next_legal(game, rng)
        if candidate is None:
            return
        score = yield candidate
        steps += 1
        if steps % 64 == 0 or score.outcome != "ok":
            game.restore(start)


def greedy(game: Game, rng: random.Random) -> Play:
    """Keep a step unless it is slower than the best so far; steps along a plateau are kept."""
    best = yield from opening(game)
    while True:
        before = game.snapshot()
        candidate = next_legal(game, rng)
        if candidate is None:
            return
        score = yield candidate
        if score.outcome != "ok" or score.speedup < best - PLATEAU:
            game.restore(before)
        best = max(best, score.speedup)


def anneal(game: Game, rng: random.Random, settings: Annealing | None = None) -> Play:
    """SIP's annealing; restarts from the best state when it has cooled and budget is left."""
    chosen = settings or Annealing()
    began = yield from opening(game)
    best_state, best_energy = game.snapshot(), 100.0 / max(began, 1e-9)
    while True:
        game.restore(best_state)
        energy, temperature = best_energy, chosen.start
        for _ in range(chosen.steps):
            if temperature <= chosen.stop:
                break
            before = game.snapshot()
            candidate = next_legal(game, rng)
            if candidate is None:
                return
            score = yield candidate
            new = 100.0 / score.speedup if score.outcome == "ok" else math.inf
            accepted = new < energy or rng.random() < math.exp(
                max(-700.0, (energy - new) / temperature)
            )
            if not accepted:
                game.restore(before)
            else:
                energy = new
                if new < best_energy:
                    best_energy, best_state = new, game.snapshot()
            temperature *= chosen.factor


def block_exact(game: Game, rng: random.Random) -> Play:
    """Solve whole blocks against the timing model, hottest first, and keep what measures faster."""
    best = yield from opening(game)
    for action in solved_orders(game, rng):
        before = game.snapshot()
        candidate = game.apply(action)
        if isinstance(candidate, Refusal):
            continue
        score = yield candidate
        if score.outcome == "ok" and score.speedup > best:
            best = score.speedup
        else:
            game.restore(before)
    # The solved orders are a start: go on from the best of them.
    yield from greedy(game, rng)


PLAYERS: Final[dict[str, Player]] = {
    player.name: player
    for player in (
        Player("random", Family.WIDE, random_walk, "random legal walk, wide moves"),
        Player("greedy", Family.WIDE, greedy, "hill climbing, wide moves"),
        Player("sip", Family.MEMORY, anneal, "SIP: annealing over one-step memory moves"),
        Player("anneal", Family.WIDE, anneal, "annealing over wide moves and control edits"),
        Player("evolve", Family.WIDE, evolve, "evolution: orders crossed, moves as mutations", 3),
        Player("block-exact", Family.WIDE, block_exact, "blocks solved by CP-SAT, then greedy", 1),
        Player("guided", Family.WIDE, guided, "the model climbs, the measurement decides", 16),
    )
}

__all__ = ["PLAYERS", "Annealing", "Move", "Play", "Player", "Score", "next_legal"]
