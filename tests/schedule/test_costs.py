"""Hopper's measured costs are what the raw figures say, and nothing else calls itself measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import calibrate_fit
from warploom.schedule.model.costs import costs
from warploom.schedule.published.catalogue import build

RAW = Path(__file__).parents[2] / "bench/results/raw/schedule-costs-h200.json"


@pytest.fixture(name="fitted")
def fitted_costs() -> dict[str, tuple[float, float, float, str]]:
    fits = calibrate_fit.costs(json.loads(RAW.read_text()))
    return {name: (fit.value, fit.low, fit.high, fit.unit) for name, fit in fits.items()}


def test_the_table_is_the_fit_of_the_raw_figures(
    fitted: dict[str, tuple[float, float, float, str]],
) -> None:
    table = costs("h200").costs
    measured = {
        name: (cost.value, cost.low, cost.high, cost.unit)
        for name, cost in table.items()
        if cost.kind == "measured"
    }
    assert measured == fitted
    assert {name for name, cost in table.items() if cost.kind == "assumed"} == {
        "registers.reserved"
    }
    device = json.loads(RAW.read_text())["device"]
    for name in fitted:
        assert (
            device["name"] in table[name].source and device["driver_version"] in table[name].source
        )


def test_rates_of_the_machine_are_what_was_measured() -> None:
    """Cycles that two groups add to one: the pipe's occupancy, without latency."""
    rows = json.loads(RAW.read_text())["tiles"]
    table = costs("h200")
    at = {(r["op"], r["columns"], r["groups"]): r["cycles"] for r in rows}
    elements = 64 * 256
    expected = {
        "row_max": table.comparisons(elements),
        "row_sum": table.lanes(elements),
        "exp2": table.exponentials(elements),
        "rescale": table.lanes(elements),
        "convert": table.conversions(elements),
    }
    for op, cycles in expected.items():
        added = at[op, 256, 2] - at[op, 256, 1]
        assert added == pytest.approx(cycles, rel=0.08), op


def test_a_product_over_more_depth_holds_its_group_longer() -> None:
    graphs = [build("gemm", costs("h200"), {"depth": depth}) for depth in (64, 128)]
    short, long = (graph.by_id["C0"].issue for graph in graphs)
    step = costs("h200").value("mma.issue_per_step")
    assert long - short == 4 * step
    free = costs("h200").override("test", mma_issue_per_step=0, mma_issue=16)
    assert build("gemm", free).by_id["C0"].issue == 16
