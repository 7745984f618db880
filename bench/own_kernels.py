"""Claim `own-kernels`: the search of machine code on kernels that warploom itself generated.

    python -m bench.own_kernels prepare --data DIR              # anywhere; compiles
    python -m bench.own_kernels run     --data DIR --raw FILE   # needs a GPU
    python -m bench.own_kernels beside  --data DIR --raw FILE   # needs a GPU and the libraries
    python -m bench.own_kernels parts   --data DIR --raw FILE   # needs a GPU: a result, taken apart
    python -m bench.own_kernels report  --raw FILE...           # anywhere

The way of each kernel: tile program -> schedule -> CUDA C++ -> ptxas -> this search. `run` plays
several players at once on one GPU (each candidate is verified, run beside the original and compared
bit for bit), compares the best with the original at every shape of `CASES`, interleaved, with
reloads and an A/A control, and checks it with random inputs. The baseline is our own kernel as
ptxas left it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.comparison.attribution import summary, take_apart
from bench.own_kernels_parts.cases import CASES, Case, launch_of, make
from bench.own_kernels_parts.report import deploy, report
from bench.whole_set_parts.parallel import Players, Task
from bench.whole_set_parts.play import ORDERED, ORIGINAL, kept, leaders, round_of, verify
from warploom.codegen.compile.build import Built
from warploom.errors import CheckFailed, WarploomError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.runtime import CheckSettings, LocalMeasurer, MeasureSettings, TimingSettings, Workload
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.players import PLAYERS

RESULTS: Final = Path(__file__).parent / "results" / "own_kernels.json"
# What the processes play, in turn: those that gained most with few measurements.
MIXTURE: Final = ("greedy", "evolve", "greedy", "guided", "greedy", "evolve", "greedy")
CONFIRMATIONS: Final = 2


@dataclass(frozen=True)
class Plan:
    """How much to play: seconds of search a kernel, processes, random inputs of the last check."""

    seconds: float
    processes: int
    samples: int
    seed: int
    command: str


def measured(case: Case, folder: Path, plan: Plan) -> dict[str, Any]:
    """Search, compare at every shape, check."""
    home = folder / case.name
    original = parse((home / "original.cubin").read_bytes(), case.name)
    kernel = original.kernel(None).name
    starts = [path.read_bytes() for path in sorted(home.glob("start*.cubin"))]
    places = [None, *starts]  # where to begin: the original, and earlier results on it
    tasks = [
        Task(
            number,
            original.data,
            places[number % len(places)],
            kernel,
            MIXTURE[number // len(places) % len(MIXTURE)],
            1000 * plan.seed + number,
            plan.seconds,
            CONFIRMATIONS,
        )
        for number in range(plan.processes)
    ]
    with Players(tasks) as players, LocalMeasurer(settings=MeasureSettings(rounds=8)) as gpu:
        baseline = gpu.prepare(Workload(original.data, launch_of(case, home, case.search)))
        results = players.play(gpu)
        best = leaders(results) | {f"start {n}": image for n, image in enumerate(starts)}
        if not best:
            raise CheckFailed(f"{case.name}: no candidate ran and was right")
        first = gpu.compare({ORIGINAL: original.data, **best}, TimingSettings(rounds=16, reloads=3))
        name = max(best, key=lambda one: first.ratios[one].median)
        tuned = best[name]
        timings: dict[str, Any] = {}
        for sizes in case.timed:
            gpu.prepare(Workload(original.data, launch_of(case, home, sizes)))
            images = {ORIGINAL: original.data, "tuned": tuned}
            timing = gpu.compare(images, TimingSettings(reloads=6))
            timings[json.dumps(sizes)] = timing.to_json()
            print(f"{case.name} {sizes}: {timing.ratios['tuned']} {timing.control}", flush=True)
        gpu.prepare(Workload(original.data, launch_of(case, home, case.checked)))
        check = gpu.check(tuned, CheckSettings(samples=plan.samples))
    verdict = verify(original, tuned, kernel)
    return {
        "device": dict(baseline.device),
        "rounds": [round_of(found) for found in results],
        "choosing": first.to_json(),
        "timings": timings,
        "passed": check.passed,
        "detail": check.detail,
        "self_test": dict(check.self_test),
        "samples": check.samples,
        "verdict": "proved" if verdict.legal else str(verdict.findings[0]),
        "legal": verdict.legal,
        "best": name,
        "lineage": [ORDERED],
        "tuned": dict(kept(tuned)),
        "original_sha256": original.digest,
        "compiler": Built.read(home).resources.compiler,
    }


def modelled(case: Case, folder: Path, plan: Plan) -> dict[str, Any]:
    """The same plumbing without a GPU: one player under the timing model."""
    original = parse((folder / case.name / "original.cubin").read_bytes(), case.name)
    kernel = original.kernel(None).name
    launch_of(case, folder / case.name, case.search)
    found = run_search(
        original,
        PLAYERS["greedy"],
        ModelEvaluator(original, kernel),
        Budget(plan.seconds),
        SearchOptions(kernel, AliasMode.TRITON, seed=plan.seed),
    )
    print(f"{case.name}: model {found.best_speedup:.4f}, {found.scored} scored", flush=True)
    if found.best:
        path = folder / case.name / "model-best.cubin"
        write_bytes_atomically(path, found.best[0][1].cubin)
    return {"model": found.best_speedup, "tally": dict(found.tally)}


def parts(case: Case, folder: Path, raw: Path) -> None:
    """Measure `tuned.cubin` block by block: each changed block alone, and all but each."""
    home = folder / case.name
    original = parse((home / "original.cubin").read_bytes(), case.name)
    winner = parse((home / "tuned.cubin").read_bytes(), case.name)
    kernel = original.kernel(None).name
    found = take_apart(original, winner, kernel)
    images = {ORIGINAL: original.data, "whole": winner.data, **found.images}
    with LocalMeasurer() as gpu:
        gpu.prepare(Workload(original.data, launch_of(case, home, case.search)))
        timing = gpu.compare(images, TimingSettings(rounds=14, reloads=4))
    ratios = {n: [r.median, r.low, r.high] for n, r in timing.ratios.items() if n != ORIGINAL}
    control = [timing.control.low, timing.control.high]
    line = {"case": case.name, "control": control, **summary(found, ratios)}
    write_text_atomically(raw, json.dumps(line, indent=1) + "\n")
    for name, (middle, low, high) in sorted(ratios.items(), key=lambda row: -row[1][0]):
        print(f"{name}: {middle:.4f} [{low:.4f}, {high:.4f}]", flush=True)
    print(f"control {control}; refused: {', '.join(found.refused) or 'none'}")


def run(folder: Path, names: list[str], raw: Path, plan: Plan, model: bool) -> None:
    """Play every case; `raw` is rewritten after each."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": plan.command,
        "cases": {},
    }
    for name in names:
        began = time.monotonic()
        try:
            found = (modelled if model else measured)(CASES[name], folder, plan)
        except WarploomError as error:  # the other kernels are still to be played
            found = {"error": str(error)}
            print(f"{name}: {error}", flush=True)
        found["seconds"] = round(time.monotonic() - began, 1)
        result["cases"][name] = found
        write_text_atomically(raw, json.dumps(result) + "\n")
        print(f"{name}: {found['seconds']} s", flush=True)


