"""The tournament of every kernel on the GPU, and the comparison of its leaders."""

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
from warploom.search.driver import Budget, SearchOptions
from warploom.search.lineage import Base, Step, prove, read_steps
from warploom.search.players import PLAYERS
from warploom.search.tournament import BaseModel, Entry, tournament

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
    """One kernel as `prepare` left it: bases, some of them twice, the second with a start."""

    name: str
    original: Cubin
    launch: LaunchSpec
    kernel: str
    bases: list[Base]
    starts: dict[int, Cubin]


def read(folder: Path, name: str) -> Prepared:
    """The bases and starts of one kernel."""
    home = folder / name
    head = json.loads((home / "kernel.json").read_text())
    original = parse((home / "original.cubin").read_bytes(), name)
    bases = [Base(original)]
    while (home / f"base{len(bases)}").is_dir():
        steps = read_steps(home / f"base{len(bases)}")
        bases.append(Base(parse(steps[-1].cubin, name), steps))
    starts: dict[int, Cubin] = {}
    for number in range(len(bases)):
        for path in sorted(home.glob(f"start{number}*.cubin")):
            starts[len(bases)] = parse(path.read_bytes(), name)
            bases.append(bases[number])
    launch = LaunchSpec.from_json(head["launch"])
    return Prepared(name, original, launch, head["kernel"], bases, starts)


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
    """The tournament with the model as the judge; nothing is measured."""
    entries = tournament(
        prepared.bases,
        PLAYERS[plan.player],
        lambda base: BaseModel(prepared.original, base.cubin, prepared.kernel),
        Budget(SECONDS[prepared.name] * plan.scale),
        SearchOptions(prepared.kernel, AliasMode.TRITON, plan.seed),
        starts=prepared.starts,
    )
    findings = prove(prepared.original, prepared.kernel, entries[0].steps, AliasMode.TRITON)
    return {
        "rounds": [round_of(entry) for entry in entries],
        "lines": [f"model {entries[0].score:.4f} {entries[0].base.why}; {len(findings)} findings"],
    }


def measured(prepared: Prepared, plan: Plan) -> dict[str, Any]:
    """The tournament on a GPU, the leaders' comparison and the checks of what won."""
    with (
        Players(*_tasks(prepared, plan)) as players,
        LocalMeasurer(settings=MeasureSettings(rounds=8)) as measurer,
    ):
        baseline = measurer.prepare(Workload(prepared.original.data, prepared.launch))
        entries = players.play(measurer)
        images = leaders(entries)
        if not images:
            raise CheckFailed(f"{prepared.name}: no candidate ran and was right")
        timing = measurer.compare(
            {ORIGINAL: prepared.original.data, **{name: row[0] for name, row in images.items()}},
            TimingSettings(mode="warm", rounds=20, reloads=3),
        )
        best = max(images, key=lambda name: timing.ratios[name].median)
        # The best of every kind of program, measured afresh: selection flatters the run above.
        chosen = {best: images[best], **{n: r for n, r in images.items() if n == "orders only"}}
        compared = {ORIGINAL: prepared.original.data, **{n: r[0] for n, r in chosen.items()}}
        timings = {
            "warm": measurer.compare(compared, TimingSettings(mode="warm", reloads=8)),
            "cold": measurer.compare(compared, TimingSettings(mode="cold", reloads=3)),
        }
        checks = {
            name: measurer.check(row[0], CheckSettings(samples=SAMPLES))
            for name, row in chosen.items()
        }
    findings = {
        name: prove(prepared.original, prepared.kernel, row[1], AliasMode.TRITON)
        for name, row in chosen.items()
    }
    ratio = timings["warm"].ratios[best]
    return {
        "device": dict(baseline.device),
        "best": best,
        "rounds": [round_of(entry) for entry in entries],
        "timings": {mode: timing.to_json() for mode, timing in timings.items()},
        "results": {
            name: {
                "why": [step.why for step in row[1]],
                "findings": [str(finding) for finding in findings[name]],
                "passed": checks[name].passed,
                "detail": checks[name].detail,
                "self_test": dict(checks[name].self_test),
                "samples": checks[name].samples,
                "steps": [kept(step) for step in row[1]],
            }
            for name, row in chosen.items()
        },
        "lines": [
            f"{best}: {ratio} control {timings['warm'].control} "
            f"{'; '.join(step.why for step in images[best][1])}; "
            f"passed {checks[best].passed}, {len(findings[best])} findings"
        ],
    }


def _tasks(prepared: Prepared, plan: Plan) -> tuple[list[Task], list[Base]]:
    """Every base and start in turn, until all processes have one; seeds differ."""
    count = max(len(prepared.bases), PROCESSES)
    tasks: list[Task] = []
    bases: list[Base] = []
    for number in range(count):
        place = number % len(prepared.bases)
        base, start = prepared.bases[place], prepared.starts.get(place)
        tasks.append(
            Task(
                number,
                base.cubin.data,
                None if start is None else start.data,
                bool(base.steps),
                prepared.kernel,
                plan.player,
                1000 * plan.seed + number,
                SECONDS[prepared.name] * plan.scale,
                CONFIRMATIONS,
            )
        )
        bases.append(base)
    return tasks, bases


def leaders(entries: list[Entry]) -> dict[str, tuple[bytes, tuple[Step, ...]]]:
    """The best images by name, among them the best that only reorders the original."""
    images: dict[str, tuple[bytes, tuple[Step, ...]]] = {}
    seen: set[str] = set()
    for entry in entries:
        for _, candidate in entry.result.best[:2]:
            plain = not entry.base.steps
            name = "orders only" if plain else f"leader {len(images)}"
            full = len(images) >= LEADERS and not plain
            if candidate.digest in seen or name in images or full:
                continue
            seen.add(candidate.digest)
            last = Step("order", candidate.cubin, "another order and other control fields")
            images[name] = (candidate.cubin, (*entry.base.steps, last))
    return images


def round_of(entry: Entry) -> dict[str, Any]:
    """What one run did, for the record."""
    found = entry.result
    return {
        "base": entry.base.why,
        "score": round(entry.score, 5),
        "measured": found.measured,
        "scored": found.scored,
        "seconds": round(found.seconds, 2),
        "outcomes": dict(found.outcomes),
        "tally": dict(found.tally),
        "curve": [(round(s, 2), n, round(v, 5)) for s, n, v in found.curve],
    }


def kept(step: Step) -> Mapping[str, Any]:
    """A step to be looked at later; `cubin` is its file, deflated, in base 64."""
    return {
        "kind": step.kind,
        "why": step.why,
        "sha256": hashlib.sha256(step.cubin).hexdigest(),
        "cubin": base64.b64encode(zlib.compress(step.cubin, 9)).decode(),
    }
