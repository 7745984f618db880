"""One row of claim `sass-search`: warm times, the flushed ratio among the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.evidence import Evidence
from bench.triton_suite.common import SuiteKernel, shape_text
from bench.triton_suite.floors import describe_floors, floors_us
from warploom import machine
from warploom.runtime import Timing


@dataclass(frozen=True)
class Measured:
    """What a result was measured with: `device` as the runtime describes it, the base's name in
    the timings and in words, warm and flushed timings."""

    device: Mapping[str, Any]
    compiler: str
    date: str
    command: str
    base: str
    baseline: str
    warm: Timing
    cold: Timing


def search_row(
    kernel: SuiteKernel,
    label: str,
    result: str,
    found: Measured,
    checks: dict[str, Any],
    notes: str,
) -> Evidence:
    """The row of the timings' `result` on a kernel; `label` says what found it.

    Checks of time are added to `checks`, the kernel's bounds to `notes`.
    """
    warm, cold = found.warm, found.cold
    ratio, ours = warm.ratios[result], warm.median_us[result]
    return Evidence(
        claim="sass-search",
        kernel=f"{kernel.name} / {label}",
        shape=shape_text(kernel.shape),
        dtype=kernel.dtype,
        device=str(found.device["name"]),
        driver=str(found.device["driver_version"]),
        compiler=found.compiler,
        date=found.date,
        command=found.command,
        unit="us",
        better="lower",
        ours=ours,
        baselines={found.baseline: warm.median_us[found.base]},
        ratio_to_best=ratio.median,
        ci95=(ratio.low, ratio.high),
        control=(warm.control.low, warm.control.high),
        samples=ratio.rounds,
        checks={
            **checks,
            "clears_control": ratio.clears(warm.control),
            "flushed_ratio": str(cold.ratios[result]),
            "flushed_control": str(cold.control),
            "reload_medians": [round(value, 4) for value in warm.reload_medians[result]],
            "clock_mhz": warm.clock_mhz,
        },
        notes=f"{notes}; bounds: {bounds(kernel, str(found.device['name']), ours)}",
    )


def bounds(kernel: SuiteKernel, device: str, measured_us: float) -> str:
    """The floors of the kernel on a GPU in words, or that the GPU is not described."""
    name = next((known for known in machine.names() if known in device.lower()), None)
    if name is None:
        return f"unknown ({device} is not described in warploom.machine)"
    return describe_floors(floors_us(kernel, machine.load(name)), measured_us)
