"""Claim `build-latency`: seconds from a kernel's trace to its cubin, on a CPU.

    nice -n -10 python -m bench.build_latency --rounds 7 --out bench/results/build_latency.json

Each sample is a process of its own with an empty cache: tracing, the schedule (for `solve` with the
import of OR-Tools), code and compiler; then the same build again, which the cache answers. `solve`
compiles several answers and replays them (`autosched.chosen`); `solve+first` is the solver's first
one, as it is. Wall time is the claim; processor time of the process and its children stands beside
it, since it is what an idle machine would show. `solve` may use both processors of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from warploom.autosched.schedules import Policy, compiled
from warploom.evidence import Evidence, write_rows

TARGETS = {"cold": 3.0, "cached": 0.05}  # seconds
FIRST = "solve+first"
CASES = (
    "attention pingpong",
    "attention solve",
    f"attention {FIRST}",
    "gemm inflight",
    "gemm solve",
)


def sample(kernel: str, schedule: str) -> dict[str, object]:
    """One cold build and one from the cache, in this process."""
    from warploom.autosched.solve import Search  # noqa: PLC0415
    from warploom.kernels.library import entry  # noqa: PLC0415

    known = entry(kernel)
    config = known.config()
    plan = known.policy(config).launch
    found: dict[str, object] = {}
    for name in TARGETS:
        begin, before = time.perf_counter(), _processor()
        program = known.program(config)
        policy, search = ("solve", Search()) if schedule == FIRST else (schedule, None)
        built = compiled(program, Policy(policy, plan, search=search))
        found[name] = time.perf_counter() - begin
        found[f"{name} processor"] = _processor() - before
        found["compiler"] = built.resources.compiler
    return found


def _processor() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _run(case: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench.build_latency", "--sample", case],
            env={**os.environ, "WARPLOOM_CACHE": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


def _rows(case: str, samples: list[dict[str, float]]) -> list[Evidence]:
    kernel, schedule = case.split()
    rows: list[Evidence] = []
    for name, target in TARGETS.items():
        times = sorted(float(one[name]) for one in samples)
        middle = statistics.median(times)
        rows.append(
            Evidence(
                "build-latency",
                f"{kernel} {schedule} {name}",
                "default",
                "bf16",
                f"{_processor_name()}, {os.cpu_count()} processors",
                "",
                str(samples[0]["compiler"]),
                time.strftime("%Y-%m-%d"),
                "nice -n -10 python -m bench.build_latency",
                "s",
                "lower",
                round(middle, 4),
                {"target": target},
                round(target / middle, 4),
                (round(target / times[-1], 4), round(target / times[0], 4)),
                None,
                len(times),
                {
                    "processor time": round(
                        statistics.median(float(one[f"{name} processor"]) for one in samples), 3
                    ),
                    "least": round(times[0], 4),
                    "load": round(os.getloadavg()[0], 1),
                },
                "ci95: of the slowest and the fastest sample",
            )
        )
    return rows


def _processor_name() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build_latency.json"))
    parser.add_argument("--sample", default="", help="KERNEL SCHEDULE: one sample, as JSON")
    args = parser.parse_args()
    if args.sample:
        print(json.dumps(sample(*args.sample.split())))
        return
    samples: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case in CASES:
            samples[case].append(_run(case))
    rows = [row for case in CASES for row in _rows(case, samples[case])]
    write_rows(args.out, rows)
    for row in rows:
        print(
            f"{row.kernel:28} {row.ours:8.3f} s  least {row.checks['least']:8.3f}  "
            f"processor {row.checks['processor time']:7.3f}  target {row.baselines['target']}"
        )


if __name__ == "__main__":
    main()
