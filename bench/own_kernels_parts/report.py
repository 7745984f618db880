"""Rows of claim `own-kernels` from what the GPU measured."""

from __future__ import annotations

import base64
import json
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.evidence import Evidence, write_rows
from bench.own_kernels_parts.cases import CASES, Case
from warploom.integrations.deploy import FolderStore
from warploom.runtime import Timing
from warploom.runtime.stats import median_interval

ORIGINAL = "triton"  # the name of the untouched cubin in the raw data
BASELINE = "warploom, as ptxas left it"
COMPILED, TUNED, CONTROL = BASELINE, "tuned", "control"


def report(raws: Sequence[Path], out: Path) -> None:
    """Write a row for each kernel and shape, of later files before earlier ones; losses are rows
    like others. Files are those of `run` and of `beside`."""
    kept: dict[tuple[str, str], Evidence] = {}
    compilers: dict[str, Any] = {}  # by case; the first files of `beside` do not say
    for raw in raws:
        data = json.loads(raw.read_text())
        if "shapes" in data:
            for sizes in data["shapes"]:
                compilers.setdefault(data["case"], data.get("compiler"))
                row = _beside(data, CASES[data["case"]], sizes, compilers[data["case"]])
                kept[row.kernel, row.shape] = row
            continue
        for name, found in data["cases"].items():
            if "error" in found or "timings" not in found:
                print(f"{name}: {found.get('error', 'not measured')}")
                continue
            compilers[name] = found["compiler"]
            for sizes in found["timings"]:
                row = _row(data, CASES[name], found, sizes)
                kept[row.kernel, row.shape] = row
    rows = sorted(kept.values(), key=lambda row: (row.kernel, row.ours))
    write_rows(out, rows)
    for row in rows:
        print(f"{row.kernel:52} {row.shape:24} {row.ratio_to_best:.4f} {row.ci95} {row.control}")


def deploy(raws: Sequence[Path], data: Path, store: Path) -> None:
    """Put what gained at every shape into a store that `warploom.install` takes.

    Of several runs of a case the best counts. Originals are those of `data`; a key is a hash of the
    code, not of debug sections.
    """
    best: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for raw in raws:
        for name, found in json.loads(raw.read_text()).get("cases", {}).items():
            if not found.get("timings") or not (found["passed"] and found["legal"]):
                continue
            timings = [Timing.from_json(timing) for timing in found["timings"].values()]
            if all(one.ratios[TUNED].clears(one.control) for one in timings):
                least = min(one.ratios[TUNED].median for one in timings)
                if least > 1.0 and least > best.get(name, (0.0, found))[0]:
                    best[name] = least, found
    for name, (least, found) in best.items():
        original = (data / name / "original.cubin").read_bytes()
        tuned = zlib.decompress(base64.b64decode(found["tuned"]["cubin"]))
        kernel = CASES[name].kernel
        result = {"case": name, "least_speedup": round(least, 4), "lineage": found.get("lineage")}
        key = FolderStore(store).put(original, tuned, kernel, "sm_90a", result=result)
        print(f"{name}: {least:.4f} at least -> {store / key}")


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


def _beside(data: Mapping[str, Any], case: Case, sizes: str, compiler: str) -> Evidence:
    """A tuned kernel beside the libraries, the best of which is the baseline that counts.

    Samples are milliseconds.
    """
    found = data["shapes"][sizes]
    samples: Mapping[str, list[float]] = found["samples"]
    rates = {
        name: found["work"] / statistics.median(times) * 1e-9 for name, times in samples.items()
    }
    libraries = [name for name in samples if name not in (TUNED, CONTROL, COMPILED)]
    best = max(libraries, key=lambda name: rates[name])
    ratio, low, high = median_interval(samples[TUNED], samples[best])
    _, least, most = median_interval(samples[COMPILED], samples[CONTROL])
    over, *interval = median_interval(samples[TUNED], samples[COMPILED])
    before, *_ = median_interval(samples[COMPILED], samples[best])
    return Evidence(
        claim="own-kernels",
        kernel=f"{case.kernel} {case.about}, {case.variant}, beside the libraries",
        shape=_shape(case, json.loads(sizes)),
        dtype="bf16",
        device=str(data["device"]),
        driver=str(data["driver"]),
        compiler=compiler,
        date=str(data["date"]),
        command="python -m bench.own_kernels beside",
        unit="TFLOP/s",
        better="higher",
        ours=rates[TUNED],
        baselines={name: rates[name] for name in libraries},
        ratio_to_best=ratio,
        ci95=(low, high),
        control=(least, most),
        samples=len(samples[TUNED]),
        checks={
            "float64": found["checks"][TUNED],
            "against": best,
            "compiled": round(rates[COMPILED], 2),
            "compiled_against_it": round(before, 4),
            "over_compiled": f"{over:.4f} [{interval[0]:.4f}, {interval[1]:.4f}]",
        },
        notes="interleaved in one process; the ratio is to the best library",
    )
