"""Kernels nobody wrote: derived from a formula, compiled, run and measured beside the model.

    python -m bench.derived build            here, no GPU: derive for an H200 and compile
    python -m bench.derived run --out DIR    on the GPU machine: errors, times, ncu's DRAM bytes
    python -m bench.derived evidence FILE    model beside measurement, as evidence rows

`run` needs torch and ncu only: out/bench/derived/cases.json says what to launch. Every result is
compared with torch in float32 on the same bf16 inputs. Times are medians of CUDA events around all
programs of a derivation, warm; the counters are of one launch each with cold caches.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from warploom.codegen.compile.build import Built
from warploom.errors import CheckFailed

ROOT = Path(__file__).resolve().parent.parent

FOLDER = ROOT / "out" / "bench" / "derived"
DTYPE = "bf16"
# formula, sizes: each derived for exactly these sizes
CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("matmul", {}),
    ("attention", {"q": 8192, "x": 8192}),
    ("mha", {"h": 32, "q": 4096, "x": 4096}),
    ("gqa_decode", {}),
    ("rmsnorm_matmul", {}),
    ("mlp", {}),
    ("cross_entropy", {"m": 4096, "v": 65536}),
)
REPEATS, WARM = 20, 3
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


# --- here: derive and compile ---------------------------------------------------------------------


def build_all() -> None:
    """Derive and compile every case; cases.json says what to launch on what."""
    from warploom.derive.derive import derive_on  # noqa: PLC0415
    from warploom.derive.formula.library import formula  # noqa: PLC0415
    from warploom.derive.lower.boxes import clean  # noqa: PLC0415
    from warploom.derive.lower.tracing import part_name  # noqa: PLC0415
    from warploom.flows.derived import build_derivation  # noqa: PLC0415

    shutil.rmtree(FOLDER, ignore_errors=True)
    cases: list[dict[str, Any]] = []
    for name, sizes in CASES:
        found = derive_on(formula(name).resized(sizes), "h200", DTYPE, streams=1)
        lengths = {clean(a): n for a, n in found.diagram.sizes}
        steps: list[str] = []
        for number, made in enumerate(build_derivation(found, DTYPE)):
            for axis in made.kernel.splits:
                width = made.kernel.tile[f"w_{axis}"]
                lengths[part_name(axis)] = -(-found.diagram.size[axis] // width)
            steps.append(f"{name}/{number}")
            made.built.write(FOLDER / steps[-1])
        cases.append(
            {
                "name": name,
                "sizes": lengths,
                "steps": steps,
                "tiles": [{**k.tile} for k in found.kernels],
                "inputs": [clean(a.name) for a in found.diagram.inputs],
                "output": clean(found.diagram.outputs[0]),
                "model_seconds": found.seconds,
                "model_dram": sum(e.parts["dram"] for e in found.estimates) * 4.8e12,
                "binding": found.binding,
            }
        )
        print(f"{name:16} {len(steps)} programs, model {1e6 * found.seconds:.0f} us")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "cases.json").write_text(json.dumps(cases, indent=1))


# --- on the GPU -----------------------------------------------------------------------------------


class Case:
    """One derivation on the device: its arrays, its kernels."""

    def __init__(self, torch: Any, data: dict[str, Any]) -> None:
        self.data = data
        self.kernels = [Built.read(FOLDER / step).kernel() for step in data["steps"]]
        torch.manual_seed(0)
        self.arrays: dict[str, Any] = {}
        for kernel in self.kernels:
            for spec in kernel.built.source.arrays:
                if spec.name not in self.arrays:
                    shape = [data["sizes"][axis] for axis in spec.dims]
                    kind = torch.float32 if spec.dtype.name == "fp32" else torch.bfloat16
                    scale = shape[-1] ** -0.5 if spec.name[0] == "W" else 1.0
                    given = spec.name in data["inputs"]
                    made = torch.randn(shape, device="cuda") * scale if given else None
                    self.arrays[spec.name] = (
                        made.to(kind) if given else torch.zeros(shape, device="cuda", dtype=kind)
                    )
        self.calls = [
            (kernel, {s.name: self.arrays[s.name] for s in kernel.built.source.arrays})
            for kernel in self.kernels
        ]

    def launch(self) -> None:
        """All programs in order."""
        for kernel, arrays in self.calls:
            kernel(arrays)

    def error(self, torch: Any) -> float:
        """The largest difference from torch in float32, relative to the largest value."""
        want = reference(torch, self.data["name"], self.arrays)
        got = self.arrays[self.data["output"]].float().reshape(want.shape)
        return float((got - want).abs().max() / want.abs().max())


def reference(torch: Any, name: str, a: dict[str, Any]) -> Any:
    """The formula from its definition in torch, float32 arithmetic on the bf16 arrays: nothing here
    is read from the derivation, and every factor follows from the arrays' shapes."""
    f = {k: v.float() for k, v in a.items() if k in ("A", "B", "Q", "K", "V", "X", "G", "W", "T")}
    if name == "matmul":
        return f["A"] @ f["B"]
    if name in ("attention", "mha", "gqa_decode"):
        shared = f["Q"].dim() - f["K"].dim()  # axes of heads that keys and values do not have
        k, v = (f[one].unsqueeze(1) if shared else f[one] for one in ("K", "V"))
        scores = f["Q"] @ k.mT / math.sqrt(f["Q"].shape[-1])
        return torch.softmax(scores, -1) @ v
    if name == "rmsnorm_matmul":
        return f["X"] / f["X"].square().mean(-1, keepdim=True).sqrt() * f["G"] @ f["W"]
    if name == "mlp":
        hidden = torch.nn.functional.gelu(f["X"] @ a["W1"].float(), approximate="tanh")
        return hidden @ a["W2"].float()
    if name == "cross_entropy":
        lse = torch.logsumexp(f["X"] @ f["W"].mT, -1)
        return lse - (f["X"] * f["T"]).sum(-1)
    raise CheckFailed(f"no reference for {name}")


