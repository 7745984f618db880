"""Claim `build-latency`: seconds from a kernel's trace to its cubin, on a CPU.

    nice -n -10 python -m bench.build_latency --rounds 7 --out bench/results/build_latency.json

Each sample is a process of its own with an empty cache: tracing, the schedule (for `solve` with the
import of OR-Tools), code and compiler; then the same build again, which the cache answers. `solve`
compiles several answers and replays them (`autosched.chosen`); `solve+first` is the solver's first
one, as it is. Wall time is the claim; processor time of the process and its children stands beside
it, since it is what an idle machine would show. `solve` may use both processors of the machine.

    python -m bench.build_latency --search normal --rounds 1 --out bench/results/search_latency.json

Searches of textbooks without a GPU and with an empty cache: until the first usable kernel, until
their end, and the same search again, which the store answers. A search ends with its seconds:
`points` is what it came to, on a loaded machine less.
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
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.evidence import Evidence, write_rows
from warploom.autosched.schedules import Policy, compiled
from warploom.engine.search import compiler

TARGETS = {"cold": 3.0, "cached": 0.05}  # seconds
SEARCHED = {"first": 15.0, "whole": 180.0, "stored": 0.05}  # of a search
SEARCHED_TOLD = ("first usable kernel", "whole", "from the store")
WORKER = 3  # processes from a search's own over the fork server to a worker
TEXTBOOKS = ("attention 128 causal 4x16x4096", "gemm 4096x4096x4096")
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


def searched(title: str, effort: str) -> dict[str, object]:
    """A search from nothing, in this process and its workers, and the same one from its store."""
    from bench.engine import cases  # noqa: PLC0415
    from warploom.engine.search import search  # noqa: PLC0415
    from warploom.engine.store import PointStore  # noqa: PLC0415
    from warploom.files import cache_folder  # noqa: PLC0415

    case = cases(0, [title])[title]
    begin, first = time.perf_counter(), list[float]()
    found: dict[str, object] = {}
    with closing(PointStore(cache_folder() / "points.sqlite")) as store, Watch() as watch:
        explored = search(
            case.space,
            case.sizes,
            "h200",
            store,
            effort,
            lambda _: first.append(time.perf_counter() - begin) or watch.look(),
        )
        found |= {"whole": time.perf_counter() - begin, "first": first[0]}
    found |= {"first processor": watch.seen[0], "whole processor": watch.seen[-1]}
    found |= {"points": len(explored.found), "compiler": compiler()}
    begin, before = time.perf_counter(), time.process_time()
    with closing(PointStore(cache_folder() / "points.sqlite")) as store:
        again = search(case.space, case.sizes, "h200", store, effort)
    found["stored"] = time.perf_counter() - begin
    found["stored processor"] = time.process_time() - before
    assert again.known == len(again.found) == len(explored.found)
    return found


class Watch:
    """Processor seconds of this process and all below it, from its first look on: the kernel adds
    up no worker of a fork server."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._over = threading.Event()
        self._last: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        """Begin; what this process took until now does not count."""
        self._before = time.process_time()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End with a last look."""
        self._over.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self._sample()

    def look(self) -> None:
        """Note what they have taken by now."""
        self._sample()
        self.seen.append(sum(self._last.values()) - self._before)

    def _sample(self) -> None:
        parents: dict[int, int] = {}
        ticks: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            one = int(stat.parent.name)
            parents[one] = int(fields[1])
            ticks[one] = [int(field) for field in fields[11:15]]
        for one, (user, system, *children) in ticks.items():
            above = [one]
            while above[-1] in parents and above[-1] != os.getpid():
                above.append(parents[above[-1]])
            if above[-1] == os.getpid() and len(above) <= WORKER:
                # A worker's tools are counted with it, a worker by itself: its server adds it up
                # once more when it ends.
                used = user + system + (sum(children) if len(above) == WORKER else 0)
                self._last[one] = used / os.sysconf("SC_CLK_TCK")


def search_rows(title: str, effort: str, samples: list[dict[str, Any]]) -> list[Evidence]:
    """The rows of a search: until its first kernel, whole, and from the store."""
    return [
        replace(
            row,
            kernel=f"textbook {title.split(maxsplit=1)[0]} search: {told}",
            shape=title.partition(" ")[2],
            command=f"python -m bench.build_latency --search {effort} --rounds {len(samples)}",
            checks={**row.checks, "effort": effort, "points": samples[0]["points"]},
        )
        for row, told in zip(_rows(title, samples, SEARCHED), SEARCHED_TOLD, strict=True)
    ]


def _processor() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _run(case: str, *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench.build_latency", "--sample", case, *words],
            env={**os.environ, "WARPLOOM_CACHE": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


def _rows(
    case: str, samples: list[dict[str, Any]], targets: Mapping[str, float] = TARGETS
) -> list[Evidence]:
    kernel, schedule = case.split()[:2]
    rows: list[Evidence] = []
    for name, target in targets.items():
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
    parser.add_argument("--search", default="", help="EFFORT: searches of textbooks, not builds")
    args = parser.parse_args()
    if args.sample and args.search:
        print(json.dumps(searched(args.sample, args.search)))
        return
    if args.sample:
        print(json.dumps(sample(*args.sample.split())))
        return
    if args.search:
        found = {
            t: [_run(t, "--search", args.search) for _ in range(args.rounds)] for t in TEXTBOOKS
        }
        rows = [row for title in TEXTBOOKS for row in search_rows(title, args.search, found[title])]
    else:
        samples: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
        for _ in range(args.rounds):
            for case in CASES:
                samples[case].append(_run(case))
        rows = [row for case in CASES for row in _rows(case, samples[case])]
    write_rows(args.out, rows)
    for row in rows:
        print(
            f"{row.kernel:42} {row.ours:8.3f} s  least {row.checks['least']:8.3f}  "
            f"processor {row.checks['processor time']:7.3f}  target {row.baselines['target']}"
        )


if __name__ == "__main__":
    main()