def main(arguments: list[str]) -> int:
    """Run one step of the claim; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("step", choices=("prepare", "run", "beside", "parts", "report"))
    parser.add_argument("--data", type=Path, help="folder of the built kernels")
    parser.add_argument("--raw", type=Path, nargs="+", help="where run writes and report reads")
    parser.add_argument("--rounds", type=int, default=9, help="of beside")
    parser.add_argument("--kernels", default=",".join(CASES), help="names, comma-separated")
    parser.add_argument("--seconds", type=float, default=10.0, help="of search, a kernel")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="store_true", help="run: score by the model, no GPU")
    parser.add_argument("--store", type=Path, help="report: deploy what gained (needs --data)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    names = given.kernels.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown kernel {unknown[0]!r}, expected some of {', '.join(CASES)}")
    if given.step != "report" and given.data is None:
        parser.error(f"{given.step} needs --data")
    if given.step != "prepare" and given.raw is None:
        parser.error(f"{given.step} needs --raw")
    try:
        step(given, names, shlex.join(["python", "-m", "bench.own_kernels", *arguments]))
    except WarploomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def step(given: argparse.Namespace, names: list[str], command: str) -> None:
    """Do the step that the command line asks for."""
    if given.step == "prepare":
        for name in names:
            make(CASES[name], given.data / name)
    elif given.step == "run":
        plan = Plan(given.seconds, given.processes, given.samples, given.seed, command)
        run(given.data, names, given.raw[0], plan, given.model)
    elif given.step == "parts":
        for name, raw in zip(names, given.raw, strict=True):
            parts(CASES[name], given.data, raw)
    elif given.step == "beside":
        from bench.own_kernels_parts.beside import beside  # noqa: PLC0415 - needs torch

        for name, raw in zip(names, given.raw, strict=True):
            home = given.data / name
            beside(CASES[name], home, (home / "tuned.cubin").read_bytes(), raw, given.rounds)
    else:
        report(given.raw, given.out)
        if given.store is not None:
            deploy(given.raw, given.data, given.store)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
