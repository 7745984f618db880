"""What the kernel benchmarks share: worker processes with a watchdog, interleaved timing, rows.

A case runs in a worker process; when a worker says nothing for a while it is killed, the case is
reported as hung and the next one gets a fresh worker. Timing interleaves every candidate in one
process, each round in a new random order, with a second copy of the baseline as A/A control.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import queue
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.evidence import Evidence, read_rows, write_rows

ROOT = Path(__file__).resolve().parent.parent

# Seconds without a word before a worker counts as hung: FlashAttention-4 compiles on first use.
SILENCE = 75.0


def arguments(description: str) -> argparse.Namespace:
    """The command line every kernel benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("mode", choices=("build", "run", "worker", "merge"))
    parser.add_argument("files", nargs="*", type=Path, help="merge: evidence files of runs")
    parser.add_argument("--fresh", action="store_true", help="merge: forget the rows there are")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/results")))
    parser.add_argument("--only", default="", help="run cases that contain one of these")
    parser.add_argument("--stage", default="all", choices=("all", "numerics", "timing"))
    parser.add_argument("--rounds", type=int, default=12)
    return parser.parse_args()


def load_torch() -> Any:
    """torch with its attention backends; imported where a GPU is, not where kernels are built."""
    importlib.import_module("torch.nn.attention.varlen")
    return importlib.import_module("torch")


def command_line() -> str:
    """What this process was started with, for the rows it writes."""
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts
    return shlex.join(["python", "-m", ".".join(module), *sys.argv[1:]])


def run_workers(
    module: str,
    args: argparse.Namespace,
    names: Sequence[str],
    kept: str = "cases.jsonl",
    options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run every case in worker processes; one result a case, with "error" if it hung.

    Results are kept in `args.out/KEPT` as they come: a run that is cut short has them. `options`
    go to the workers.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    left = list(names)
    while left:
        line: dict[str, Any] = {}
        for line in _worker(module, args, left, options):
            results[line["name"]] = line
            left.remove(line["name"])
            print(json.dumps(line)[:1500], flush=True)
            with (args.out / kept).open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        # A worker stops after reporting a device fault; one that said nothing hung on the next.
        if left and "error" not in line:
            culprit = left.pop(0)
            results[culprit] = {"name": culprit, "error": "hung or crashed; worker killed"}
            print(json.dumps(results[culprit]), flush=True)
    return [results[name] for name in names]


def _worker(
    module: str, args: argparse.Namespace, names: Sequence[str], options: Sequence[str]
) -> Iterator[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        module,
        "worker",
        "--rounds",
        str(args.rounds),
        *options,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(list(names)) + "\n")
        process.stdin.close()
        lines: queue.Queue[str | None] = queue.Queue()
        stdout = process.stdout
        threading.Thread(
            target=lambda: ([lines.put(x) for x in stdout], lines.put(None)), daemon=True
        ).start()
        while True:
            try:
                line = lines.get(timeout=SILENCE)
            except queue.Empty:
                process.kill()
                return
            if line is None:
                return
            if line.startswith("{"):
                yield json.loads(line)


def work(case: Callable[[str, int], dict[str, Any]], args: argparse.Namespace) -> None:
    """A worker: run the cases named on standard input, one JSON line each; stop at a fault."""
    for name in json.loads(sys.stdin.readline()):
        try:
            result = {"name": name, **case(name, args.rounds)}
        except Exception as error:  # a fault on the device poisons this process's context
            print(
                json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:400]}),
                flush=True,
            )
            if "CUDA" in str(error) or "cu" in str(error)[:3]:
                return
            continue
        print(json.dumps(result), flush=True)


