"""Claim `scale-out`: candidates a second with one GPU and with all GPUs of a host.

    python bench/scale_out.py --data DIR [--kernel softmax] [--count 256]

Takes stored schedules (see bench/timing_model.py), measures all of them on one GPU and again on
all, through the same interface, and compares rates and scores. Needs at least two GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warploom.errors import DeviceError, WarploomError
from warploom.evidence import Evidence, write_rows
from warploom.runtime import LocalMeasurer, MeasureSettings, Workload
from warploom.runtime.driver import device_count
from warploom.runtime.launch import LaunchSpec
from warploom.sass.aliasing import AliasMode
from warploom.sass.verdict import Verdict
from warploom.search.game import Candidate
from warploom.search.scale import LocalGpus, ScaledEvaluator
from warploom.search.schedules import ScheduleSet

CLAIM = "scale-out"
RESULTS = Path(__file__).parent / "results" / "scale_out.json"
SETTINGS = MeasureSettings(rounds=8)
UNJUDGED = Verdict(True, AliasMode.TRITON, (), 0, 0)  # stored schedules were judged when made


@dataclass(frozen=True)
class Run:
    """One run: GPUs, candidates a second, and the score of each candidate."""

    gpus: int
    rate: float
    scores: tuple[float, ...]


def run(schedules: ScheduleSet, workload: Workload, gpus: int, count: int) -> Run:
    """Score the first `count` schedules on `gpus` GPUs; the clock starts when all are ready."""
    candidates = [
        Candidate(image, str(number), UNJUDGED)
        for number, image in zip(range(count), schedules.images(), strict=False)
    ]
    with ScaledEvaluator(LocalGpus(workload, range(gpus), SETTINGS)) as evaluator:
        began = time.perf_counter()
        tickets = [evaluator.submit(candidate) for candidate in candidates]
        scores: dict[int, float] = {}
        while len(scores) < len(tickets):
            scores.update({ticket: score.speedup for ticket, score in evaluator.poll(1.0).items()})
        rate = count / (time.perf_counter() - began)
    return Run(gpus, rate, tuple(scores[ticket] for ticket in tickets))


def main(arguments: list[str]) -> int:
    """Run the claim; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kernel", default="softmax")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    try:
        schedules = ScheduleSet.load(given.data / f"{given.kernel}.xz")
        gpus = device_count()
        if gpus < 2:
            raise DeviceError(f"{gpus} GPU here: this claim needs at least 2")
        workload = Workload(schedules.cubin, LaunchSpec.from_json(schedules.about["launch"]))
        one, many = (run(schedules, workload, number, given.count) for number in (1, gpus))
        with LocalMeasurer() as measurer:
            device = measurer.prepare(workload).device
    except WarploomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    spread = np.abs(np.array(one.scores) - np.array(many.scores))
    row = Evidence(
        claim=CLAIM,
        kernel=f"{given.kernel}, {gpus} GPUs",
        shape=f"candidates={given.count}",
        dtype="",
        device=f"{gpus} x {device['name']}",
        driver=str(device["driver_version"]),
        compiler=str(schedules.about.get("compiler", "")),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["python", "bench/scale_out.py", *arguments]),
        unit="candidates/s",
        better="higher",
        ours=many.rate,
        baselines={"one GPU": one.rate},
        ratio_to_best=many.rate / one.rate,
        samples=given.count,
        checks={
            "failed": sum(score == 0 for score in many.scores),
            "score_difference_median": round(float(np.median(spread)), 5),
        },
        notes="one watched process a GPU, two candidates in flight on each",
    )
    write_rows(given.out, [row])
    print(f"1 GPU {one.rate:.1f}/s, {gpus} GPUs {many.rate:.1f}/s, {row.checks}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
