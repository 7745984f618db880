"""Rows of the whole action set from what the GPU measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.evidence import Evidence, write_rows
from bench.timing_model_parts.make import BEST
from bench.triton_suite import SUITE
from bench.triton_suite.rows import Measured, search_row
from warploom.runtime import Timing

ORIGINAL = "triton"
# Where some runs began, other than at the original.
BEGAN = {
    "attention": "two runs began where the model had climbed, one (the winner) at the best that "
    "300 measurements of claim search-comparison had found",
    "feed_forward": "one run began where the model had climbed",
    "layernorm": "some runs began where the model had climbed",
    "softmax": "some runs began where the model had climbed",
}


def report(raw: Path, out: Path) -> None:
    """Write a row for each kernel's best and for its best that only reorders the original."""
    data = json.loads(raw.read_text())
    rows: list[Evidence] = []
    for name, found in data["kernels"].items():
        if "error" in found:
            print(f"{name}: {found['error']}")
            continue
        rows += [_row(data, name, found, result) for result in found["results"]]
    write_rows(out, rows)
    best: dict[str, Evidence] = {}
    for row in rows:
        kernel = row.kernel.split(" / ")[0]
        print(f"{row.kernel:38} {row.ratio_to_best:.4f} {row.ci95} control {row.control}")
        if kernel not in best or row.ratio_to_best > best[kernel].ratio_to_best:
            best[kernel] = row
    gains = [max(1.0, row.ratio_to_best) if _wins(row) else 1.0 for row in best.values()]
    if gains:
        mean = math.exp(sum(math.log(gain) for gain in gains) / len(gains))
        print(f"geometric mean of {len(gains)} kernels, no win counted as 1: {mean:.4f}")


def _wins(row: Evidence) -> bool:
    return bool(row.checks["clears_control"]) and row.checks["bitwise"] == "pass"


def _row(data: Mapping[str, Any], name: str, found: Mapping[str, Any], result: str) -> Evidence:
    kept = found["results"][result]
    moves = "orders and fields" if result == "orders only" else "every move"
    measured = sum(row["measured"] for row in found["rounds"])
    failed = sum(
        count for row in found["rounds"] for kind, count in row["outcomes"].items() if kind != "ok"
    )
    began = [BEGAN[name]] if name in BEGAN else []
    return search_row(
        SUITE[name],
        f"{data['player']}, {moves}",
        result,
        Measured(
            found["device"],
            "triton 3.6.0, ptxas 12.8",
            str(data["date"]),
            str(data["command"]),
            ORIGINAL,
            f"triton {BEST[name]}",
            *(Timing.from_json(found["timings"][mode]) for mode in ("warm", "cold")),
        ),
        {
            "bitwise": "pass" if kept["passed"] else f"fail: {kept['detail']}",
            "self_test": "pass" if "found" in kept["self_test"].values() else "fail",
            "samples": kept["samples"],
            "lineage_findings": len(kept["findings"]),
            "lineage": kept["why"],
            "best_of_the_kernel": result == found["best"],
            "programs": len({row["base"] for row in found["rounds"]}),
            "candidates_measured": measured,
            "candidates_failed": failed,
        },
        "; ".join(["the fastest of Triton's configurations", *began]),
    )
