"""Moves by name, and games that are played apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from warploom.errors import InputError
from warploom.sass.decode.cubin import Cubin
from warploom.search.actions import STEPS, Move, SetControl, moves_of
from warploom.search.game import Game

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"


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
    assert moves_of(STEPS) == set(STEPS)
    with pytest.raises(InputError, match="unknown move 'unroll': expected some of order"):
        moves_of(("order", "unroll"))
    for name in ("rename", "scoreboards"):
        with pytest.raises(InputError, match=f"unknown move '{name}': gone: it gained next to"):
            moves_of(("order", name))
    with pytest.raises(InputError, match="needs the move 'order'"):
        moves_of(("stall",))
