"""What the kernel benchmarks share: worker processes with a watchdog, interleaved timing, rows.

A case runs in a worker process; when a worker says nothing for a while it is killed, the case is
reported as hung and the next one gets a fresh worker. Timing interleaves every candidate in one
process, each round in a new random order, with a second copy of the baseline as A/A control.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.evidence import Evidence, read_rows, write_rows
from warploom.errors import WarploomError
from warploom.runtime.driver import kernel_driver_version
from warploom.runtime.stats import median_interval
from warploom.runtime.worker import Caller, Worker

ROOT = Path(__file__).resolve().parent.parent

# Seconds without a word before a worker counts as hung: FlashAttention-4 compiles on first use.
SILENCE = 75.0
Case = Callable[[str, int], dict[str, Any]]


T = TypeVar("T")


def in_shuffled_rounds(
    samplers: Mapping[str, Callable[[], T]], count: int, seed: int = 0, warm: int = 2
) -> dict[str, list[T]]:
    """`count` samples of each, one a round, in a new random order every round.

    `warm` rounds before them do not count. For what is timed by other means than launches of ours.
    """
    shuffle, order = random.Random(seed), list(samplers)
    samples: dict[str, list[T]] = {name: [] for name in samplers}
    for number in range(count + warm):
        shuffle.shuffle(order)
        for name in order:
            sample = samplers[name]()
            if number >= warm:
                samples[name].append(sample)
    return samples


def arguments(description: str, build: Sequence[str] = ()) -> argparse.Namespace:
    """The command line every kernel benchmark has; `build` has the options that its build reads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("mode", choices=("build", "run", "merge"))
    parser.add_argument("files", nargs="*", type=Path, help="merge: evidence files of runs")
    parser.add_argument("--fresh", action="store_true", help="merge: forget the rows there are")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/results")))
    parser.add_argument("--only", default="", help="run cases that contain one of these")
    parser.add_argument("--stage", default="all", choices=("all", "numerics", "timing"))
    parser.add_argument("--rounds", type=int, default=12)
    return read_by_mode(parser, {"build": build, "merge": ("files", "fresh")})


def read_by_mode(
    parser: argparse.ArgumentParser, read: Mapping[str, Sequence[str]]
) -> argparse.Namespace:
    """The command line; an option that a mode does not read ends it with status 2. `read` has what
    a mode reads; others read everything."""
    args = parser.parse_args()
    known = ("mode", *read.get(args.mode, vars(args)))
    for name, value in vars(args).items():
        if name not in known and value not in ([], parser.get_default(name)):
            parser.error(f"{args.mode} does not read --{name.replace('_', '-')}: leave it out")
    return args


def load_torch() -> Any:
    """torch with its attention backends; imported where a GPU is, not where kernels are built."""
    importlib.import_module("torch.nn.attention.varlen")
    return importlib.import_module("torch")


def command_line() -> str:
    """What this process was started with, for the rows it writes."""
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts
    return shlex.join(["python", "-m", ".".join(module), *sys.argv[1:]])


def run_workers(
    case: Case,
    args: argparse.Namespace,
    names: Sequence[str],
    kept: str = "cases.jsonl",
    limit_s: float = SILENCE,
) -> list[dict[str, Any]]:
    """`case(name, rounds)` of every name in a worker process; with "error" if it failed or hung.

    Results are kept in `args.out/KEPT` as they come: a run that is cut short has them.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    worker = Worker(Caller, "the GPU")
    for name in names:
        try:
            found = worker.call("call", case, name, args.rounds, limit_s=limit_s)
        except WarploomError as error:
            found = {"error": str(error)[:400]}
            if "CUDA" in found["error"]:  # a fault on the device poisons the process's context
                worker.close()
        results.append({"name": name, **found})
        print(json.dumps(results[-1])[:1500], flush=True)
        with (args.out / kept).open("a") as lines:
            lines.write(json.dumps(results[-1]) + "\n")
    worker.close()
    return results


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

    def sampler(graph: Any, repeats: int) -> Callable[[], float]:
        return lambda: timed(torch, graph.replay, 1) / repeats

    return in_shuffled_rounds({name: sampler(*one) for name, one in graphs.items()}, rounds)


def timed(torch: Any, call: Callable[[], None], repeats: int) -> float:
    """Milliseconds a call, of so many in a row."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def slug(name: str) -> str:
    """A variant's name as a folder's."""
    return name.replace(" ", "-")


