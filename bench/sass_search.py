"""Claim `sass-search`: how much a search over machine code gains on Triton's best kernels.

    python -m bench.sass_search [--kernels softmax,attention] [--methods identity,...] [--budget 60]

For each kernel of the suite: every Triton configuration is checked and timed, the fastest one's
cubin is searched by each method with the same wall-clock budget, the results are compared with the
original in one interleaved run (several reloads, A/A control), checked, deployed to a store, and
written as evidence rows. Runs on the GPU that it names; needs torch and Triton.
"""

from __future__ import annotations

import argparse
import datetime
import io
import math
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.evidence import Evidence, write_rows
from bench.triton_suite import SUITE, SuiteKernel
from bench.triton_suite.offline import compile_offline
from bench.triton_suite.on_gpu import TimedConfig, time_configurations
from bench.triton_suite.rows import Measured, search_row
from warploom.errors import CheckFailed, WarploomError
from warploom.integrations.deploy import FolderStore
from warploom.integrations.triton_capture import CapturedKernel
from warploom.runtime import (
    Baseline,
    CheckSettings,
    LocalMeasurer,
    MeasureSettings,
    Timing,
    TimingSettings,
    Workload,
)
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.words import instruction_words
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Budget as SearchBudget
from warploom.search.driver import SearchOptions, SearchResult, run_search
from warploom.search.evaluate import DeviceEvaluator
from warploom.search.players import PLAYERS, Player

RESULTS = Path(__file__).parent / "results" / "sass_search.json"
ORIGINAL = "triton"
CHAINS = 6
LEADERS = 5
CONFIRMATIONS = 2
ROUNDS = 8


