"""Players: legal candidates only, the same ones for the same seed, and no failure remembered."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from warploom.sass.cubin import Cubin, parse
from warploom.sass.verify import Verifier
from warploom.search.driver import Budget, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Family, Game
from warploom.search.players import PLAYERS, Annealing, Score, anneal

pytestmark = pytest.mark.usefixtures("disassembled_once")

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
            cubin, PLAYERS[name], ModelEvaluator(cubin, kernel), Budget(60.0, COUNT), seed=seed
        )
        return [(score, candidate.digest) for score, candidate in result.best]

    assert digests(1) == digests(1)
    assert digests(1) != digests(2)


def test_annealing_restores_what_it_refuses(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(RMSNORM)
    game = Game(cubin)
    play = anneal(game, random.Random(0), Annealing(start=1e-6, stop=1e-9, steps=50))
    next(play)
    for _ in range(20):
        play.send(Score(0.5))
    # Cold, and everything was slower: each candidate is one step from the original.
    play.close()
    for _ in range(3):
        play = anneal(game, random.Random(4), Annealing(start=1e-6, stop=1e-9, steps=50))
        next(play)
        play.send(Score(0.0, "wrong"))
        play.close()