def merge(target: Path, files: Sequence[Path], fresh: bool = False, only: str = "") -> None:
    """Put the rows of some runs into `target`: a row replaces the one of its kernel and shape.

    `only`: the rows whose claim contains this.
    """
    found = [row for path in files for row in read_rows(path) if only in row.claim]
    if fresh:
        target.unlink(missing_ok=True)
    put(target, found)


def put(target: Path, found: Iterable[Evidence]) -> None:
    """Rows into `target`: each replaces the one of its kernel and shape, all others stay."""
    rows: dict[tuple[str, str, str, str], Evidence] = {}
    for row in (*(read_rows(target) if target.is_file() else ()), *found):
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
        _, low, high = median_interval(samples["control"], samples[result["baselines"][0]])
        for name, ms in samples.items():
            ratio, lo, hi = median_interval(ms, samples[best])
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

    return {
        "device": torch.cuda.get_device_name(0),
        "driver": kernel_driver_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def provenance() -> dict[str, Any]:
    """Where and how a row was measured, as fields of `Evidence`."""
    found = environment()
    return {name: found[name] for name in ("device", "driver", "date")} | {
        "command": command_line()
    }


OURS, COPY, CONTROL = "ours", "copy", "control"


def modes(description: str | None, cases: Iterable[str], alone: str = "") -> argparse.Namespace:
    """The command line of a script with the modes build, run and merge; `alone` says what that
    option, where a script has it, leaves out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("where", type=Path, nargs="+")
    parser.add_argument("--only", default=",".join(cases), help="cases, with commas")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--rounds", type=int, default=15)
    if alone:
        parser.add_argument("--alone", action="store_true", help=f"without {alone}")
    return parser.parse_args()


def measure(
    cases: Iterable[Any], measured: Callable[[Any, Any], Evidence], seconds: float, target: Path
) -> None:
    """The row of every case by `measured(torch, case)` into `target`, kept as they come.

    A case that fails or comes after so many seconds is named and has none.
    """
    torch, began = load_torch(), time.monotonic()
    rows: list[Evidence] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if time.monotonic() - began > seconds:
            print(f"{case.name}: the time is over")
            continue
        try:
            row = measured(torch, case)
        except Exception as error:
            print(case.name, f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        rows.append(row)
        rates = {name: float(f"{rate:.4g}") for name, rate in row.baselines.items()}
        print(
            f"{case.name}: {row.ours:.4g} {row.unit} {rates} ratio {row.ratio_to_best:.3f}", end=" "
        )
        print(f"ratio {row.ratio_to_best:.3f}", row.control, end=" ")
        print(row.checks, f"{time.monotonic() - began:.0f} s", flush=True)
        write_rows(target, rows)


def row_of_times(
    samples: Mapping[str, Sequence[float]], best: str, checks: Mapping[str, Any], **fields: Any
) -> Evidence:
    """A row of bf16 calls in milliseconds: `OURS`, the baseline `best` and `CONTROL` of `samples`.

    `fields` are claim, kernel, shape and compiler; `checks` gains the time of `COPY` and the part
    of ours that it takes.
    """
    ratio, *interval = median_interval(samples[OURS], samples[best])
    _, *control = median_interval(samples[OURS], samples[CONTROL])
    median = {name: statistics.median(one) for name, one in samples.items()}
    share = round(100 * median[COPY] / median[OURS], 1)
    return Evidence(
        dtype="bf16",
        **provenance(),
        **fields,
        unit="ms",
        better="lower",
        ours=median[OURS],
        baselines={best: median[best]},
        ratio_to_best=ratio,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=len(samples[OURS]),
        checks={**checks, "copy ms": round(median[COPY], 5), "percent of copy": share},
        notes=libraries(),
    )


def libraries() -> str:
    """PyTorch, and Triton where it is loaded, with their versions."""
    triton = sys.modules.get("triton")
    also = "" if triton is None else f", triton {triton.__version__}"
    return f"torch {environment()['torch']}{also}"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text."""
    texts = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in texts
    )
