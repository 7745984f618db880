"""Millions of random samples of one comparison, in resumable batches.

A sample makes fresh inputs, runs the original and the candidate on them and compares every word.
All of it is one captured graph whose kernels read the sample's number from device memory, so a
sample costs one graph launch of host time.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.runtime.correctness import CheckReport, CheckSettings, Progress
from warploom.runtime.workbench import Loaded, Workbench, image_digest

STATE_SCHEMA = 1
FIRST_BATCH = 64
BATCH_SECONDS = 1.0


def check_samples(
    bench: Workbench,
    original: bytes,
    candidate: bytes,
    settings: CheckSettings,
    progress: Progress,
    report: CheckReport,
) -> CheckReport:
    """`report` completed by `settings.samples` samples, going on where the state file stands.

    Calls `progress` with done, total, rate (samples/s) and eta_s after each batch. Stops at the
    first batch with a failing sample. Raises `InputError` on a state file of another check,
    `CudaError` when an image faults.
    """
    key = _key(bench, original, candidate, settings)
    done, failed = _read_state(settings.state, key)
    if failed >= 0:
        return _concluded(report, settings, done, failed, 0.0)
    first = done
    loaded = bench.load(original), bench.load(candidate)
    bench.helpers.reset(done)
    graph = bench.device.capture(lambda: _one_sample(bench, *loaded, settings))
    began, batch = time.perf_counter(), FIRST_BATCH
    while done < settings.samples and failed < 0:
        batch = min(batch, settings.batch, settings.samples - done)
        started = time.perf_counter()
        for _ in range(batch):
            bench.device.replay(graph)
        found = bench.workspace.difference()
        took = max(time.perf_counter() - started, 1e-9)
        done += batch
        failed = found.first_sample if found else -1
        _write_state(settings.state, key, done, failed)
        rate = (done - first) / max(time.perf_counter() - began, 1e-9)
        progress(
            {
                "phase": "samples",
                "done": done,
                "total": settings.samples,
                "rate": rate,
                "eta_s": (settings.samples - done) / rate,
            }
        )
        batch = max(1, int(batch * BATCH_SECONDS / took))
    rate = (done - first) / max(time.perf_counter() - began, 1e-9) if done > first else 0.0
    bench.device.release_graph(graph)
    for image in loaded:
        bench.unload(image)
    return _concluded(report, settings, done, failed, rate)


def _one_sample(
    bench: Workbench, original: Loaded, candidate: Loaded, settings: CheckSettings
) -> None:
    space = bench.workspace
    space.fill(space.expected, settings.seed, settings.patterns)
    bench.device.copy(space.work, space.expected, space.layout.nbytes)
    bench.launch(original, space.expected)
    bench.launch(candidate)
    space.compare()
    bench.helpers.advance()


def _concluded(
    report: CheckReport, settings: CheckSettings, done: int, failed: int, rate: float
) -> CheckReport:
    detail = f"sample {failed} of seed {settings.seed} differs" if failed >= 0 else report.detail
    return replace(
        report,
        passed=report.passed and failed < 0,
        samples=done,
        failed_sample=failed,
        samples_per_second=rate,
        detail=detail,
    )


def _key(bench: Workbench, original: bytes, candidate: bytes, settings: CheckSettings) -> str:
    """What a state file belongs to: both images, the launch, the seed and the patterns."""
    parts: list[Any] = [
        image_digest(original),
        image_digest(candidate),
        bench.spec.to_json(),
        settings.seed,
        list(settings.patterns),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_state(path: str, key: str) -> tuple[int, int]:
    """(samples done, failing sample or -1) of the state file; (0, -1) when there is none."""
    if not path or not Path(path).exists():
        return 0, -1
    try:
        data = json.loads(Path(path).read_text())
        schema, owner = data["schema"], data["key"]
        done, failed = int(data["done"]), int(data["failed_sample"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a sampling state file ({error}); remove it") from None
    if schema != STATE_SCHEMA or owner != key:
        raise InputError(
            f"{path}: belongs to another check (other images, launch, seed or patterns); "
            "name another file or remove it"
        )
    return done, failed


def _write_state(path: str, key: str, done: int, failed: int) -> None:
    if path:
        state = {"schema": STATE_SCHEMA, "key": key, "done": done, "failed_sample": failed}
        write_text_atomically(Path(path), json.dumps(state) + "\n")
