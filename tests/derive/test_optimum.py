"""Optima beside values worked out by hand, certificates, integer tiles, structure."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from tests.derive.cases import loops

from warploom.derive.bounds.bounds import BoundBroken, check, lower_bounds
from warploom.derive.cost import closed, continuous, cost, counts
from warploom.derive.cost.integers import candidates, choose
from warploom.derive.cost.posynomial import Posynomial, constant, variable
from warploom.derive.cost.structure import Setting, search
from warploom.derive.formula.external import sympy
from warploom.derive.formula.library import formula
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal
from warploom.errors import InputError

SCORE_TILE = cost.Accounting(intermediates=True, statistics=False)


def fused(name: str, nest: str, **sizes: int) -> Kernel:
    """A kernel at the formula's sizes, some overridden."""
    made = make_kernel(formula(name).resized(sizes), loops(nest))
    assert not isinstance(made, Refusal)
    return made


MATMUL = fused("matmul", "g_a g_c s_b")
ATTENTION = fused("attention", "g_q s_x")


def cosma(capacity: float) -> float:
    """2mnk/√M + mn: what COSMA attains for the matmul (1908.09606)."""
    a, b, c = (MATMUL.body.size[axis] for axis in "abc")
    return 2 * a * b * c / math.sqrt(capacity) + a * c


def test_t1_matmul_law_is_2abc_over_root_m_plus_ac() -> None:
    piece = closed.law(MATMUL).at(131072)
    sp = sympy()
    a, b, c = (sp.Symbol(n, positive=True) for n in "abc")
    assert sp.simplify(piece.alpha - 2 * a * b * c) == 0
    assert float(piece.beta) == 0.5
    assert str(piece.constant) == "a c"
    for capacity in (2**14, 2**18, 2**22):
        ratio = closed.law(MATMUL).value(capacity) / cosma(capacity)
        assert ratio == pytest.approx(1, rel=1e-12)
    found = [continuous.solve(MATMUL, m, cost.PAPER).traffic for m in (2**14, 2**18, 2**22)]
    ratios = [h / cosma(m) for h, m in zip(found, (2**14, 2**18, 2**22), strict=True)]
    assert ratios[0] > ratios[1] > ratios[2] > 1
    assert ratios[2] < 1.001


def test_t2_attention_law_is_2qd_plus_4xqd2_over_m() -> None:
    piece = closed.law(ATTENTION).at(116224)
    sp = sympy()
    q, x, d, e = (sp.Symbol(n, positive=True) for n in "qxde")
    assert sp.simplify(piece.alpha.subs(e, d) - 4 * q * x * d**2) == 0
    assert float(piece.beta) == 1
    assert sp.simplify(piece.constant.symbolic().subs(e, d) - 2 * q * d) == 0
    n, width = 2**20, 128
    long = fused("attention", "g_q s_x", q=n, x=n)
    for capacity in (width**2, 2**16, 2**20):
        moving = closed.law(long).value(capacity) - 2 * n * width
        assert moving / (n * n * width**2 / capacity) == pytest.approx(4, rel=1e-9)


@pytest.mark.parametrize(
    ("capacity", "group", "traffic", "law"),
    [
        (4096, 15, 2.874e8, 2.695e8),
        (16384, 63, 6.922e7, 6.816e7),
        (65536, 255, 1.789e7, 1.783e7),
        (2**20, 4095, 2.097e6, 2.097e6),
        (2**24, 4096, 2.097e6, 2.097e6),
    ],
)
def test_saturation_table(capacity: int, group: int, traffic: float, law: float) -> None:
    found = continuous.solve(ATTENTION, capacity, cost.PAPER)
    assert found.tiles["g_q"] == pytest.approx(group, rel=1e-3)
    assert found.traffic == pytest.approx(traffic, rel=1e-3)
    assert found.gap < 1e-3
    assert closed.law(ATTENTION).value(capacity) == pytest.approx(law, rel=1e-3)


