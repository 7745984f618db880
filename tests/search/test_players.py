"""Players: legal candidates only, the same ones for the same seed, and no failure remembered."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.search.moves_made import moved

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Family, Game
from warploom.search.players import PLAYERS, Annealing, Score, anneal

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
COUNT = 25


def test_there_is_a_player_of_each_kind() -> None:
    assert set(PLAYERS) == {"random", "greedy", "sip", "anneal", "evolve", "block-exact", "guided"}
    assert PLAYERS["sip"].family is Family.MEMORY


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_every_candidate_is_legal(cubin_of: Callable[[str], Cubin], name: str) -> None:
    cubin = cubin_of(RMSNORM)
    player = PLAYERS[name]
    game = Game(cubin, family=player.family)
    fresh = Verifier(cubin)
    model = ModelEvaluator(cubin, game.kernel.name)
    play = player.play(game, random.Random(2))
    candidate = next(play)
    for _ in range(COUNT):
        verdict = fresh.check_file(parse(candidate.cubin))
        assert verdict.legal, str(verdict)
        candidate = play.send(Score(model.original_cycles / model.cycles(candidate)))


@pytest.mark.parametrize("name", ["random", "greedy", "sip", "anneal", "evolve"])
def test_a_seed_fixes_the_game(cubin_of: Callable[[str], Cubin], name: str) -> None:
    cubin = cubin_of(RMSNORM)
    kernel = cubin.kernel().name

    def digests(seed: int) -> list[tuple[float, str]]:
        result = run_search(
            cubin,
            PLAYERS[name],
            ModelEvaluator(cubin, kernel),
            Budget(60.0, COUNT // 2),
            SearchOptions(seed=seed),
        )
        return [(score, candidate.digest) for score, candidate in result.best]

    assert digests(1) == digests(1)
    assert digests(1) != digests(2)


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        (Annealing(start=1e-6, stop=1e-9, steps=50), Score(0.5)),  # cold, and slower
        (Annealing(start=100.0, stop=1.0, steps=50), Score(0.0, "wrong")),  # hot, and wrong
    ],
)
def test_annealing_restores_what_it_refuses(
    settings: Annealing, score: Score, cubin_of: Callable[[str], Cubin]
) -> None:
    """Each candidate is one step from the original, never one from a refused one."""
    game = Game(cubin_of(RMSNORM))
    play = anneal(game, random.Random(0), settings)
    next(play)
    steps = [moved(game)]
    for _ in range(20):
        play.send(score)
        steps.append(moved(game))
    assert max(steps) == 1 and sum(steps) > 5, steps
