"""Set the model beside the measured times: rank correlations, their ceiling, what is held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.evidence import Evidence, write_rows
from bench.stored_schedules import ScheduleSet
from bench.timing_model_parts.make import BEST, TRIPS
from warploom.sass.decode.control import CONTROL_SHIFT, Control
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.timing.timing_model import Blocks, ModelSettings, TimingModel

CLAIM = "timing-model"
RESAMPLES = 1000
# Kernels whose even-numbered schedules were looked at while the model was made.
LOOKED_AT = ("attention", "feed_forward", "softmax", "layernorm", "gemm_leaky_relu")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """One kernel: measured times (original = 1), and what the model and plain stalls say."""

    first: Floats
    second: Floats
    model: Floats
    stalls: Floats
    steps: Floats

    @property
    def measured(self) -> Floats:
        """Mean time of both passes."""
        return 2.0 / (self.first + self.second)


def report(
    folder: Path, raw: Mapping[str, Any], kernels: tuple[str, ...], out: Path, command: str
) -> None:
    """Write a row for each kernel and print a table."""
    rows: list[Evidence] = []
    print(f"{'kernel':18} passes ceiling  stalls  model [95 %]          even    odd")
    for name in kernels:
        schedules = ScheduleSet.load(folder / f"{name}.xz")
        passes = raw["kernels"][name]
        ranks = predicted(schedules, name, passes)
        row = _row(name, schedules, ranks, raw, command)
        rows.append(row)
        checks = row.checks
        low, high = checks["interval_of_ours"]
        print(
            f"{name:18} {checks['between_passes']:6.3f} {row.baselines['ceiling']:7.3f} "
            f"{checks['stalls_alone']:7.3f} {row.ours:6.3f} [{low:.3f}, {high:.3f}]  "
            f"{checks['even_schedules']:6.3f} {checks['odd_schedules']:6.3f}"
        )
    write_rows(out, rows)


def predicted(schedules: ScheduleSet, name: str, passes: list[dict[str, Any]]) -> Ranks:
    """Times and predictions of the schedules that ran in both passes."""
    kernel = decode(parse(schedules.cubin, name), schedules.kernel)
    model = TimingModel(kernel, ModelSettings(loop_trips=TRIPS[name]))
    weights = [float(TRIPS[name]) ** level for level in depths(kernel, natural_loops(kernel))]
    first, second = (np.array(one["speedups"], float) for one in passes)
    right = np.flatnonzero(np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0))
    cycles, stalls = np.empty(len(right)), np.empty(len(right))
    for place, number in enumerate(right.tolist()):
        blocks = _blocks(kernel, schedules, number)
        cycles[place] = model.kernel_cycles(blocks)
        stalls[place] = sum(
            weight * sum(control.stall for control in controls)
            for weight, (_, controls) in zip(weights, blocks, strict=True)
        )
    return Ranks(first[right], second[right], cycles, stalls, schedules.steps[right].astype(float))


def _blocks(kernel: Kernel, schedules: ScheduleSet, number: int) -> Blocks:
    order, fields = schedules.orders[number], schedules.fields[number]
    return [
        (
            tuple(order[block.start : block.end].tolist()),
            tuple(
                Control.decode(field << CONTROL_SHIFT)
                for field in fields[block.start : block.end].tolist()
            ),
        )
        for block in kernel.blocks
    ]


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation, ties given their mean rank; 0 when one side does not vary."""
    first, second = _ranked(one), _ranked(other)
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranked(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def ceiling(between: float) -> float:
    """The most a perfect model could reach against the mean of two passes that agree so well.

    Spearman-Brown: the mean of two noisy copies is reliable to 2 r / (1 + r), and a correlation
    with the truth is at most the root of that.
    """
    return float(np.sqrt(2 * between / (1 + between))) if between > 0 else 0.0


def _row(
    name: str, schedules: ScheduleSet, ranks: Ranks, raw: Mapping[str, Any], command: str
) -> Evidence:
    measured, model = ranks.measured, ranks.model
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(model), len(model)) for _ in range(RESAMPLES)]
    low, high = np.quantile(
        [spearman(model[draw], measured[draw]) for draw in draws], (0.025, 0.975)
    )
    between = spearman(ranks.first, ranks.second)
    rho, limit = spearman(model, measured), ceiling(between)
    device = raw["device"]
    return Evidence(
        claim=CLAIM,
        kernel=name,
        shape=BEST[name],
        dtype="fp16",
        device=str(device["name"]),
        driver=str(device["driver_version"]),
        compiler=str(schedules.about.get("compiler", "triton 3.6.0")),
        date=str(raw["date"]),
        command=command,
        unit="Spearman rank correlation",
        better="higher",
        ours=round(rho, 4),
        baselines={"ceiling": round(limit, 4)},
        ratio_to_best=round(rho / limit, 4) if limit else 0.0,
        ci95=(round(float(low) / limit, 4), round(float(high) / limit, 4)) if limit else None,
        samples=len(model),
        checks={
            "interval_of_ours": [round(float(low), 4), round(float(high), 4)],
            "between_passes": round(between, 4),
            "even_schedules": round(spearman(model[::2], measured[::2]), 4),
            "odd_schedules": round(spearman(model[1::2], measured[1::2]), 4),
            "stalls_alone": round(spearman(ranks.stalls, measured), 4),
            "steps_of_the_walk": round(spearman(ranks.steps, measured), 4),
            "measured_range": [round(float(v), 4) for v in np.quantile(1 / measured, (0.01, 0.99))],
            "loop_trips": TRIPS[name],
            "at_least_0.7": "pass" if rho >= 0.7 else f"fail: {rho:.3f}",
        },
        notes=(
            "even-numbered schedules were looked at while the model was made"
            if name in LOOKED_AT
            else "held out: not looked at while the model was made"
        ),
    )
