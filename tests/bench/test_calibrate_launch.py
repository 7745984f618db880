"""The constants of whole launches: fitted from raw figures, and the fit from figures made up."""

import json
from pathlib import Path

import pytest

from bench.calibrate_launch import fit, power_probes
from warploom.machine import load

RAW = Path("bench/results/raw/launch-h200.json")


def test_the_machine_data_are_what_the_raw_figures_say() -> None:
    found, residuals = fit(json.loads(RAW.read_text()))
    machine = load("h200")
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


def test_energies_that_were_put_in_come_out() -> None:
    """Kernels of a made-up GPU: below its limit at 1980 MHz, at it at the clock that fits."""
    true = {"matmul": 4000.0, "operands": 6.0, "narrow": 3000.0, "ffma": 200.0, "ex2": 300.0}
    true |= {"fmax": 250.0, "sts": 4.0, "copied": 20.0, "distinct": 10.0, "dram": 70.0}
    true["stored"] = 40.0
    bytes_of = {"operands": 32, "sts": 512} | dict.fromkeys(
        ("copied", "distinct", "dram", "stored"), 1024
    )
    rows = []
    for probe in power_probes(132, 0):
        each = sum(
            count * true[name] * bytes_of.get(name, 1)
            for name, count in probe.events.items()
            if name in true
        )
        cycles = probe.events.get("matmul", probe.events.get("narrow", 500.0)) or 500.0
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
