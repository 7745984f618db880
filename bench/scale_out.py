"""Claim `scale-out`: one interface over one GPU and over all GPUs of a host.

    python -m bench.scale_out [--data DIR] [--kernel softmax] [--count 256] [--merge ROWS.json]
    python -m bench.scale_out --dry-run                 (processes and the timing model, no GPU)

Stored schedules (see bench/timing_model.py) are measured on one GPU, on all, and on all again
while one measuring process is killed: rates, scores, and what the kill cost. Then one search plays
on one GPU and on all: its candidates are measured there, and the timing model's scores decide,
because they have no noise. Both must end with the same candidates, whatever came back first.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.evidence import Evidence, read_rows, write_rows
from bench.scaling.evaluator import Backend, Event, LocalGpus, ModelTask, ScaledEvaluator
from bench.scaling.processes import Processes
from bench.stored_schedules import ScheduleSet
from warploom.errors import DeviceError, WarploomError
from warploom.runtime import LocalMeasurer, MeasureSettings, Workload
from warploom.runtime.driver import device_count
from warploom.runtime.launch import LaunchSpec
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Verdict
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Candidate
from warploom.search.play import Score
from warploom.search.players import PLAYERS

CLAIM = "scale-out"
RESULTS = Path(__file__).parent / "results" / "scale_out.json"
SETTINGS = MeasureSettings(rounds=8)
UNJUDGED = Verdict(True, AliasMode.TRITON, (), 0, 0)  # stored schedules were judged when made
SEARCHED = 96
CHAINS = 8


class Watched:
    """A backend whose arrivals are noted, with a process killed after so many images were sent.

    With `decide`, a right candidate's score is replaced by what that function says of its image.
    """

    def __init__(
        self,
        inner: Backend,
        kill_at: int | None = None,
        decide: Callable[[bytes], float] | None = None,
    ) -> None:
        self.inner, self.kill_at, self.decide = inner, kill_at, decide
        self.count, self.depth = inner.count, inner.depth
        self.start, self.close = inner.start, inner.close
        self.arrived: list[int] = []
        self.killed = 0
        self._sent = 0
        self._images: dict[int, bytes] = {}

    def send(self, worker: int, key: int, image: bytes) -> None:
        """Hand an image on; kill a measuring process when it is time."""
        self._images[key] = image
        self.inner.send(worker, key, image)
        self._sent += 1
        if self._sent == self.kill_at:
            victim = min(child.pid or 0 for child in multiprocessing.active_children())
            os.kill(victim, signal.SIGKILL)
            self.killed += 1

    def wait(self, timeout_s: float) -> Iterable[Event]:
        """What happened, noted."""
        return [self._seen(event) for event in self.inner.wait(timeout_s)]

    def _seen(self, event: Event) -> Event:
        if event.score is None or event.score.outcome != "ok":
            return event
        self.arrived.append(event.key)
        if self.decide is None:
            return event
        return Event(event.worker, event.key, Score(self.decide(self._images[event.key])))

    @property
    def out_of_order(self) -> int:
        """How often a score came back before one that was submitted earlier."""
        return sum(later < earlier for earlier, later in pairwise(self.arrived))


@dataclass(frozen=True)
class Run:
    """One run: candidates a second, the score of each, and what happened on the way."""

    rate: float
    scores: tuple[Score, ...]
    out_of_order: int
    in_order: bool
    lost: int
    killed: int


def run(backend: Backend, images: Sequence[bytes], kill_at: int | None = None) -> Run:
    """Score images; the clock starts when all workers are ready."""
    watched = Watched(backend, kill_at)
    candidates = [Candidate(image, str(n), UNJUDGED) for n, image in enumerate(images)]
    with ScaledEvaluator(watched) as evaluator:
        began = time.perf_counter()
        tickets = [evaluator.submit(candidate) for candidate in candidates]
        scores: dict[int, Score] = {}
        while len(scores) < len(tickets):
            scores.update(evaluator.poll(1.0))
        rate = len(images) / (time.perf_counter() - began)
        return Run(
            rate,
            tuple(scores[ticket] for ticket in tickets),
            watched.out_of_order,
            list(scores) == tickets,
            evaluator.lost,
            watched.killed,
        )


def search(schedules: ScheduleSet, backend: Backend) -> tuple[list[str], int]:
    """(the best candidates of one search, how often scores came back out of order)."""
    original = parse(schedules.cubin, schedules.kernel)
    model = ModelEvaluator(original, schedules.kernel)

    def decide(image: bytes) -> float:
        return model.original_cycles / model.cycles_of(image)

    watched = Watched(backend, decide=decide)
    with ScaledEvaluator(watched) as evaluator:
        found = run_search(
            original,
            PLAYERS["greedy"],
            evaluator,
            Budget(40.0, SEARCHED),
            SearchOptions(schedules.kernel, AliasMode.TRITON, seed=5, chains=CHAINS),
        )
    digests = [f"{score:.9f} {candidate.digest}" for score, candidate in found.best]
    return [*digests, f"{found.scored} scored"], watched.out_of_order


def measure(
    schedules: ScheduleSet, count: int, many: int, backend_of: Callable[[int], Backend]
) -> dict[str, Any]:
    """All runs: one worker, all workers, all with a kill; then the search on both."""
    images = [image for image, _ in zip(schedules.images(), range(count), strict=False)]
    one, all_, hurt = (
        run(backend_of(workers), images, kill_at)
        for workers, kill_at in ((1, None), (many, None), (many, count // 2))
    )
    searches = [search(schedules, backend_of(workers)) for workers in (1, many)]
    values = [np.array([score.speedup for score in each.scores]) for each in (one, all_, hurt)]
    spread = np.abs(values[0] - values[1])
    return {
        "one": one.rate,
        "many": all_.rate,
        "checks": {
            "outcomes": [sorted({score.outcome for score in each.scores})
                         for each in (one, all_, hurt)],
            "failed": [int((value == 0).sum()) for value in values],
            "handed over in order": all(each.in_order for each in (one, all_, hurt)),
            "came back out of order": [each.out_of_order for each in (one, all_, hurt)],
            "killed": hurt.killed,
            "lost": hurt.lost,
            "rate with a kill": round(hurt.rate, 1),
            "score difference median": round(float(np.median(spread)), 5),
            "rank correlation": round(_spearman(values[0], values[1]), 3),
            "same search": searches[0][0] == searches[1][0],
            "search came back out of order": searches[1][1],
            "searched": SEARCHED,
        },
    }  # fmt: skip


def _spearman(one: Any, two: Any) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, two)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def merge(source: Path, target: Path) -> None:
    """Take over the rows of a run on another machine; rows of the same kernel are replaced."""
    rows = {
        row.kernel: row for path in (target, source) if path.is_file() for row in read_rows(path)
    }
    kept: list[Evidence] = []
    for row in rows.values():
        checks = {name.replace("_", " "): value for name, value in row.checks.items()}
        kept.append(replace(row, command=command(row), checks=checks))
    write_rows(target, kept)


def command(row: Evidence) -> str:
    """How to make a row again, wherever its data lay."""
    kernel = row.kernel.split(",")[0]
    return f"python -m bench.scale_out --kernel {kernel} --count {row.samples}"


def main(arguments: list[str]) -> int:
    """Run the claim; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, default=RESULTS.parent / "raw" / "timing_model")
    parser.add_argument("--kernel", default="softmax")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, help="take over the rows of another run's file")
    parser.add_argument("--dry-run", action="store_true", help="model and processes, no rows")
    given = parser.parse_args(arguments)
    try:
        if given.merge is not None:
            merge(given.merge, given.out)
            return 0
        schedules = ScheduleSet.load(given.data / f"{given.kernel}.xz")
        if given.dry_run:
            task = ModelTask(schedules.cubin, schedules.kernel)
            print(measure(schedules, given.count, 2, lambda workers: Processes(task, workers)))
            return 0
        gpus = device_count()
        if gpus < 2:
            raise DeviceError(f"{gpus} GPU here: this claim needs at least 2")
        workload = Workload(schedules.cubin, LaunchSpec.from_json(schedules.about["launch"]))
        found = measure(
            schedules,
            given.count,
            gpus,
            lambda workers: LocalGpus(workload, range(workers), SETTINGS),
        )
        with LocalMeasurer() as measurer:
            device = measurer.prepare(workload).device
    except WarploomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    row = Evidence(
        claim=CLAIM,
        kernel=f"{given.kernel}, {gpus} GPUs",
        shape=f"candidates={given.count}",
        dtype="",
        device=f"{gpus} x {device['name']}",
        driver=str(device["driver_version"]),
        compiler=str(schedules.about.get("compiler", "")),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=f"python -m bench.scale_out --kernel {given.kernel} --count {given.count}",
        unit="candidates/s",
        better="higher",
        ours=found["many"],
        baselines={"one GPU": found["one"]},
        ratio_to_best=found["many"] / found["one"],
        samples=given.count,
        checks=found["checks"],
        notes="one watched process a GPU, two candidates in flight on each; in the third run one "
        "measuring process is killed half way",
    )
    write_rows(given.out, [row])
    print(f"1 GPU {found['one']:.1f}/s, {gpus} GPUs {found['many']:.1f}/s, {found['checks']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
