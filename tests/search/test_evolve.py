"""Evolution: children keep every precedence, crossing mixes both parents, the best survives."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tests.search.moves_made import moved

from warploom.sass.decode.cubin import Cubin
from warploom.search.evolve import Evolution, evolve, listed
from warploom.search.game import Game
from warploom.search.play import Score

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"


@given(st.permutations(range(9)), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))))
def test_a_listing_keeps_every_pair(wanted: list[int], raw: set[tuple[int, int]]) -> None:
    pairs = [(first, second) for first, second in raw if first < second]
    priority = {index: float(place) for place, index in enumerate(wanted)}
    order = listed(priority, pairs)
    assert sorted(order) == list(range(9))
    assert all(order.index(first) < order.index(second) for first, second in pairs)
    if not pairs:
        assert list(order) == wanted


def test_children_hold_genes_of_both_parents(cubin_of: Callable[[str], Cubin]) -> None:
    # Two blocks of a kernel must have changed apart and met again, which not every search gets to.
    assert any(_joined(Game(cubin_of(RMSNORM)), seed) for seed in range(3))


def _joined(game: Game, seed: int) -> bool:
    """Whether some later state joins blocks first seen in two different earlier states."""
    settings = Evolution(population=4, mutations=1, crossed=1.0)
    play = evolve(game, random.Random(seed), settings)
    candidate, scores = next(play), random.Random(1)
    orders: list[dict[int, tuple[int, ...]]] = []
    for _ in range(40):
        assert candidate.verdict.legal
        orders.append({n: state.order for n, state in enumerate(game.editor.states)})
        candidate = play.send(Score(1 + scores.random()))
    identity = [tuple(range(b.start, b.end)) for b in game.kernel.blocks]

    def changed(state: dict[int, tuple[int, ...]]) -> set[tuple[int, tuple[int, ...]]]:
        return {(n, order) for n, order in state.items() if order != identity[n]}

    return any(
        not any(changed(late) <= changed(early) for early in orders[:place])
        and len([early for early in orders[:place] if changed(early) & changed(late)]) >= 2
        for place, late in enumerate(orders)
    )


def test_failures_never_enter_the_population(cubin_of: Callable[[str], Cubin]) -> None:
    """With every child a failure each is made of the original still, by at most two moves."""
    game = Game(cubin_of(RMSNORM))
    # Any member is a parent, not only the best.
    settings = Evolution(population=3, mutations=1, crossed=0.0, tournament=1)
    play = evolve(game, random.Random(0), settings)
    next(play)
    steps = [moved(game)]
    for _ in range(24):
        play.send(Score(0.0, "wrong"))
        steps.append(moved(game))
    assert max(steps) <= 2 and sum(steps) > 10, steps
