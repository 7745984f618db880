"""Rows of claim `own-kernels` from what the GPU measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from own_kernels_parts.cases import CASES, Case
from warploom.evidence import Evidence, write_rows
from warploom.runtime import Timing

ORIGINAL = "triton"  # the name of the untouched cubin in the raw data
BASELINE = "warploom, as ptxas left it"


def report(raws: Sequence[Path], out: Path) -> None:
    """Write a row for each kernel and shape, of later files before earlier ones; losses are rows
    like others."""
    kept: dict[tuple[str, str], Evidence] = {}
    for raw in raws:
        data = json.loads(raw.read_text())
        for name, found in data["cases"].items():
            if "error" in found or "timings" not in found:
                print(f"{name}: {found.get('error', 'not measured')}")
                continue
            for sizes in found["timings"]:
                row = _row(data, CASES[name], found, sizes)
                kept[row.kernel, row.shape] = row
    rows = list(kept.values())
    write_rows(out, rows)
    for row in rows:
        print(f"{row.kernel:52} {row.shape:24} {row.ratio_to_best:.4f} {row.ci95} {row.control}")


def _shape(case: Case, sizes: Mapping[str, int]) -> str:
    if case.kernel == "gemm":
        return " x ".join(str(sizes[axis]) for axis in "mnk")
    return f"{sizes['batch']} x {sizes['heads']} x {sizes['rows']} x {sizes['d']}"


def _row(data: Mapping[str, Any], case: Case, found: Mapping[str, Any], sizes: str) -> Evidence:
    timing = Timing.from_json(found["timings"][sizes])
    ratio, ours = timing.ratios["tuned"], timing.median_us["tuned"]
    outcomes = [entry["outcomes"] for entry in found["rounds"]]
    failed = sum(n for row in outcomes for kind, n in row.items() if kind != "ok")
    winner = max(found["rounds"], key=lambda entry: entry["score"])
    return Evidence(
        claim="own-kernels",
        kernel=f"{case.kernel} {case.about}, {case.variant}",
        shape=_shape(case, json.loads(sizes)),
        dtype="bf16",
        device=str(found["device"]["name"]),
        driver=str(found["device"]["driver_version"]),
        compiler=str(found["compiler"]),
        date=str(data["date"]),
        command=str(data["command"]),
        unit="us",
        better="lower",
        ours=ours,
        baselines={BASELINE: timing.median_us[ORIGINAL]},
        ratio_to_best=ratio.median,
        ci95=(ratio.low, ratio.high),
        control=(timing.control.low, timing.control.high),
        samples=ratio.rounds,
        checks={
            "bitwise": "pass" if found["passed"] else f"fail: {found['detail']}",
            "self_test": "pass" if "found" in found["self_test"].values() else "fail",
            "samples": found["samples"],
            "verdict": found["verdict"],
            "lineage": found.get("lineage", ["another order and other control fields"]),
            "clears_control": ratio.clears(timing.control),
            "reload_medians": [round(value, 4) for value in timing.reload_medians["tuned"]],
            "candidates_measured": sum(entry["measured"] for entry in found["rounds"]),
            "candidates_failed": failed,
            "highest_score_by": winner["player"],
            "clock_mhz": timing.clock_mhz,
        },
        notes=f"tile program, schedule, CUDA C++ and ptxas are warploom's; searched for "
        f"{max(entry['seconds'] for entry in found['rounds']):.0f} s by "
        f"{len(found['rounds'])} players at once",
    )
