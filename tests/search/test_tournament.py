"""Moves by name, and a search over several programs of one kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from warploom.errors import InputError
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.actions import MOVES, Move, SetControl, moves_of
from warploom.search.driver import Budget, SearchOptions
from warploom.search.game import Candidate, Game
from warploom.search.lineage import Base, Step, make_base, ordered, prove
from warploom.search.players import PLAYERS, Score
from warploom.search.tournament import BaseModel, tournament

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
MODE = AliasMode.TRITON


@pytest.mark.parametrize(
    ("moves", "kinds"),
    [
        ({"order"}, set[str]()),
        ({"order", "stall"}, {"tighten"}),
        ({"order", "reuse"}, {"reuse"}),
        ({"order", "yield", "reuse"}, {"yield", "reuse"}),
    ],
)
def test_only_the_moves_that_are_named_are_proposed(
    moves: set[str], kinds: set[str], cubin_of: Callable[[str], Cubin]
) -> None:
    game = Game(cubin_of(RMSNORM), moves=frozenset(moves))
    rng = random.Random(0)
    actions = [game.propose(rng) for _ in range(400)]
    assert all(isinstance(action, Move | SetControl) for action in actions)
    assert {action.kind for action in actions if isinstance(action, SetControl)} == kinds


def test_a_fork_is_played_apart(cubin_of: Callable[[str], Cubin]) -> None:
    game = Game(cubin_of(RMSNORM))
    other, before = game.fork(), game.current().digest
    rng = random.Random(1)
    while other.current().digest == before:
        action = other.propose(rng)
        if action is not None:
            other.apply(action)
    assert game.current().digest == before != other.current().digest
    assert game.tally["legal"] == 0


def test_unknown_moves_are_refused() -> None:
    assert moves_of(MOVES) == set(MOVES)
    with pytest.raises(InputError, match="unknown move 'unroll': expected some of order"):
        moves_of(("order", "unroll"))
    with pytest.raises(InputError, match="unknown move 'rename': gone: no gain was measured"):
        moves_of(("order", "rename"))
    with pytest.raises(InputError, match="needs the move 'order'"):
        moves_of(("stall",))


def test_a_tournament_over_programs_ends_with_a_lineage_that_is_proved(
    cubin_of: Callable[[str], Cubin],
) -> None:
    original = cubin_of(RMSNORM)
    (name,) = original.kernels
    base = make_base(original, name, random.Random(0))
    assert [step.kind for step in base.steps] == ["scoreboards"]
    told: list[tuple[float, Candidate, Base]] = []
    entries = tournament(
        [Base(original), base],
        PLAYERS["greedy"],
        lambda one: BaseModel(original, one.cubin, name),
        Budget(300.0, candidates=24),
        SearchOptions(name, MODE),
        on_best=lambda candidate, score, one: told.append((score, candidate, one)),
    )
    # Every gain is told with the program it was found on.
    assert max(score for score, _, _ in told) == entries[0].score > 1.0
    for _, candidate, one in told[-2:]:
        assert prove(original, name, (*one.steps, ordered(candidate.cubin)), MODE) == []
    # Two in the first round, both again in the second; best first.
    assert len(entries) == 4
    assert [entry.score for entry in entries] == sorted((e.score for e in entries), reverse=True)
    played = [candidate for e in entries if e.base.steps for _, candidate in e.result.best]
    image = next(c.cubin for c in played if c.cubin != base.cubin.data)
    last = Step("order", image, "played")
    assert prove(original, name, (*base.steps, last), MODE) == []
    # The same image without its lineage, or with another's, is not proved.
    assert prove(original, name, (last,), MODE)
    assert prove(parse(image, name), name, (*base.steps, last), MODE)


class Interrupting:
    """An evaluator at which the user presses Ctrl-C."""

    name = "interrupting"

    def submit(self, candidate: Candidate) -> int:
        return 1

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        if timeout_s != 0.5:  # not the collecting of what was submitted
            raise KeyboardInterrupt
        return {1: Score(1.0)}


def test_ctrl_c_ends_all_rounds(cubin_of: Callable[[str], Cubin]) -> None:
    original = cubin_of(RMSNORM)
    (name,) = original.kernels
    made: list[Base] = []

    def evaluator(base: Base) -> Interrupting:
        made.append(base)
        return Interrupting()

    bases = [Base(original), Base(original), Base(original)]
    entries = tournament(
        bases, PLAYERS["random"], evaluator, Budget(300.0), SearchOptions(name, MODE)
    )
    assert len(entries) == len(made) == 1 and entries[0].result.interrupted


def test_no_search_is_begun_when_the_time_is_over(cubin_of: Callable[[str], Cubin]) -> None:
    original = cubin_of(RMSNORM)
    (name,) = original.kernels
    bases = [Base(original), Base(original), Base(original)]
    entries = tournament(
        bases,
        PLAYERS["random"],
        lambda _: BaseModel(original, original, name),
        Budget(0.0),
        SearchOptions(name, MODE),
    )
    assert len(entries) == 1 and entries[0].result.scored == 1
