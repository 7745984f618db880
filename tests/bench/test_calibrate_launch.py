"""The constants of whole launches: fitted from raw figures, and the fit from figures made up."""

import json
from pathlib import Path

import pytest

from bench.calibrate_launch import NEAR, beside, fit, placed, power_probes
from warploom.machine import load

OTHER = Path("bench/results/raw/launch-other-card-h200.json")
PLACES = Path("bench/results/raw/launch-places-h200.json")
LATER = Path("bench/results/raw/launch-places-energy-h200.json")
RAW = Path("bench/results/raw/launch-h200.json")


def test_the_machine_data_are_what_the_raw_figures_say() -> None:
    found, residuals = fit(json.loads(RAW.read_text()))
    machine, other = load("h200"), beside(json.loads(OTHER.read_text()), found)
    assert machine.value("energy.matmul_fp16") == pytest.approx(other["fp16"], rel=0.01)
    assert machine.value("energy.matmul_fp8") == pytest.approx(other["e4m3"], rel=0.01)
    assert machine.value("l2.read_again") == pytest.approx(other["read_again"], rel=0.02)
    assert machine.value("energy.dram_shared") == pytest.approx(other["dram_shared"], rel=0.03)
    for ours, theirs in {
        "power.static": "static",
        "power.burst": "burst",
        "energy.exponent": "exponent",
        "energy.matmul": "matmul",
        "energy.operands": "operands",
        "energy.smem": "sts",
        "energy.copy": "copied",
        "energy.dram": "dram",
        "energy.store": "stored",
    }.items():
        assert machine.value(ours) == pytest.approx(found[theirs], rel=0.01), ours
    assert machine.value("energy.l2") == pytest.approx(
        found["copied"] + found["distinct"], rel=0.01
    )
    lanes = (found["ffma"] + found["ex2"] + found["fmax"]) / 3
    assert machine.value("energy.instruction") == pytest.approx(lanes, rel=0.01)
    assert max(map(abs, residuals.values())) < 0.015


def test_energies_of_places_in_a_line_are_what_the_raw_figures_say() -> None:
    raw, later, machine = (
        json.loads(PLACES.read_text()),
        json.loads(LATER.read_text()),
        load("h200"),
    )
    exponent = machine.value("energy.exponent")
    runs = [placed(one, exponent) for one in (raw, later)]
    for place in ("sector", "beside", "inside"):
        found = [run[place] for run in runs if place in run]
        mean = sum(found) / len(found)
        assert machine.value(f"energy.copy_{place}") == pytest.approx(mean, rel=0.01), place
    pairs = [row["us"] for row in raw["launches"] if row["cluster"] == 2]
    assert machine.value("launch.gap_clusters") == pytest.approx(sum(pairs) / 2, abs=0.01)


def test_energies_that_were_put_in_come_out() -> None:
    """Kernels of a made-up GPU: below its limit at 1980 MHz, at it at the clock that fits."""
    true = {"matmul": 4000.0, "operands": 6.0, "e4m3": 3000.0, "ffma": 200.0, "ex2": 300.0}
    true |= {"fmax": 250.0, "sts": 4.0, "copied": 20.0, "distinct": 10.0, "dram": 70.0}
    true["stored"] = 40.0
    bytes_of = {"operands": 32, "sts": 512} | dict.fromkeys(
        ("copied", "distinct", "dram", "stored"), 1024
    )
    rows = []
    for probe in power_probes(132, 0, lambda *_: b""):
        each = sum(
            count * true[name] * bytes_of.get(name, 1)
            for name, count in probe.events.items()
            if name in true
        )
        cycles = probe.events.get("matmul", probe.events.get("e4m3", 500.0)) or 500.0
        blocks = probe.blocks or 132
        mhz = 1980.0

        def watts(mhz: float, each=each, cycles=cycles, blocks=blocks) -> float:
            return 110 + 1e-12 * each * blocks / cycles * mhz * 1e6 * (mhz / 1980) ** 2.0

        while "products" in probe.name and watts(mhz) > 700:
            mhz -= 0.1
        rows.append(
            {
                "name": probe.name,
                "blocks": blocks,
                "events": probe.events,
                "cycles": cycles,
                "mhz": mhz,
                "watts": watts(mhz),
                "burst mhz": 1.1 * mhz,
            }
        )
    found, residuals = fit({"power": rows, "limit": 700.0})
    assert found["static"] == pytest.approx(110, rel=0.01)
    assert found["exponent"] == pytest.approx(2.0, rel=0.02)
    for name, value in true.items():
        assert found[name] == pytest.approx(value, rel=0.03), name
    assert max(map(abs, residuals.values())) < 1e-3


def test_what_is_beside_a_known_kernel_is_told_on_any_card() -> None:
    """A card that takes 4 % more for everything, and 9 W more at rest."""
    known = {"matmul": 3000.0, "operands": 10.0, "exponent": 1.8}
    near = NEAR[0].probe(lambda *_: b"", 0, 4, 0, 1024)
    of_a_kib = {"from L2": 30.0, "from L2, shared by 12": 17.0}
    share = near.events["distinct"] / near.events["copied"]
    of_a_kib[near.name] = 17.0 + 13.0 * (share + 0.4 * (1.0 - share))
    rows = [{"name": "asleep", "blocks": 132, "events": {}, "cycles": 9.0, "mhz": 1980.0}]
    for probe in power_probes(132, 0, lambda *_: b""):
        if probe.name in of_a_kib or probe.name == near.name:
            each = 1e6 * of_a_kib[probe.name] * probe.events["copied"]
            rows.append({"name": probe.name, "events": probe.events, "each": each})
        elif probe.name in ("products_256", "products_256_fp16", "products_256_e4m3"):
            kind = next(name for name in probe.events if name != "operands")
            matmul = {"matmul": 3000.0, "fp16": 3600.0, "e4m3": 2700.0}[kind]
            each = matmul * 2048 + 10.0 * 32 * probe.events["operands"]
            rows.append({"name": probe.name, "events": probe.events, "each": each})
    for row in rows:
        each = 1.04e-12 * row.get("each", 0.0) * 132 / 1e5 * 1e6
        at_most = min(1980.0, ((700.0 - 132.0) / each * 1980**1.8) ** (1 / 2.8)) if each else 1980.0
        row |= {"blocks": 132, "cycles": 1e5, "mhz": at_most}
        row["watts"] = 132.0 + each * at_most * (at_most / 1980) ** 1.8
    found = beside({"limit": 700.0, "power": rows}, known)
    assert found == pytest.approx({"fp16": 3600.0, "e4m3": 2700.0, "read_again": 0.4}, rel=1e-6)
    rows[0]["watts"] = 160.0
    assert beside({"limit": 700.0, "power": rows}, known)["fp16"] != pytest.approx(3600, rel=1e-3)
