"""The driver: the best is never lost, a failure is never best, noise is not believed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import pytest

from warploom.sass.decode.cubin import Cubin
from warploom.search.driver import Budget, SearchOptions, SearchResult, run_search
from warploom.search.game import Candidate, Family, Game
from warploom.search.play import Play, Player, next_legal
from warploom.search.players import PLAYERS, Score

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"


class Fake:
    """Scores candidates by a function of the number scored so far; may interrupt."""

    name = "fake"

    def __init__(self, score: Callable[[int], Score], interrupt_after: int = 1 << 30) -> None:
        self.score, self.interrupt_after = score, interrupt_after
        self.seen: list[tuple[Candidate, Score]] = []
        self.waiting: dict[int, Score] = {}

    def submit(self, candidate: Candidate) -> int:
        number = len(self.seen)
        self.seen.append((candidate, self.score(number)))
        self.waiting[number] = self.seen[-1][1]
        return number

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        if len(self.seen) > self.interrupt_after:
            self.interrupt_after = 1 << 30
            raise KeyboardInterrupt
        done, self.waiting = self.waiting, {}
        return done


Search = Callable[..., SearchResult]


@pytest.fixture
def search(cubin_of: Callable[[str], Cubin]) -> Search:
    """Runs a player against a fake evaluator."""

    def run(fake: Fake, candidates: int = 40, player: str = "random", **more: int) -> SearchResult:
        budget = Budget(60.0, candidates)
        return run_search(cubin_of(RMSNORM), PLAYERS[player], fake, budget, SearchOptions(**more))

    return run


def test_interrupting_keeps_the_best(search: Search) -> None:
    fake = Fake(lambda number: Score(1.0 + (0.2 if number == 4 else 0.001 * number)), 10)
    result = search(fake)
    assert result.interrupted
    assert result.best_speedup == 1.2
    assert result.best[0][1].digest == fake.seen[4][0].digest
    assert result.scored == len(fake.seen), "what was being measured is counted too"


@pytest.mark.parametrize("outcome", ["wrong", "hang", "crash"])
def test_a_failure_is_never_best(search: Search, outcome: str) -> None:
    def score(number: int) -> Score:
        return Score(9.0, outcome) if number % 2 else Score(1.01)

    result = search(Fake(score), player="anneal", confirmations=2)
    assert result.best_speedup == pytest.approx(1.01)
    assert result.outcomes[outcome] > 5
    assert all(found == outcome for found, *_ in result.failures)
    kept = {candidate.digest for _, candidate in result.best}
    assert not kept & {candidate.digest for _, candidate, _ in result.failures}


def test_nothing_better_is_the_original(search: Search) -> None:
    assert search(Fake(lambda number: Score(0.9))).best_speedup == 1.0
    assert search(Fake(lambda number: Score(0.0, "wrong"))).best == []


def test_the_best_are_sorted_and_distinct(search: Search) -> None:
    rng = random.Random(0)
    result = search(Fake(lambda number: Score(rng.uniform(0.9, 1.1))), 60)
    scores = [score for score, _ in result.best]
    assert scores == sorted(scores, reverse=True)
    assert len({candidate.digest for _, candidate in result.best}) == len(result.best) == 8
    assert [row[2] for row in result.curve] == sorted(row[2] for row in result.curve)


def test_confirmations_lower_the_winners_curse(search: Search) -> None:
    def flattery(confirmations: int) -> float:
        total = 0.0
        for seed in range(4):
            rng = random.Random(seed)
            fake = Fake(lambda number, rng=rng: Score(rng.gauss(1.0, 0.05)))
            total += search(fake, 60, seed=seed, confirmations=confirmations).best_speedup - 1.0
        return total / 4

    # Every candidate is truly as fast as the original: all that is above 1 is noise.
    once, confirmed = flattery(0), flattery(6)
    assert once > 0.08
    assert confirmed < 0.6 * once


def test_budgets_and_chains(search: Search) -> None:
    result = search(Fake(lambda number: Score(1.0)), 15, chains=3)
    assert 15 <= result.scored <= 15 + 2 * 3
    assert result.tally["legal"] >= 15


def test_no_time_at_all_keeps_what_was_submitted(cubin_of: Callable[[str], Cubin]) -> None:
    result = run_search(
        cubin_of(RMSNORM), PLAYERS["random"], Fake(lambda number: Score(1.5)), Budget(0.0)
    )
    assert result.best_speedup == 1.5


def test_new_bests_and_progress_are_told(cubin_of: Callable[[str], Cubin]) -> None:
    bests: list[float] = []
    result = run_search(
        cubin_of(RMSNORM),
        PLAYERS["random"],
        Fake(lambda number: Score(1.0 + number / 100)),
        Budget(60.0, 10),
        SearchOptions(on_best=lambda candidate, speedup: bests.append(speedup)),
    )
    assert bests == sorted(bests)
    assert bests[-1] == result.best_speedup


def _slow(thought_s: float, interrupt_at: int = 1 << 30) -> tuple[Player, list[float]]:
    """A player that thinks for so long; the thoughts of all chains are listed by their end."""
    thoughts: list[float] = []

    def play(game: Game, rng: random.Random) -> Play:
        while True:
            time.sleep(thought_s)
            thoughts.append(time.monotonic())
            if len(thoughts) == interrupt_at:
                raise KeyboardInterrupt
            candidate = next_legal(game, rng)
            assert candidate is not None
            yield candidate

    return Player("slow", Family.WIDE, play, "thinks"), thoughts


@pytest.mark.parametrize("chains", [2, 8])
def test_the_budget_runs_over_by_one_thought_not_one_of_each_chain(
    chains: int, cubin_of: Callable[[str], Cubin]
) -> None:
    """Of 8 chains the time is over before all have begun; of 2, when both think again."""
    player, thoughts = _slow(0.4)
    cubin = cubin_of(RMSNORM)
    game, began = Game(cubin), time.monotonic()
    fake = Fake(lambda _: Score(1.0))
    run_search(cubin, player, fake, Budget(1.0), SearchOptions(chains=chains, game=game))
    assert len([end for end in thoughts if end - began > 1.05]) <= 1 < len(thoughts)


def test_ctrl_c_while_a_player_thinks_loses_no_score(cubin_of: Callable[[str], Cubin]) -> None:
    """Four chains' scores come together; the interrupt falls into the first one's next thought."""
    player, _ = _slow(0.0, interrupt_at=5)
    began = time.monotonic()
    fake = Fake(lambda number: Score(1.0 + number / 100))
    result = run_search(cubin_of(RMSNORM), player, fake, Budget(60.0), SearchOptions(chains=4))
    assert result.interrupted and result.scored == 4 and result.best_speedup == 1.03
    assert time.monotonic() - began < 9.0, "nothing is waited for that was collected"