def test_laws_worked_out_by_hand() -> None:
    capacities = [2**k for k in range(14, 19)]
    big = fused("matmul", "g_a g_c s_b", a=16384, b=16384, c=16384)
    moving = [continuous.solve(big, m, cost.PAPER).traffic - 16384**2 for m in capacities]
    slope = np.polyfit(np.log(capacities), np.log(moving), 1)[0]
    assert -slope == pytest.approx(0.502, abs=0.001)
    long = fused("attention", "g_q s_x", q=65536, x=65536)
    moving = [continuous.solve(long, m, cost.PAPER).traffic - 2 * 65536 * 128 for m in capacities]
    assert -np.polyfit(np.log(capacities), np.log(moving), 1)[0] == pytest.approx(1.005, abs=0.001)
    tiles = continuous.solve(big, 65536, cost.PAPER).tiles
    assert tiles["g_a"] == pytest.approx(255, rel=1e-3) and tiles["s_b"] == pytest.approx(
        1, rel=1e-3
    )
    assert continuous.solve(long, 65536, cost.PAPER).tiles["g_q"] == pytest.approx(255, rel=1e-3)


def test_finite_stream_slices() -> None:
    for s, want in ((16, 346.4), (64, 303.7)):
        g = math.sqrt(131072 + s * s) - s
        assert g == pytest.approx(want, abs=0.05)
        values = {"g_a": g, "g_c": g, "s_b": s}
        assert cost.memory(MATMUL)[0].value(values) == pytest.approx(131072)
    full, paper = cost.memory(ATTENTION, SCORE_TILE)[0], cost.memory(ATTENTION, cost.PAPER)[0]
    for s, no_tile, with_tile in ((16, 438, 412), (64, 390, 312)):
        sizes = {"d": 128.0, "e": 128.0, "s_x": s}
        assert (
            paper.value({**sizes, "g_q": no_tile})
            <= 116224
            < paper.value({**sizes, "g_q": no_tile + 1})
        )
        assert (
            full.value({**sizes, "g_q": with_tile})
            <= 116224
            < full.value({**sizes, "g_q": with_tile + 1})
        )


def test_integer_examples() -> None:
    found = choose(MATMUL, 131072, {"a": 64, "b": 16, "c": 64})
    assert found.tiles == {"g_a": 256, "g_c": 448, "s_b": 16}
    assert found.score == 3_576_168_448
    best = continuous.solve(MATMUL, 131072, cost.PAPER)
    assert best.traffic == pytest.approx(3.1125e9, rel=1e-4)
    assert cosma(131072) == pytest.approx(3.1041e9, rel=1e-4)
    found = choose(ATTENTION, 116224, {"q": 16, "x": 16}, accounting=SCORE_TILE)
    assert found.tiles == {"g_q": 384, "s_x": 16}
    assert found.score == 12_615_680
    assert counts.exact_traffic(ATTENTION.tiled(found.tiles)) == 12_582_912
    best = continuous.solve(ATTENTION, 116224, SCORE_TILE)
    assert best.traffic == pytest.approx(1.0567e7, rel=1e-4)
    assert found.score / best.traffic == pytest.approx(1.194, abs=1e-3)


def test_t3_small_memory_leaves_full_fusion_with_slope_one_half() -> None:
    size = {"q": 16384, "x": 16384}
    diagram = formula("attention").resized(size)
    found = {m: search(diagram, Setting(m, {})) for m in (512, 1024, 2048, 4096, 131072)}
    assert len(found[131072].kernels) == 1
    assert all(len(found[m].kernels) > 1 for m in (512, 1024, 2048, 4096))
    pairs = size["q"] * size["x"]
    # take away the spilled scores: one write and (through the tiles of P V) no memory exponent
    moving = [found[m].score - pairs for m in (512, 1024, 2048)]
    slope = np.polyfit(np.log([512, 1024, 2048]), np.log(moving), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.06)
    fused_only = choose(fused("attention", "g_q s_x", **size), 2048)
    assert found[2048].score < 0.6 * fused_only.score