def worker(out: Path, profiled: bool) -> None:
    """Run every case; profiled: one launch each and nothing else."""
    torch = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[dict[str, Any]] = []
    for data in json.loads((FOLDER / "cases.json").read_text()):
        try:
            results.append(_one(torch, data, profiled))
        except Exception as error:
            results.append({**data, "fault": f"{type(error).__name__}: {error}"[:300]})
        torch.cuda.empty_cache()
        out.write_text(json.dumps(results, indent=0))


def _one(torch: Any, data: dict[str, Any], profiled: bool) -> dict[str, Any]:
    case = Case(torch, data)
    case.launch()
    torch.cuda.synchronize()
    if profiled:
        return data
    error = case.error(torch)
    times = [kb.timed(torch, case.launch, 1) * 1e-3 for _ in range(WARM + REPEATS)][WARM:]
    shown = f"{1e6 * statistics.median(times):9.1f} us, model {1e6 * data['model_seconds']:9.1f}"
    print(f"{data['name']:16} error {error:.1e}  {shown}", flush=True)
    return {**data, "error": error, "seconds": sorted(times)}


def run(out: Path) -> None:
    """Errors and times, then the counters of the same launches; written as they come."""
    out.mkdir(parents=True, exist_ok=True)
    torch = importlib.import_module("torch")
    worker(out / "results.json", profiled=False)
    text: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": time.strftime("%F")}
    text["cases"] = json.loads((out / "results.json").read_text())
    (out / "derived.json").write_text(json.dumps(text, indent=0))
    tool = shutil.which("ncu")
    if tool is None:
        print("no ncu here: no counters")
        return
    command = [tool, "--cache-control", "all", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:^region_.*$"]
    command += [sys.executable, "-m", "bench.derived", "worker"]
    done = subprocess.run(
        [*command, "--out", str(out)], check=False, capture_output=True, text=True
    )
    (out / "ncu.csv").write_text(done.stdout[-200_000:])
    text["counters"] = counted(done.stdout, text["cases"])
    (out / "derived.json").write_text(json.dumps(text, indent=0))
    for name, moved in text["counters"].items():
        print(f"{name:16} dram {moved / 1e6:9.1f} MB")


def counted(log: str, cases: list[dict[str, Any]]) -> dict[str, float]:
    """DRAM bytes of each case, its programs together; rows are in launch order."""
    rows = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        return {}
    head, body = rows[0], rows[2:]
    found: dict[str, float] = {}
    wanted = [data["name"] for data in cases for _ in data["steps"] if "fault" not in data]
    if len(wanted) != len(body):
        raise CheckFailed(f"{len(body)} kernels were profiled, {len(wanted)} launched")
    for name, cells in zip(wanted, body, strict=True):
        moved = sum(float(cells[head.index(m)].replace(",", "")) for m in METRICS)
        found[name] = found.get(name, 0.0) + moved
    return found


# --- here again -----------------------------------------------------------------------------------


def rows_of(path: Path) -> list[Evidence]:
    """An evidence row a case: measured seconds beside the model's."""
    data = json.loads(path.read_text())
    made: list[Evidence] = []
    for case in data["cases"]:
        if "fault" in case:
            print(f"{case['name']}: {case['fault']}")
            continue
        seconds = statistics.median(case["seconds"])
        moved = data.get("counters", {}).get(case["name"])
        checks: dict[str, Any] = {
            "error": case["error"],
            "correct": "pass" if case["error"] < 2e-2 else "fail",
            "programs": len(case["steps"]),
        }
        if moved is not None:
            checks |= {"dram_bytes": moved, "dram_bytes_model": round(case["model_dram"])}
        sizes = " ".join(f"{axis}={n}" for axis, n in case["sizes"].items() if "_parts" not in axis)
        tiles = "; ".join(",".join(f"{s}={t}" for s, t in tiles.items()) for tiles in case["tiles"])
        made.append(
            Evidence(
                "derive-gpu",
                case["name"],
                sizes,
                DTYPE,
                data["device"],
                "",
                "",
                data["date"],
                "python -m bench.derived run",
                "us",
                "lower",
                1e6 * seconds,
                {"time model": 1e6 * case["model_seconds"]},
                case["model_seconds"] / seconds,
                samples=len(case["seconds"]),
                checks=checks,
                notes=f"found, compiled and run: {tiles}; model: {case['binding']} binds",
            )
        )
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("build", "run", "worker", "evidence"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/results")))
    options = parser.parse_args()
    if options.mode == "build":
        build_all()
    elif options.mode == "run":
        run(options.out)
    elif options.mode == "worker":
        worker(options.out / "profiled.json", profiled=True)
    else:
        rows = rows_of(options.path)
        write_rows(ROOT / "bench" / "results" / "derive-gpu.json", rows)
        for row in rows:
            print(f"{row.kernel:16} {row.ours:9.1f} us, {row.baselines}, {row.checks}")


if __name__ == "__main__":
    main()
