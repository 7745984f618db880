"""The sandwich bound read a second time: its phase lemma by brute force, and where it must not be.

A phase with R values in reach completes at most e·[R²/(4d(d+e)) + R] products. Here every choice of
whole rows of A, whole columns of B, carried pairs and V elements is tried on tiny sizes.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from warploom.derive.bounds.bounds import lower_bounds
from warploom.derive.formula import frontend as f
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.formula.library import formula


def most_products(rows: int, columns: int, d: int, e: int, reach: int) -> int:
    """The most products g(S_ij) V_jm that `reach` values allow, by trying everything."""
    best = 0
    pairs = [(i, j) for i in range(rows) for j in range(columns)]
    for a in range(rows + 1):
        for b in range(columns + 1):
            left = reach - (a + b) * d
            if left < 0:
                continue
            # By symmetry the first a rows and b columns; pairs outside of them may be carried.
            fresh = {(i, j) for i in range(a) for j in range(b)}
            others = [pair for pair in pairs if pair not in fresh]
            for count in range(min(left, len(others)) + 1):
                for carried in combinations(others, count):
                    usable = fresh | set(carried)
                    gains = [
                        sum(p[1] == j for p in usable) for j in range(columns) for _ in range(e)
                    ]
                    best = max(best, sum(sorted(gains, reverse=True)[: left - count]))
    return best


def claimed(d: int, e: int, reach: int, constant: float = 4.0) -> float:
    return e * (reach * reach / (constant * d * (d + e)) + reach)


@pytest.mark.parametrize(("d", "e"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_no_phase_completes_more_products_than_the_lemma_allows(d: int, e: int) -> None:
    for reach in range(0, 15, 2):
        assert most_products(3, 3, d, e, reach) <= claimed(d, e, reach)


def test_the_lemma_without_its_carried_pairs_would_be_wrong() -> None:
    broken = [
        reach
        for reach in range(15)
        if most_products(3, 3, 3, 2, reach) > claimed(3, 2, reach) - 2 * reach
    ]
    assert broken


def names(diagram: object) -> set[str]:
    return {bound.name for bound in lower_bounds(diagram, 2.0**14)}  # type: ignore[arg-type]


def test_sums_that_reassociate_get_no_sandwich_bound() -> None:
    sizes = dict.fromkeys("abcd", 4096)
    a, b, c = tensor("A", "a b"), tensor("B", "b c"), tensor("C", "c d")
    assert names(build("chain", (a @ b) @ c, sizes)) == {"compulsory"}
    assert "sandwich" in names(build("mlp", f.apply("relu", a @ b) @ c, sizes))
    assert "sandwich" not in names(build("square", f.apply("square", a @ b) @ c, sizes))
    assert "sandwich" not in names(formula("spherical"))
    assert "sandwich" in names(formula("attention"))


def test_spherical_attention_by_reassociation_moves_less_than_the_bound_it_no_longer_gets() -> None:
    """Q (KᵀV) over the root of q (KᵀK) q: one pass over Q, K and V with two d x d states."""
    n, d, memory = 2**20, 64, 2.0**15
    attention = formula("attention").resized({"q": n, "x": n, "d": d, "e": d})
    sandwich = next(b for b in lower_bounds(attention, memory) if b.name == "sandwich")
    passes = 2 * n * d + 2 * n * d
    assert 2 * d * d + 4 * d <= memory and passes < sandwich.value