def test_t3_crossover_of_the_unfused_variant() -> None:
    d = 128

    def law(m: float) -> float:
        return 4 * d * d / m

    def unfused(m: float) -> float:
        return 4 * d / math.sqrt(m) + 1

    crossing = next(m for m in range(4000, 30000) if law(m) <= unfused(m))
    assert crossing == pytest.approx(11240, rel=0.01)
    assert crossing / d**2 == pytest.approx(0.69, abs=0.01)
    # the symbolic machinery gives both sides: fused, and two matmuls around a spilled S
    n = 2**16
    fused_law = closed.law(fused("attention", "g_q s_x", q=n, x=n))
    product = closed.law(fused("matmul", "g_a g_c s_b", a=n, b=d, c=n))
    second = closed.law(fused("matmul", "g_a g_c s_b", a=n, b=n, c=d))
    for m in (2048, 4096, 8192):
        assert fused_law.value(m) / n**2 == pytest.approx(law(m), rel=0.01)
        spilled = product.value(m) + second.value(m)
        assert spilled / n**2 == pytest.approx(unfused(m), rel=0.01)


def test_t4_large_memory_moves_each_array_once() -> None:
    n, d = 4096, 128
    assert closed.law(ATTENTION).value(3 * n * d) == 4 * n * d
    plan = search(formula("attention"), Setting(3 * n * d, {}))
    assert plan.score == 4 * n * d
    assert sum(counts.exact_traffic(k) for k in plan.kernels) == 4 * n * d


def test_t5_decode_shares_keys_and_has_no_power_law() -> None:
    n, h, x, d = 8, 8, 32768, 128
    shared = search(formula("gqa_decode"), Setting(116224, {}))
    assert shared.score == 2 * n * h * d + 2 * n * x * d
    single = search(formula("mha").resized({"h": n * h, "q": 1, "x": x}), Setting(116224, {}))
    assert single.score == 2 * n * h * d + 2 * n * h * x * d
    outside_keys = 2 * n * h * d
    assert (single.score - outside_keys) / (shared.score - outside_keys) == h
    made = fused("attention", "g_q s_x", q=1)
    assert closed.law(made).at(116224).beta == 0
    assert closed.law(ATTENTION).at(116224).beta == 1


def test_t9_a_result_below_its_bound_is_a_bug() -> None:
    for name, capacity in (("matmul", 131072), ("attention", 116224), ("mlp", 65536)):
        diagram = formula(name)
        best = lower_bounds(diagram, capacity)[0]
        with pytest.raises(BoundBroken, match="bug"):
            check(diagram, best.value * 0.99, capacity)
        assert check(diagram, best.value * 1.01, capacity) == best


def test_no_execution_beats_a_bound_on_tiny_sizes() -> None:
    """Random tilings of tiny kernels: what is really moved is at least every bound."""
    rng = Random(1)
    cases = (
        ("matmul", "g_a g_c s_b"),
        ("attention", "g_q s_x"),
        ("mlp", "g_m s_h"),
        ("rmsnorm_matmul", "g_m g_n s_d"),
    )
    for name, nest in cases:
        for _ in range(60):
            sizes = {axis: rng.randint(4, 64) for axis in formula(name).size}
            made = make_kernel(formula(name).resized(sizes), loops(nest))
            assert not isinstance(made, Refusal)
            tiled = made.tiled(
                {each.symbol: rng.randint(1, sizes[each.axis]) for each in made.loops}
            )
            for capacity in (cost.resident(tiled), 2 * cost.resident(tiled)):
                check(formula(name).resized(sizes), counts.exact_traffic(tiled), capacity)


def test_sandwich_bound_is_two_n2d2_over_m() -> None:
    n, d = 2**22, 64
    diagram = formula("attention").resized({"q": n, "x": n, "d": d, "e": d})
    for capacity in (2**17, 2**18):
        bound = next(b for b in lower_bounds(diagram, capacity) if b.name == "sandwich")
        assert bound.value / (n * n * d * d / capacity) == pytest.approx(2, rel=0.15)
    assert not [b for b in lower_bounds(formula("causal"), 2**17) if b.name == "sandwich"]


