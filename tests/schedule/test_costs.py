"""Hopper's measured costs are what the raw figures say, and nothing else calls itself measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import calibrate_fit, calibrate_launch
from warploom.schedule.model.costs import costs

LAUNCH = Path(__file__).parents[2] / "bench/results/raw/launch-h200.json"
PLACES = LAUNCH.with_name("launch-places-h200.json")
RAW = Path(__file__).parents[2] / "bench/results/raw/schedule-costs-h200.json"


@pytest.fixture(name="fitted")
def fitted_costs() -> dict[str, tuple[float, float, float, str]]:
    fits = calibrate_fit.costs(json.loads(RAW.read_text()))
    for raw in (LAUNCH, PLACES):
        fits |= calibrate_launch.costs(json.loads(raw.read_text()))
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
    files = dict.fromkeys(fitted, RAW)
    for raw in (LAUNCH, PLACES):
        files |= dict.fromkeys(calibrate_launch.costs(json.loads(raw.read_text())), raw)
    for name, raw in files.items():
        device = json.loads(raw.read_text())["device"]
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
        "convert": elements / table.rate("convert.pack16"),
    }
    for op, cycles in expected.items():
        added = at[op, 256, 2] - at[op, 256, 1]
        assert added == pytest.approx(cycles, rel=0.08), op
