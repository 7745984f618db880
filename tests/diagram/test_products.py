"""The bounds of `product_bounds` read a second time: lemmas by brute force, where they are sharp,
where they must not be given."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from tests.diagram.cases import loops

from warploom.diagram import closed, cost, counts
from warploom.diagram import frontend as f
from warploom.diagram.bounds import check, lower_bounds
from warploom.diagram.cascade import Refusal
from warploom.diagram.derive import derive
from warploom.diagram.frontend import Expr, build, tensor
from warploom.diagram.graph import Diagram
from warploom.diagram.legal import make_kernel
from warploom.diagram.library import formula
from warploom.diagram.product_bounds import embeds, piece, products_value, tensors
from warploom.diagram.work import recomputes

Triple = tuple[int, int, int]


def items(scores: set[Triple], values: set[Triple], shared: bool = True) -> int:
    """Items that products (i, j, l) of Q K and (i, j, m) of P V touch; `shared`: one a pair."""
    pairs = {(i, j) for i, j, _ in scores}, {(i, j) for i, j, _ in values}
    count = len(pairs[0] | pairs[1]) if shared else max(len(pairs[0]), len(pairs[1])) // 2
    count += len({(i, k) for i, _, k in scores}) + len({(j, k) for _, j, k in scores})
    return count + len({(j, k) for _, j, k in values}) + len({(i, k) for i, _, k in values})


def clumps(rng: Random, n: int) -> tuple[set[Triple], set[Triple]]:
    """Boxes with holes: what comes near the inequality; a random set is far from it."""
    rows, columns, depth, width = (rng.randint(1, n) for _ in range(4))
    keep = rng.choice((1.0, 0.9, 0.5))
    pairs = list(itertools.product(range(rows), range(columns)))
    scores = {(i, j, k) for i, j in pairs for k in range(depth) if rng.random() < keep}
    values = {(i, j, k) for i, j in pairs for k in range(width) if rng.random() < keep}
    return (scores, values) if rng.random() < 0.7 else (scores, set())


def test_products_of_both_sides_obey_one_loomis_whitney_inequality() -> None:
    rng = Random(7)
    nearest = 0.0
    for _ in range(1500):
        scores, values = clumps(rng, 6)
        ratio = (len(scores) + len(values)) / max(1.0, items(scores, values) / 3) ** 1.5
        nearest = max(nearest, ratio)
        assert ratio <= 1 + 1e-12
    assert nearest > 0.9
    cube = set(itertools.product(range(6), range(6), range(6)))
    # Planted: were a pair half an item, the inequality would be broken.
    assert 2 * len(cube) > (items(cube, cube, shared=False) / 3) ** 1.5


def most_second_products(rng: Random, d: int, e: int) -> tuple[int, int]:
    """(items in reach, products g(S) V completed) of a random piece on a 4 x 4 pair space."""
    rows, columns = rng.randint(0, 4), rng.randint(0, 4)
    pairs = {(i, j) for i in range(rows) for j in range(columns)}
    others = [p for p in itertools.product(range(4), range(4)) if p not in pairs]
    carried = rng.sample(others, rng.randint(0, min(3, len(others))))
    usable = pairs | set(carried)
    width = rng.randint(1, e)
    value = {(j, m) for _, j in usable for m in range(width)}
    out = {(i, m) for i, _ in usable for m in range(width)}
    reach = rows * d + columns * d + len(carried) + len(value) + len(out)
    return reach, sum((i, m) in out and (j, m) in value for i, j in usable for m in range(width))


@pytest.mark.parametrize(("d", "e"), [(1, 1), (2, 2), (1, 3), (3, 1), (4, 4)])
def test_no_piece_completes_more_than_the_lemma_allows(d: int, e: int) -> None:
    rng = Random(d + 10 * e)
    for _ in range(4000):
        reach, done = most_second_products(rng, d, e)
        assert done <= piece(reach, d) + 1e-9


def test_the_lemma_is_attained_so_that_no_better_constant_holds() -> None:
    for r, d in ((8, 2), (16, 4), (30, 3)):
        reach = 4 * r * d  # r rows, r columns, d of each: Q, K, V and O take r d each
        assert r * r * d == reach * reach / (16 * d)
        if reach >= 9.49 * d * d:
            assert piece(reach, d) == r * r * d
        assert r * r * d > piece(reach, d, 17.0) or piece(reach, d) > r * r * d


def test_attention_is_within_a_percent_of_a_proven_bound_where_fusion_is_chosen() -> None:
    """4qxd²/M is the least leading term there is for M >= 4.74 d², and at M = 4 d²."""
    n, d = 2**22, 128
    diagram = formula("attention").resized({"q": n, "x": n})
    made = make_kernel(diagram, loops("g_q s_x"))
    assert not isinstance(made, Refusal)
    law = closed.law(made)
    for factor in (4, 4.75, 5, 8, 16, 64):
        memory = factor * d * d
        best = lower_bounds(diagram, memory)[0]
        assert 0.99 < best.value / law.value(memory) <= 1, factor
    # Unfused, below the crossover: 4qxd/√M + qx against 4qxd/√M - qx.
    for factor in (1 / 16, 1 / 4, 0.69):
        memory = factor * d * d
        unfused = (4 * d / math.sqrt(memory) + 1) * n * n
        best = lower_bounds(diagram, memory)[0]
        assert best.name == "products"
        assert unfused - best.value == pytest.approx(2 * n * n, rel=1e-2)


def test_no_attention_kernel_beats_the_bounds_and_some_come_near() -> None:
    rng = Random(3)
    nearest = 0.0
    for _ in range(250):
        d = rng.randint(2, 5)
        sizes = {"q": rng.randint(200, 3000), "x": rng.randint(200, 3000), "d": d, "e": d}
        made = make_kernel(formula("attention").resized(sizes), loops("g_q s_x"))
        assert not isinstance(made, Refusal)
        tiled = made.tiled({"g_q": rng.randint(d, 40), "s_x": 1})
        capacity = cost.resident(tiled, cost.PAPER)
        best = check(made.body, counts.exact_traffic(tiled), capacity)
        nearest = max(nearest, best.value / counts.exact_traffic(tiled))
    assert nearest > 0.85


def names(diagram: Diagram, memory: float = 2.0**12, recomputed: bool = False) -> set[str]:
    return {bound.name for bound in lower_bounds(diagram, memory, recomputed)}


ABCD = dict.fromkeys("abcd", 4096)


def test_products_that_reassociate_or_recompute_are_not_counted() -> None:
    a, b, c = tensor("A", "a b"), tensor("B", "b c"), tensor("C", "c d")
    assert names(build("chain", (a @ b) @ c, ABCD)) == {"compulsory"}
    assert names(formula("spherical")) == {"compulsory"}
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    # Linear attention written with a mask: one pass with a d x e state is enough.
    plain = f.contract(f.causal(f.contract(q, k, out=("q", "x")), "q", "x"), v, out=("q", "e"))
    assert names(build("masked", plain, dict.fromkeys("qxde", 4096))) == {"compulsory"}
    attention = formula("attention").resized({"q": 2**16, "x": 2**16})
    assert {"products", "attention"} <= names(attention)
    assert "products" not in names(attention, recomputed=True)
    assert "attention" in names(attention, recomputed=True)


def test_scores_are_paid_for_even_where_only_the_second_product_counts() -> None:
    """Counting P V alone without the births of P would claim more than FlashAttention moves."""
    n, d, memory = 2**20, 128, 2.0**17
    diagram = formula("attention").resized({"q": n, "x": n})
    (second,) = [p for p in tensors(diagram) if p.name == "out"]
    unpaid = 2 * second.work / math.sqrt(memory)
    assert unpaid > 4 * n * n * d * d / memory + 2 * n * d
    value, chosen = products_value(diagram, memory)
    assert chosen == ("contract", "out") and value < unpaid


def test_sums_that_may_be_one_are_counted_once() -> None:
    a, b, c = tensor("A", "a b"), tensor("B", "b c"), tensor("C", "a d")
    both: Expr = (a @ b) + (c @ tensor("D", "d c"))
    value, chosen = products_value(build("both", both, ABCD), 2.0**12)
    assert len(chosen) == 1
    assert value == pytest.approx(2 * 4096**3 / 64 - 2 * 4096)
    latent = formula("mla").resized({"q": 4096, "h": 16})
    assert not {"contract", "contract2"} <= set(products_value(latent, 2.0**12)[1])


def test_one_index_space() -> None:
    mlp = tensors(formula("mlp"))
    assert embeds(mlp) and len(mlp) == 2
    # Two products of X share X only; with W they are three boxes of one space.
    x, left, right = tensor("X", "a b"), tensor("L", "b c"), tensor("R", "b c")
    gate = f.apply("silu", x @ left) * f.apply("sigmoid", x @ right)
    gated = tensors(build("gated", gate @ tensor("W", "c d"), ABCD))
    assert len(gated) == 3 and embeds(gated)
    attention = {p.name: p for p in tensors(formula("mla"))}
    # C is keys and values of the same pairs: both products would lie on the same points.
    assert not embeds([attention["contract"], attention["out"]])


def test_masks_scale_the_work_that_is_needed() -> None:
    n = 2**14
    whole = formula("attention").resized({"q": n, "x": n})
    causal = formula("causal").resized({"q": n, "x": n})
    for first, second in zip(tensors(whole), tensors(causal), strict=True):
        assert second.work / first.work == pytest.approx(0.5, abs=1e-3)
    window = tensors(formula("window").resized({"q": n, "x": n}))
    assert window[0].work == pytest.approx(n * 1024 * 128, rel=0.05)


def test_recomputing_nests_are_known() -> None:
    body = formula("attention").resized({"q": 64, "x": 64, "d": 8, "e": 8})
    for nest, tiles, want in (
        ("g_q s_x", {"g_q": 8, "s_x": 4}, False),
        ("g_q g_e s_x", {"g_q": 8, "g_e": 4, "s_x": 4}, True),
        ("g_q g_e s_x", {"g_q": 8, "g_e": 8, "s_x": 4}, False),
    ):
        made = make_kernel(body, loops(nest))
        assert not isinstance(made, Refusal)
        assert recomputes(made.tiled(tiles)) is want


def test_derivations_say_which_bound_and_how_near() -> None:
    want = {
        "attention": ("attention", 75),
        "cross_entropy": ("products", 90),
        "mlp": ("products", 50),
    }
    for name, (bound, least) in want.items():
        found = derive(formula(name), memory=116224)
        assert found.bound.name == bound
        assert least < found.percent_of_bound <= 100