def test_certificates_hold_for_any_multipliers_and_catch_a_false_optimum() -> None:
    rng = np.random.default_rng(0)
    sizes = {a: float(n) for a, n in MATMUL.body.size.items()}
    limit = [cost.memory(MATMUL)[0].substitute(sizes).scaled(1 / 131072)]
    program = continuous.logarithmic(
        cost.traffic(MATMUL).substitute(sizes),
        limit,
        {each.symbol: sizes[each.axis] for each in MATMUL.loops},
    )
    best = continuous.minimise(program)
    assert 0 <= best.gap < 1e-4
    for _ in range(200):
        point = rng.uniform(0, 9, 3)
        assert continuous.certificate(
            program, point, [float(rng.uniform(0, 5))]
        ) <= best.traffic * (1 + 1e-9)
    worse = continuous.certificate(program, np.log([64.0, 64.0, 1.0]), [0.9])
    value = float(
        sum(np.exp(program.blocks[0][1] + program.blocks[0][0] @ np.log([64.0, 64.0, 1.0])))
    )
    assert (value - worse) / value > 0.5


def brute_force(made: Kernel, capacity: float, multiples: dict[str, int]) -> float:
    """Every legal combination, scored by its own loop over plain numbers."""
    best = math.inf
    options = [
        [
            t
            for t in range(1, made.body.size[each.axis] + 1)
            if t % multiples.get(each.axis, 1) == 0 or t == made.body.size[each.axis]
        ]
        for each in made.loops
    ]
    names = [each.symbol for each in made.loops]
    columns, moved = cost.memory(made), cost.traffic(made)
    for tiles in itertools.product(*options):
        values = {a: float(n) for a, n in made.body.size.items()}
        for each, t in zip(made.loops, tiles, strict=True):
            values[each.axis] = math.ceil(made.body.size[each.axis] / t) * t
        values |= dict(zip(names, map(float, tiles), strict=True))
        if all(c.value(values) <= capacity for c in columns):
            best = min(best, moved.value(values))
    return best


def test_integer_choices_match_exhaustive_search_on_240_random_problems() -> None:
    rng = Random(42)
    cases = (
        ("matmul", "g_a g_c s_b"),
        ("attention", "g_q s_x"),
        ("rmsnorm_matmul", "g_m g_n s_d"),
        ("mlp", "g_m s_h s_d"),
    )
    worst, solved = 1.0, 0
    while solved < 240:
        name, nest = cases[solved % len(cases)]
        sizes = {axis: rng.randint(2, 22) for axis in formula(name).size}
        made = make_kernel(formula(name).resized(sizes), loops(nest))
        assert not isinstance(made, Refusal)
        multiples = {axis: rng.choice((1, 1, 2, 3, 4)) for axis in sizes}
        capacity = rng.randint(60, 900)
        exact = brute_force(made, capacity, multiples)
        if math.isinf(exact):
            with pytest.raises(InputError, match="cannot fit"):
                choose(made, capacity, multiples)
            continue
        solved += 1
        worst = max(worst, choose(made, capacity, multiples).score / exact)
    assert worst <= 1.05, worst


def test_candidates_keep_every_trip_count() -> None:
    for size in (1, 7, 64, 100, 4096):
        for multiple in (1, 3, 16):
            kept = candidates(size, multiple)
            legal = [t for t in range(1, size + 1) if t % multiple == 0 or t == size]
            for tile in legal:
                assert any(
                    k <= tile and math.ceil(size / k) == math.ceil(size / tile) for k in kept
                )


def test_posynomials() -> None:
    x, y = variable("x"), variable("y")
    square = (x + y).raised(2)
    assert str(square) == "2 x y + x^2 + y^2"
    assert square.value({"x": 2, "y": 3}) == 25
    assert (x * variable("x", -1)) == constant(1)
    assert square.substitute({"x": y.scaled(2)}).value({"y": 1}) == 9
    for bad in (lambda: Posynomial.build([((), -1.0)]), lambda: square.raised(-1)):
        with pytest.raises(InputError):
            bad()


def test_what_cannot_fit_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(InputError, match="at least"):
        continuous.solve(ATTENTION, 100)
    with pytest.raises(InputError, match="cannot fit"):
        choose(ATTENTION, 600, {"q": 16, "x": 16})
    with pytest.raises(InputError, match="no fusion fits"):
        search(formula("softmax"), Setting(1, {}))
    with pytest.raises(InputError, match="outside 1"):
        ATTENTION.tiled({"g_q": 0, "s_x": 1})
    with pytest.raises(InputError, match="no size for s_x"):
        ATTENTION.tiled({"g_q": 1})
    assert replace(ATTENTION.tiled({"g_q": 1, "s_x": 1}), tiles=()) == ATTENTION
