"""The cost formula equals what an execution moves, and both equal the meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.derive.cases import NESTS, kernel, small, tilings

from warploom.derive.cost import cost, counts
from warploom.derive.cost.work import operations
from warploom.derive.execute import run_kernels
from warploom.derive.formula import frontend as f
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.kernel.kernel import Loop
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal


@pytest.mark.parametrize(("name", "nest"), NESTS)
def test_execution_agrees_and_moves_what_the_formula_says(name: str, nest: str) -> None:
    arrays = random_inputs(small(name))
    want = evaluate(small(name), arrays)
    for tiled in tilings(kernel(name, nest)):
        got, traffic = run_kernels([tiled], arrays)
        assert compare(got, want) < 1e-12
        assert traffic[0].total == counts.exact_traffic(tiled), (tiled.tiles, traffic[0])
        moved = counts.exact_transfers(tiled)
        for array, count in traffic[0].loaded.items():
            if "partial" not in array:
                assert moved[array] == count


@pytest.mark.parametrize(
    ("name", "nest"), [n for n in NESTS if n[0] not in ("causal", "window", "convolution")]
)
def test_symbolic_cost_is_exact_when_tiles_divide(name: str, nest: str) -> None:
    made = kernel(name, nest)
    sizes = {axis: 12 for axis in made.body.size if axis != "k"}
    made = made.resized(sizes)
    for step in (1, 2, 3, 4, 12):
        tiled = made.tiled(
            {each.symbol: 12 if each.kind == "split" and step > 4 else step for each in made.loops}
        )
        symbolic = cost.numbers(tiled, cost.traffic(tiled))
        assert symbolic == pytest.approx(counts.exact_traffic(tiled), rel=1e-9)


def test_a_stream_inside_a_split_runs_over_one_part() -> None:
    """X lacks the split axis and is loaded inside its stream: once a slice, not once a slice and
    part. A formula that counts both trips in full is caught."""
    x, w = tensor("X", "m d"), tensor("W", "v d")
    body = build(
        "lse", f.logsumexp(f.contract(x, w, out=("m", "v")), "v"), dict.fromkeys("mdv", 12)
    )
    nest = [Loop("m", "group"), Loop("v", "split"), Loop("v", "stream"), Loop("d", "stream")]
    made = make_kernel(body, nest)
    assert not isinstance(made, Refusal)
    tiled = made.tiled({"g_m": 4, "w_v": 6, "s_v": 3, "s_d": 2})
    assert cost.numbers(tiled, cost.traffic(tiled)) == counts.exact_traffic(tiled)
    arrays = random_inputs(body)
    got, moved = run_kernels([tiled], arrays)
    assert compare(got, evaluate(body, arrays)) < 1e-12
    assert moved[0].total == counts.exact_traffic(tiled)
    assert counts.exact_transfers(tiled)["X"] == 12 * 12 * 4
    flops = cost.numbers(tiled, operations(tiled)["tensor"])
    assert flops == 2 * 12**3


def test_causal_and_window_formulas_match_when_slices_are_one() -> None:
    for name in ("causal", "window"):
        made = kernel(name, "g_q s_x").resized({"q": 4096, "x": 4096, "d": 4, "e": 4})
        if name == "window":
            nodes = tuple(
                replace(n, attrs=tuple((k, 64 if k == "window" else v) for k, v in n.attrs))
                if n.kind == "mask"
                else n
                for n in made.body.nodes
            )
            made = replace(made, body=replace(made.body, nodes=nodes))
        tiled = made.tiled({"g_q": 4, "s_x": 1})
        symbolic = cost.numbers(tiled, cost.traffic(tiled))
        assert symbolic == pytest.approx(counts.exact_traffic(tiled), rel=0.03)
        free = replace(tiled, bound_by=())
        assert counts.exact_traffic(tiled) < 0.6 * counts.exact_traffic(free)


def test_mask_bounds_change_nothing_but_the_work() -> None:
    arrays = random_inputs(small("causal"))
    bounded = next(tilings(kernel("causal", "g_q s_x")))
    free = replace(bounded, bound_by=())
    a, moved = run_kernels([bounded], arrays)
    b, all_moved = run_kernels([free], arrays)
    assert compare(a, {"out": b["out"]}) < 1e-14
    assert moved[0].total < all_moved[0].total


def test_halo_of_a_convolution_is_counted() -> None:
    tiled = kernel("convolution", "g_o s_c").resized({"i": 14, "o": 12, "w": 3, "c": 4, "n": 2})
    tiled = tiled.tiled({"g_o": 4, "s_c": 4})
    # three groups of four outputs read 4 + 3 - 1 inputs of four channels each
    assert counts.exact_transfers(tiled)["X"] == 3 * 6 * 4


# --- planted faults: the referee must notice ------------------------------------------------------


def test_a_wrong_correction_is_caught() -> None:
    tiled = next(tilings(kernel("attention", "g_q s_x")))
    wrong = replace(
        tiled, corrections=tuple(replace(c, matrix=(("1",),)) for c in tiled.corrections)
    )
    arrays = random_inputs(small("attention"), scale=3.0)
    want = evaluate(small("attention"), arrays)
    got, _ = run_kernels([wrong], arrays)
    assert compare(got, want) > 1e-3


def test_a_dropped_correction_breaks_the_merge() -> None:
    tiled = next(tilings(kernel("attention", "g_q w_x s_x")))
    wrong = replace(tiled, corrections=tiled.corrections[:1])
    arrays = random_inputs(small("attention"), scale=3.0)
    got, _ = run_kernels([wrong], arrays)
    assert compare(got, evaluate(small("attention"), arrays)) > 1e-3


def test_a_different_nest_moves_different_amounts() -> None:
    inner = next(tilings(kernel("attention", "g_q s_x")))
    outer = next(tilings(kernel("attention", "g_q s_x s_d")))
    assert counts.exact_traffic(inner) != counts.exact_traffic(outer)
    moved = counts.exact_transfers(replace(inner, loops=(inner.loops[1], Loop("q", "group"))))
    assert moved != counts.exact_transfers(inner)
