"""Several runs on every kernel on the GPU, and the comparison of their leaders."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.whole_set_parts.parallel import Players, Task
from warploom.errors import CheckFailed, WarploomError
from warploom.files import write_text_atomically
from warploom.runtime import (
    CheckSettings,
    LaunchSpec,
    LocalMeasurer,
    MeasureSettings,
    TimingSettings,
    Workload,
)
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Verdict
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Budget, SearchOptions, SearchResult, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.players import PLAYERS

# Seconds of search, more where the first searches found something.
SECONDS: Final = {
    "attention": 30.0,
    "feed_forward": 20.0,
    "gemm_leaky_relu": 12.0,
    "layernorm": 5.0,
    "batched_gemm": 5.0,
    "softmax": 4.0,
    "rmsnorm": 3.0,
    "skinny_gemm": 3.0,
}
PROCESSES: Final = 16
CONFIRMATIONS: Final = 2
LEADERS: Final = 4
SAMPLES: Final = 2000
ORIGINAL: Final = "triton"
BEST: Final = "orders only"  # the name of a result
ORDERED: Final = "another order and other control fields"


@dataclass(frozen=True)
class Plan:
    """How to play: `scale` times `SECONDS`, the player, whether the model stands in for a GPU."""

    scale: float
    player: str
    seed: int
    model: bool
    command: str


@dataclass(frozen=True)
class Prepared:
    """One kernel as `prepare` left it; `starts`: where the model had climbed."""

    name: str
    original: Cubin
    launch: LaunchSpec
    kernel: str
    starts: list[Cubin]


def read(folder: Path, name: str) -> Prepared:
    """What is prepared of one kernel."""
    home = folder / name
    head = json.loads((home / "kernel.json").read_text())
    original = parse((home / "original.cubin").read_bytes(), name)
    starts = [parse(path.read_bytes(), name) for path in sorted(home.glob("start*.cubin"))]
    return Prepared(name, original, LaunchSpec.from_json(head["launch"]), head["kernel"], starts)


def run(folder: Path, kernels: tuple[str, ...], raw: Path, plan: Plan) -> None:
    """Play and compare; `raw` is rewritten after each kernel."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": plan.command,
        "player": plan.player,
        "kernels": {},
    }
    for name in kernels:
        began = time.monotonic()
        prepared = read(folder, name)
        try:
            found = dry(prepared, plan) if plan.model else measured(prepared, plan)
        except WarploomError as error:  # the other kernels are still to be played
            found = {"error": str(error), "lines": [f"failed: {error}"]}
        result["kernels"][name] = found
        write_text_atomically(raw, json.dumps(result) + "\n")
        seconds = time.monotonic() - began
        for line in found["lines"]:
            print(f"{name}: {line}", flush=True)
        print(f"{name}: {seconds:.1f} s", flush=True)


def dry(prepared: Prepared, plan: Plan) -> dict[str, Any]:
    """One run with the model as the judge; nothing is measured."""
    found = run_search(
        prepared.original,
        PLAYERS[plan.player],
        ModelEvaluator(prepared.original, prepared.kernel),
        Budget(SECONDS[prepared.name] * plan.scale),
        SearchOptions(prepared.kernel, AliasMode.TRITON, plan.seed),
    )
    return {"rounds": [round_of(found)], "lines": [f"model {found.best_speedup:.4f}"]}


def measured(prepared: Prepared, plan: Plan) -> dict[str, Any]:
    """The runs on a GPU, the leaders' comparison and the checks of what won."""
    original = prepared.original
    with (
        Players(_tasks(prepared, plan)) as players,
        LocalMeasurer(settings=MeasureSettings(rounds=8)) as measurer,
    ):
        baseline = measurer.prepare(Workload(original.data, prepared.launch))
        results = players.play(measurer)
        images = leaders(results)
        if not images:
            raise CheckFailed(f"{prepared.name}: no candidate ran and was right")
        timing = measurer.compare(
            {ORIGINAL: original.data, **images}, TimingSettings(mode="warm", rounds=20, reloads=3)
        )
        image = images[max(images, key=lambda name: timing.ratios[name].median)]
        # Measured afresh: selection flatters the run above.
        compared = {ORIGINAL: original.data, BEST: image}
        timings = {
            "warm": measurer.compare(compared, TimingSettings(mode="warm", reloads=8)),
            "cold": measurer.compare(compared, TimingSettings(mode="cold", reloads=3)),
        }
        check = measurer.check(image, CheckSettings(samples=SAMPLES))
    verdict = verify(original, image, prepared.kernel)
    ratio = timings["warm"].ratios[BEST]
    return {
        "device": dict(baseline.device),
        "best": BEST,
        "rounds": [round_of(found) for found in results],
        "timings": {mode: timing.to_json() for mode, timing in timings.items()},
        "results": {
            BEST: {
                "why": [ORDERED],
                "findings": [str(finding) for finding in verdict.findings],
                "passed": check.passed,
                "detail": check.detail,
                "self_test": dict(check.self_test),
                "samples": check.samples,
                "cubin": kept(image),
            }
        },
        "lines": [
            f"{ratio} control {timings['warm'].control}; passed {check.passed}, "
            f"{len(verdict.findings)} findings"
        ],
    }


def verify(original: Cubin, image: bytes, kernel: str) -> Verdict:
    """The static verdict on a result, from both files' bytes."""
    return Verifier(original, kernel, AliasMode.TRITON).check_file(parse(image, kernel))


def _tasks(prepared: Prepared, plan: Plan) -> list[Task]:
    """From the original and from every start in turn; seeds differ."""
    starts = [None, *(start.data for start in prepared.starts)]
    return [
        Task(
            number,
            prepared.original.data,
            starts[number % len(starts)],
            prepared.kernel,
            plan.player,
            1000 * plan.seed + number,
            SECONDS[prepared.name] * plan.scale,
            CONFIRMATIONS,
        )
        for number in range(PROCESSES)
    ]


def leaders(results: list[SearchResult]) -> dict[str, bytes]:
    """The best images by name, at most two of a run."""
    images: dict[str, bytes] = {}
    for found in results:
        for _, candidate in found.best[:2]:
            if len(images) < LEADERS and candidate.cubin not in images.values():
                images[f"leader {len(images)}"] = candidate.cubin
    return images


def round_of(found: SearchResult) -> dict[str, Any]:
    """What one run did, for the record."""
    return {
        "base": "as compiled",
        "player": found.player,
        "score": round(found.best_speedup, 5),
        "measured": found.measured,
        "scored": found.scored,
        "seconds": round(found.seconds, 2),
        "outcomes": dict(found.outcomes),
        "tally": dict(found.tally),
        "curve": [(round(s, 2), n, round(v, 5)) for s, n, v in found.curve],
    }


def kept(image: bytes) -> Mapping[str, Any]:
    """A cubin to be looked at later, deflated, in base 64."""
    return {
        "sha256": hashlib.sha256(image).hexdigest(),
        "cubin": base64.b64encode(zlib.compress(image, 9)).decode(),
    }