def interleave(
    candidates: Mapping[str, Callable[[], None]], rounds: int, seconds: float = 0.006
) -> dict[str, list[float]]:
    """Milliseconds a call of each candidate, one sample a round, order shuffled in every round.

    Calls are captured into CUDA graphs of about `seconds`, so that what the host does is not timed.
    At its power limit a GPU's clock takes tens of milliseconds to follow a change of kernel: short
    samples find neighbours in a round under one clock, and so their ratio in cycles.
    """
    torch = load_torch()

    graphs: dict[str, tuple[Any, int]] = {}
    for name, call in candidates.items():
        for _ in range(3):
            call()
        repeats = min(200, max(1, int(seconds * 1e3 / timed(torch, call, 3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graphs[name] = graph, repeats
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0)
    for number in range(rounds + 2):
        shuffle.shuffle(order)
        for name in order:
            graph, repeats = graphs[name]
            taken = timed(torch, graph.replay, 1) / repeats
            if number >= 2:
                samples[name].append(taken)
    return samples


def timed(torch: Any, call: Callable[[], None], repeats: int) -> float:
    """Milliseconds a call, of so many in a row."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def ratio_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Median of other/ours a round and its 95 % interval; > 1 means ours is faster.

    The interval lies between two of the sorted ratios, as many places from both ends as leave the
    true median outside in at most 5 % of runs whatever the ratios' distribution; so it needs six
    rounds. (Percentiles of resampled medians cover 88 % with seven.)
    """
    ratios = sorted(b / a for a, b in zip(ours, other, strict=True))
    count = len(ratios)
    outside, place = 2.0 ** (1 - count), 0
    if outside > 0.05:
        raise InputError(f"a 95 % interval of {count} rounds: expected at least 6")
    while True:
        more = outside + 2 * math.comb(count, place + 1) * 0.5**count
        if more > 0.05:
            return statistics.median(ratios), ratios[place], ratios[-1 - place]
        outside, place = more, place + 1


def slug(name: str) -> str:
    """A variant's name as a folder's."""
    return name.replace(" ", "-")


def merge(target: Path, files: Sequence[Path], fresh: bool = False, only: str = "") -> None:
    """Put the rows of some runs into `target`: a row replaces the one of its kernel and shape.

    `only`: the rows whose claim contains this.
    """
    rows: dict[tuple[str, str, str, str], Evidence] = {}
    for path in [*([] if fresh or not target.is_file() else [target]), *files]:
        for row in (r for r in read_rows(path) if path == target or only in r.claim):
            rows[(row.claim, row.kernel, row.shape, row.dtype)] = row
    write_rows(target, rows.values())
    print(f"{len(rows)} rows in {target}")


def report(
    out: Path, claim: str, results: list[dict[str, Any]], built: Callable[[str], Any]
) -> None:
    """Raw results, evidence rows and two tables of a run.

    A timed result has `shape`, `dtype`, `work` (operations), `samples` (milliseconds by name, a
    second copy of the first baseline as "control"), `baselines`, `checks` and `default` (the
    variant that stood for "default"). Ratios are to the baseline that was fastest there.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{slug(claim)}_raw.json").write_text(json.dumps(results, indent=1))
    env = environment()
    rows: list[list[object]] = [["shape", "type", "kernel", "TFLOP/s", "ratio", "95 %", "check"]]
    evidence: list[Evidence] = []
    for result in results:
        if "samples" not in result:
            continue
        samples, work = result["samples"], result["work"] * 1e-9
        rates = {n: work / statistics.median(samples[n]) for n in result["baselines"]}
        best = max(rates, key=lambda name: rates[name])
        _, low, high = ratio_interval(samples["control"], samples[result["baselines"][0]])
        for name, ms in samples.items():
            ratio, lo, hi = ratio_interval(ms, samples[best])
            rate, check = work / statistics.median(ms), result["checks"].get(name, "")
            shown = f"{name} = {result['default']}" if name == "default" else name
            interval = f"{lo:.3f}..{hi:.3f}"
            rows.append([result["shape"], result["dtype"], shown, rate, ratio, interval, check])
            if name in rates or name == "control":
                continue
            which = result["default"] if name == "default" else name
            evidence.append(
                Evidence(
                    claim,
                    f"{claim} {name}",
                    result["shape"],
                    result["dtype"],
                    env["device"],
                    env["driver"],
                    built(which).resources.compiler,
                    env["date"],
                    command_line(),
                    "TFLOP/s",
                    "higher",
                    rate,
                    rates,
                    ratio,
                    (lo, hi),
                    (low, high),
                    len(ms),
                    {"numerics": check},
                    f"torch {env['torch']}; {which}",
                )
            )
    write_rows(out / f"{slug(claim)}.json", evidence)
    print(json.dumps(env))
    checks = [r for r in results if "ok" in r or "error" in r]
    states = [[r["name"], r.get("ok", "FAIL"), r.get("worst", r.get("error", ""))] for r in checks]
    print(table([["case", "ok", "worst error"], *states]))
    print(table(rows))


def environment() -> dict[str, str]:
    """Device, driver, versions and date of this run."""
    torch = load_torch()

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": driver,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text."""
    texts = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in texts
    )
