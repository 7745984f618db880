"""Run the micro-benchmarks and every stored schedule on the GPU."""

from __future__ import annotations

import datetime
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.calibration.images import ProbeImage, read_images
from bench.calibration.run import run_probes
from bench.stored_schedules import ScheduleSet
from warploom.files import write_text_atomically
from warploom.runtime import LocalMeasurer, MeasureSettings, Workload
from warploom.runtime.launch import LaunchSpec
from warploom.runtime.session import open_cuda

SETTINGS = MeasureSettings(rounds=12, window_us=50.0)
COPIES = 16  # of the original among the candidates of a pass: what a measurement says of itself
MOST_FAULTS = 6  # probes that may fault before the micro-benchmarks are given up
AHEAD = 24  # candidates queued at the worker


def measure(folder: Path, kernels: tuple[str, ...], raw: Path, passes: int, seed: int) -> None:
    """Measure everything in `folder` and write times as JSON, after each kernel."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": {"rounds": SETTINGS.rounds, "window_us": SETTINGS.window_us},
        "probes": [],
        "kernels": {name: [] for name in kernels},
    }
    archive = folder / "probes.tar.xz"
    if archive.exists():
        result["probes"] = micro_benchmarks(archive)
        print(f"{len(result['probes'])} micro-benchmark results", flush=True)
    with LocalMeasurer(settings=SETTINGS) as measurer:
        for number in range(passes):
            for name in kernels:
                schedules = ScheduleSet.load(folder / f"{name}.xz")
                part = one_pass(measurer, schedules, seed + number)
                result["kernels"][name].append(part)
                result["device"] = part["device"]
                write_text_atomically(raw, json.dumps(result) + "\n")
                print(f"pass {number} {name}: {describe(part)}", flush=True)


def micro_benchmarks(archive: Path) -> list[dict[str, Any]]:
    """Every probe of the archive, each in a process of its own context: one that faults is named
    and costs no other."""
    found: list[dict[str, Any]] = []
    left = read_images(archive)
    context = multiprocessing.get_context("spawn")
    faults = 0
    while left and faults < MOST_FAULTS:
        ours, theirs = context.Pipe()
        process = context.Process(target=_probe_process, args=(theirs, left), daemon=True)
        process.start()
        theirs.close()
        done = 0
        while ours.poll(30) and (rows := _received(ours)) is not None:
            found.extend(rows)
            done += 1
        process.kill()
        process.join()
        if done < len(left):
            faults += 1
            print(f"probe {left[done].name} stall {left[done].stall} failed", flush=True)
        left = left[done + 1 :]
    return found


def _received(pipe: Connection) -> list[dict[str, Any]] | None:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _probe_process(pipe: Connection, images: list[ProbeImage]) -> None:
    device = open_cuda(0)
    for rows in run_probes(device, images):
        pipe.send([row.to_json() for row in rows])


def one_pass(measurer: LocalMeasurer, schedules: ScheduleSet, seed: int) -> dict[str, Any]:
    """Every schedule and some copies of the original, once, in a random order."""
    spec = LaunchSpec.from_json(schedules.about["launch"])
    baseline = measurer.prepare(Workload(schedules.cubin, spec))
    images = [*schedules.images(), *[schedules.cubin] * COPIES]
    order = np.random.default_rng(seed).permutation(len(images)).tolist()
    tickets: dict[int, int] = {}
    speedups: list[float | None] = [None] * len(images)
    outcomes = [""] * len(images)
    micros: list[float | None] = [None] * len(images)
    while order or tickets:
        while order and len(tickets) < AHEAD:
            place = order.pop()
            tickets[measurer.submit(images[place])] = place
        for ticket, found in measurer.poll(1.0):
            place = tickets.pop(ticket)
            outcomes[place] = found.outcome
            if found.outcome == "ok":
                speedups[place] = round(found.speedup, 6)
                micros[place] = round(found.median_us, 4)
    count = len(schedules)
    return {
        "device": dict(baseline.device),
        "rough_us": baseline.rough_us,
        "speedups": speedups[:count],
        "median_us": micros[:count],
        "outcomes": outcomes[:count],
        "copies": speedups[count:],
    }


def describe(part: dict[str, Any]) -> str:
    """One line on a pass."""
    found = np.array([value for value in part["speedups"] if value is not None])
    copies = np.array([value for value in part["copies"] if value is not None])
    bad = sum(outcome != "ok" for outcome in part["outcomes"])
    return (
        f"{len(found)} ok, {bad} not; speed-up {found.min():.4f} {np.median(found):.4f} "
        f"{found.max():.4f}; copies of the original {copies.mean():.4f} +- {copies.std():.4f}"
    )