@dataclass(frozen=True)
class Budget:
    """What one method may spend on one kernel."""

    seconds: float
    seed: int = 0
    failures: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What one method found: its best cubin (the original when nothing was better) and counts.

    `measured` were run on the GPU, `rejected` failed the static verdict, `failed` gave wrong
    output, crashed or hung.
    """

    cubin: bytes
    measured: int = 0
    rejected: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])


Method = Callable[[CapturedKernel, LocalMeasurer, Budget], Outcome]


def search_identity(kernel: CapturedKernel, measurer: LocalMeasurer, budget: Budget) -> Outcome:
    """The baseline that changes nothing: its ratio shows what the measurement itself does."""
    return Outcome(kernel.cubin)


def searched(player: Player) -> Method:
    """A method that lets a player of the assembly game search on the GPU."""

    def search(kernel: CapturedKernel, measurer: LocalMeasurer, budget: Budget) -> Outcome:
        original = parse(kernel.cubin, kernel.name)
        verifier = Verifier(original, kernel.name, AliasMode.TRITON)
        found = run_search(
            original,
            player,
            DeviceEvaluator(measurer),
            SearchBudget(budget.seconds),
            SearchOptions(
                kernel.name,
                AliasMode.TRITON,
                seed=budget.seed,
                chains=CHAINS,
                confirmations=CONFIRMATIONS,
                verifier=verifier,
            ),
        )
        failed = found.scored - found.outcomes["ok"]
        keep_failures(found, kernel, player.name, budget.failures)
        best = confirmed(kernel.cubin, found, measurer)
        verdict = verifier.check_file(parse(best, "result"))
        if not verdict.legal:
            raise CheckFailed(f"{kernel.name} / {player.name}: the result is {verdict}")
        notes = {
            "static_verdict": str(verdict),
            "static_verdict_us": round(verdict_time(verifier, original, kernel.name), 1),
            "search_best": round(found.best_speedup, 5),
            "outcomes": dict(found.outcomes),
            "actions": dict(found.tally),
            "curve": [(round(s, 2), n, round(v, 5)) for s, n, v in found.curve],
        }
        refused = found.tally["refused by the verifier"] + found.tally["refused by the editor"]
        return Outcome(best, found.scored, refused, failed, found.seconds, notes)

    return search


def keep_failures(
    found: SearchResult, kernel: CapturedKernel, player: str, folder: Path | None
) -> None:
    """Write candidates the verifier passed and the GPU failed, each with its right parent."""
    if folder is None or not found.failures:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{kernel.name}-{player}.tar.xz", "w:xz") as archive:
        images = {"original.cubin": kernel.cubin}
        for number, (outcome, candidate, parent) in enumerate(found.failures):
            images[f"{number}-{outcome}.cubin"] = candidate.cubin
            if parent is not None:
                images[f"{number}-parent.cubin"] = parent.cubin
        for name, image in images.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(image)
            archive.addfile(entry, io.BytesIO(image))


def confirmed(original: bytes, found: SearchResult, measurer: LocalMeasurer) -> bytes:
    """The best of the search's leaders in a longer comparison; the original when none is faster.

    The best score of many noisy ones is too good by selection; the comparison is not selected.
    """
    leaders = {f"leader {n}": c.cubin for n, (_, c) in enumerate(found.best[:LEADERS])}
    if not leaders:
        return original
    timing = measurer.compare(
        {ORIGINAL: original, **leaders}, TimingSettings(mode="warm", rounds=20, reloads=3)
    )
    name = max(leaders, key=lambda leader: timing.ratios[leader].median)
    return leaders[name] if timing.ratios[name].median > 1.0 else original


def verdict_time(verifier: Verifier, cubin: Cubin, kernel: str) -> float:
    """Microseconds of one static verdict."""
    words = instruction_words(cubin, kernel)
    began = time.perf_counter()
    for _ in range(50):
        verifier.check_words(words)
    return (time.perf_counter() - began) / 50 * 1e6


# The searches, by the name of `--methods`. Each is handed the captured kernel and a measurer on
# which its workload is already prepared.
METHODS: dict[str, Method] = {
    "identity": search_identity,
    **{name: searched(player) for name, player in PLAYERS.items()},
}


@dataclass(frozen=True)
class Case:
    """One kernel of the suite at its best Triton configuration, and what was measured on it."""

    kernel: SuiteKernel
    timed: list[TimedConfig]
    captured: CapturedKernel
    baseline: Baseline
    timings: Mapping[str, Timing]


@dataclass(frozen=True)
class Settings:
    """The command line."""

    kernels: tuple[str, ...]
    methods: tuple[str, ...]
    budget: Budget
    samples: int
    reloads: int
    out: Path
    store: Path | None
    command: str


def main(arguments: list[str]) -> int:
    """Run the claim; returns the exit status."""
    settings = read_settings(arguments)
    rows: list[Evidence] = []
    for name in settings.kernels:
        try:
            rows.extend(run_kernel(SUITE[name], settings))
        except WarploomError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return error.exit_code
        write_rows(settings.out, rows)
    print(f"{len(rows)} rows in {settings.out}")
    return 0


def read_settings(arguments: list[str]) -> Settings:
    """Settings from the command line; argparse exits with status 2 on a bad one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kernels", default=",".join(SUITE), help="names, comma-separated")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, comma-separated")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds a method and kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0, help="random inputs for each winner")
    parser.add_argument("--reloads", type=int, default=8, help="module reloads of the comparison")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--failures", type=Path, help="keep failed candidates in this folder")
    parser.add_argument("--store", type=Path, help="deploy winners into this folder")
    given = parser.parse_args(arguments)
    kernels, methods = (tuple(text.split(",")) for text in (given.kernels, given.methods))
    for name, known in [(k, SUITE) for k in kernels] + [(m, METHODS) for m in methods]:
        if name not in known:
            parser.error(f"unknown name {name!r}, expected some of {', '.join(known)}")
    command = shlex.join(["python", "-m", "bench.sass_search", *arguments])
    return Settings(
        kernels,
        methods,
        Budget(given.budget, given.seed, given.failures),
        given.samples,
        given.reloads,
        given.out,
        given.store,
        command,
    )


