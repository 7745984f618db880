"""The bounds on traffic against all plays of the pebble game, and every constant doubled.

A bound may be false in two ways: its lemma (how many products so many items allow) or what is made
of it. Lemmas are held to all sets of items of tiny products, bounds to the least traffic of tiny
games and to the traffic of single plays of larger ones; each with its constant doubled is broken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.derive.pebbles import Game, greedy, least, product, sandwich

from warploom.derive.bounds import bounds, product_bounds
from warploom.derive.bounds.bounds import lower_bounds
from warploom.derive.bounds.product_bounds import piece
from warploom.derive.formula import frontend as f
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula


def matmul(m: int, n: int, k: int) -> Diagram:
    return formula("matmul").resized({"a": m, "b": k, "c": n})


def attention(q: int, x: int, d: int, e: int, shared: bool = False) -> Diagram:
    """O = exp(A·B)·V, V its own array or B."""
    a, b = tensor("A", "q d"), tensor("B", "x d")
    v, last = (b, "d") if shared else (tensor("V", "x e"), "e")
    weights = f.apply("exp", f.contract(a, b, out=("q", "x")))
    sizes = {"q": q, "x": x, "d": d, **({} if shared else {"e": e})}
    return build("attention", f.contract(weights, v, out=("q", last)), sizes)


TINY: list[tuple[Game, Diagram, int, bool]] = [
    *((product(1, 1, 24), matmul(1, 1, 24), room, False) for room in (3, 4)),
    *((product(2, 1, 6), matmul(2, 1, 6), room, False) for room in (3, 4, 5)),
    *((product(2, 2, 2), matmul(2, 2, 2), room, False) for room in (3, 4, 5, 6)),
    *((product(2, 2, 8), matmul(2, 2, 8), room, False) for room in (7, 8)),
    *((sandwich(1, 3, 2, 2), attention(1, 3, 2, 2), room, False) for room in (4, 5, 6, 8)),
    *((sandwich(1, 8, 2, 1), attention(1, 8, 2, 1), room, False) for room in (5, 6)),
    *((sandwich(2, 2, 2, 1), attention(2, 2, 2, 1), room, False) for room in (6, 8)),
    *((sandwich(1, 4, 2, 2, shared=True), attention(1, 4, 2, 2, True), n, False) for n in (5, 7)),
]


@pytest.mark.parametrize("case", range(len(TINY)))
def test_no_bound_is_over_the_least_traffic_of_a_tiny_game(case: int) -> None:
    game, diagram, room, recomputed = TINY[case]
    optimum = least(game, room)
    assert optimum is not None
    for bound in lower_bounds(diagram, room, recomputed):
        assert bound.value <= optimum, bound
    assert greedy(game, room) >= optimum


def test_the_search_finds_the_least_traffic_that_is_known() -> None:
    """Everything once where it fits; one value a product, and a store, where three fit."""
    assert least(product(2, 2, 2), 7) == 12
    assert least(product(1, 1, 24), 3) == 2 * 24 + 1
    assert least(product(2, 2, 2), 2) is None
    # On a cube's corners one operand stays from each product to the next, and a sum is begun
    # again only when it is finished: 2 loads a product but for the 3 turns, and 4 stores.
    assert least(product(2, 2, 2), 3) == 2 * 8 - 3 + 4
    # A score that may be computed again need not be stored.
    held = replace(sandwich(2, 2, 1, 1), again=frozenset())
    again = sandwich(2, 2, 1, 1, again=True)
    assert all((least(again, room) or 0) <= (least(held, room) or 0) for room in (3, 4, 5))


def doubled_root(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """2W/√M becomes 4W/√M."""
    halved = SimpleNamespace(prod=math.prod, floor=math.floor, sqrt=lambda m: math.sqrt(m) / 2)
    monkeypatch.setattr(module, "math", halved)


def columns(game: Game, room: int) -> int:
    """Traffic of one play, column by column: each one after the second is played as the third."""
    some = [greedy(replace(game, columns=count), room) for count in (2, 3)]
    return some[0] + (game.columns - 2) * (some[1] - some[0])


def test_every_further_column_of_a_play_costs_the_same() -> None:
    for game, room in ((sandwich(3, 7, 2, 2), 17), (sandwich(3, 7, 2, 2, True), 15)):
        assert columns(game, room) == greedy(game, room)


PLAYED = {
    "matmul": (product(3, 3, 16), matmul(3, 3, 16), 13),
    "products": (sandwich(4, 64, 2, 2), attention(4, 64, 2, 2), 21),
    "attention": (sandwich(8, 128, 2, 2), attention(8, 128, 2, 2), 37),
    "shared": (sandwich(4, 32, 2, 2, True), attention(4, 32, 2, 2, True), 19),
}


@pytest.mark.parametrize("name", PLAYED)
def test_a_doubled_constant_is_over_the_traffic_of_a_play(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game, diagram, room = PLAYED[name]
    moved = columns(game, room)
    before = {bound.name: bound.value for bound in lower_bounds(diagram, room)}
    assert max(before.values()) <= moved
    if name in ("attention", "shared"):
        twice = lambda reach, width, constant: piece(reach, width, 2 * constant)  # noqa: E731
        monkeypatch.setattr(product_bounds, "piece", twice)
        planted = "attention"
    else:
        doubled_root(monkeypatch, bounds if name == "matmul" else product_bounds)
        planted = name
    after = {bound.name: bound.value for bound in lower_bounds(diagram, room)}
    assert after[planted] > moved
    assert {b: v for b, v in after.items() if b != planted} == {
        b: v for b, v in before.items() if b != planted
    }


# --- the lemmas, on all sets of items -----------------------------------------------------------


def most_products(n: int) -> dict[int, int]:
    """Of n x n x n multiply-adds, the most that each number of items in reach allows."""
    pairs = list(itertools.product(range(n), range(n)))
    rows = [np.array(kept, bool).reshape(n, n) for kept in itertools.product((0, 1), repeat=n * n)]
    second = np.array(rows)  # every set of elements of B
    found: dict[int, int] = {}
    for a in rows:
        sums = np.sort(
            np.einsum("ik,skj->sij", a.astype(int), second.astype(int)).reshape(-1, n * n)
        )
        done = np.cumsum(sums[:, ::-1], axis=1)  # the sums that most products go into
        used = a.sum() + second.sum(axis=(1, 2))
        for count in range(1, len(pairs) + 1):
            for reach in np.unique(used + count).tolist():
                best = int(done[used + count == reach, count - 1].max())
                found[reach] = max(found.get(reach, 0), best)
    return found


def most_sandwiched(n: int, d: int, e: int, shared: bool, counted: bool = True) -> dict[int, int]:
    """Of n x n x e products g(S_ij) V_jm, the most that each number of items in reach allows.

    S is summed up from whole rows, d items each, or carried; rows and columns are interchangeable,
    so it is the first ones that are there. `counted`: sums of O are items.
    """
    sides = [tuple(range(count)) for count in range(n + 1)]
    wide = [k for s in range(n * e + 1) for k in itertools.combinations(range(n * e), s)]
    grids = {kept: np.isin(np.arange(n * e), kept).reshape(n, e) for kept in wide}
    found: dict[int, int] = {}
    for rows, cols in itertools.product(sides, sides):
        fresh = np.outer(np.isin(np.arange(n), rows), np.isin(np.arange(n), cols))
        for out in wide if counted else wide[-1:]:
            for value in [tuple(j * e + m for j in cols for m in range(e))] if shared else wide:
                each = grids[out].astype(int) @ grids[value].astype(int).T
                done = int(each[fresh].sum())
                reach = d * (len(rows) + len(cols)) + len(out) * counted
                reach += 0 if shared else len(value)
                carried = np.sort(each[~fresh])[::-1]
                for extra in range(carried.size + 1):
                    total = done + int(carried[:extra].sum())
                    found[reach + extra] = max(found.get(reach + extra, 0), total)
    return found


def broken(found: dict[int, int], allowed: Callable[[float], float]) -> bool:
    return any(done > allowed(float(reach)) + 1e-9 for reach, done in found.items())


def test_the_lemma_of_products_on_all_sets_of_items() -> None:
    found = most_products(3)
    assert found[3] == 1 and found[12] == 8 and found[27] == 27, "cubes attain it"
    assert not broken(found, lambda reach: (reach / 3) ** 1.5)
    assert broken(found, lambda reach: (reach / 6) ** 1.5)
    assert broken(found, lambda reach: (reach / 3) ** 1.5 / 2)


@pytest.mark.parametrize(
    ("n", "d", "e", "shared"), [(4, 1, 1, False), (2, 2, 2, False), (4, 1, 1, True)]
)
def test_the_lemma_of_attention_on_all_sets_of_items(n: int, d: int, e: int, shared: bool) -> None:
    constant = 8.0 if shared else 16.0
    found = most_sandwiched(n, d, e, shared)
    assert not broken(found, lambda reach: piece(reach, d, constant))
    if d == 1:  # R²/16d is the larger end from R = 9.48 d² on; attained by whole rows
        assert found[4 * n if not shared else 8] == (n * n if not shared else 8)
        assert broken(found, lambda reach: piece(reach, d, 2 * constant))
    else:  # below, items that are carried: 4 of S, 4 of V and 4 of O
        assert found[12] == 8
        larger = lambda r: max(r * r / (constant * d), (r / 6) ** 1.5)  # noqa: E731
        assert broken(found, larger)


def test_the_lemma_of_the_sandwich_on_all_sets_of_items() -> None:
    def allowed(reach: float, d: int, e: int, four: float = 4.0) -> float:
        return e * (reach * reach / (four * d * (d + e)) + reach)

    for n, d, e in ((4, 1, 1), (3, 2, 1), (2, 1, 2)):
        found = most_sandwiched(n, d, e, shared=False, counted=False)
        assert not broken(found, lambda r, d=d, e=e: allowed(r, d, e))
    # Too large to try all sets: 2r rows of A, r of B and of V, so 4r items give 2r² products.
    d = e = 1
    assert allowed(4 * 20, d, e, four=8.0) < 2 * 20**2 <= allowed(4 * 20, d, e)
    diagram = attention(2**12, 2**12, 8, 8)
    capacity = 4096.0
    (bound,) = [b for b in lower_bounds(diagram, capacity) if b.name == "sandwich"]
    best = max(
        t * (2.0**24 * 8 / allowed(capacity + t, 8, 8) - 1)
        for t in (capacity * np.geomspace(0.1, 10, 400)).tolist()
    )
    assert 0.99 * best < bound.value < 1.01 * best + 2 * capacity
