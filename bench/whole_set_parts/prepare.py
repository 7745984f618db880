"""The suite's kernels with their launches, and where the model climbs from them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

from bench.stored_schedules import ScheduleSet
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.players import PLAYERS

# Kernels on which the model climbs first.
CLIMBED: Final = ("attention", "feed_forward", "layernorm", "softmax")
CLIMB: Final = Budget(90.0, candidates=1500)


def prepare(schedules: Path, folder: Path, kernels: tuple[str, ...], seed: int) -> None:
    """Write `KERNEL/` with the original, its launch, and where the model climbed to."""
    for name in kernels:
        stored = ScheduleSet.load(schedules / f"{name}.xz")
        home = folder / name
        write_bytes_atomically(home / "original.cubin", stored.cubin)
        head = {"kernel": stored.kernel, "launch": stored.about["launch"]}
        write_text_atomically(home / "kernel.json", json.dumps(head) + "\n")
        if name not in CLIMBED:
            continue
        original, began = parse(stored.cubin, name), time.monotonic()
        found = run_search(
            original,
            PLAYERS["greedy"],
            ModelEvaluator(original, stored.kernel),
            CLIMB,
            SearchOptions(stored.kernel, AliasMode.TRITON, seed=seed),
        )
        if found.best and found.best[0][0] > 1.0:
            score, candidate = found.best[0]
            write_bytes_atomically(home / "start.cubin", candidate.cubin)
            seconds = time.monotonic() - began
            print(f"{name} start: model says {score:.4f}, {seconds:.0f} s", flush=True)