def run_kernel(kernel: SuiteKernel, settings: Settings) -> list[Evidence]:
    """All methods on one kernel: pick the configuration, search, compare, check, deploy."""
    timed = time_configurations(kernel)
    for item in timed:
        print(f"{kernel.name} {item.config.name}: {item.micros:.2f} us {item.reason}")
    best = timed[0]
    if math.isnan(best.micros):
        raise CheckFailed(f"{kernel.name}: no Triton configuration runs and is right")
    major, minor = torch.cuda.get_device_capability()
    captured = compile_offline(kernel, best.config, 10 * major + minor)
    torch.cuda.empty_cache()
    with LocalMeasurer(settings=MeasureSettings(rounds=ROUNDS)) as measurer:
        baseline = measurer.prepare(Workload(captured.cubin, captured.launch))
        outcomes = {
            name: METHODS[name](captured, measurer, settings.budget) for name in settings.methods
        }
        images = {ORIGINAL: captured.cubin, **{name: o.cubin for name, o in outcomes.items()}}
        timings = {
            mode: measurer.compare(images, TimingSettings(mode=mode, reloads=settings.reloads))
            for mode in ("warm", "cold")
        }
        winner = winner_of(captured, outcomes, timings["warm"])
        checks = {
            name: verdicts(measurer, captured, outcome, settings.samples if name == winner else 0)
            for name, outcome in outcomes.items()
        }
    case = Case(kernel, timed, captured, baseline, timings)
    deploy(case, outcomes, checks, settings)
    return [evidence(case, name, outcomes[name], checks[name], settings) for name in outcomes]


def winner_of(
    captured: CapturedKernel, outcomes: Mapping[str, Outcome], timing: Timing
) -> str | None:
    """The method whose changed result is fastest and clears the control; None without one."""
    winners = [
        name
        for name, outcome in outcomes.items()
        if outcome.cubin != captured.cubin and timing.ratios[name].clears(timing.control)
    ]
    return max(winners, key=lambda name: timing.ratios[name].median, default=None)


def verdicts(
    measurer: LocalMeasurer, captured: CapturedKernel, outcome: Outcome, samples: int
) -> dict[str, Any]:
    """The tested verdict of one result, as evidence checks."""
    if outcome.cubin == captured.cubin:
        return {"bitwise": "pass", "unchanged": True}
    report = measurer.check(outcome.cubin, CheckSettings(samples=samples))
    return {
        "bitwise": "pass" if report.passed else f"fail: {report.detail}",
        "self_test": "pass" if "found" in report.self_test.values() else "fail",
        "samples": report.samples,
        "samples_per_second": round(report.samples_per_second),
    }


def evidence(
    case: Case, method: str, outcome: Outcome, checks: dict[str, Any], settings: Settings
) -> Evidence:
    """The row of one method on one kernel: warm times, the flushed ratio among the checks."""
    return search_row(
        case.kernel,
        method,
        method,
        Measured(
            case.baseline.device,
            case.captured.compiler,
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            settings.command,
            ORIGINAL,
            f"triton {case.timed[0].config.name}",
            case.timings["warm"],
            case.timings["cold"],
        ),
        {
            **checks,
            "candidates_measured": outcome.measured,
            "candidates_rejected": outcome.rejected,
            "candidates_failed": outcome.failed,
            "candidates_per_second": round(outcome.measured / max(outcome.seconds, 1e-9), 1),
            "seconds": round(outcome.seconds, 1),
            **outcome.notes,
        },
        f"best of {len(case.timed)} Triton configurations",
    )


def deploy(
    case: Case,
    outcomes: Mapping[str, Outcome],
    checks: Mapping[str, dict[str, Any]],
    settings: Settings,
) -> None:
    """Store the fastest result that is right and clears the control, when a store was named."""
    timing, captured = case.timings["warm"], case.captured
    winner = winner_of(captured, outcomes, timing)
    if settings.store is None or winner is None or checks[winner]["bitwise"] != "pass":
        return
    FolderStore(settings.store).put(
        captured.cubin,
        outcomes[winner].cubin,
        captured.name,
        f"sm_{captured.arch}a" if captured.arch >= 90 else f"sm_{captured.arch}",
        result={"method": winner, **timing.to_json()},
        launch=captured.launch.to_json(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
