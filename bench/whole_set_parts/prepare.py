"""Bases and model-climbed starts of the suite's kernels, proved and stored."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Final

from bench.stored_schedules import ScheduleSet
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.lineage import Base, make_base, prove, write_steps
from warploom.search.players import PLAYERS
from warploom.search.tournament import BaseModel

# How many bases a kernel gets, and from how many of them (the original first) the model climbs.
BASES: Final = {
    "attention": (5, 2),
    "feed_forward": (4, 2),
    "gemm_leaky_relu": (4, 0),
    "batched_gemm": (2, 0),
    "layernorm": (1, 1),
    "softmax": (1, 1),
    "rmsnorm": (1, 0),
    "skinny_gemm": (1, 0),
}
CLIMB: Final = Budget(90.0, candidates=1500)
TRIES: Final = 4


def prepare(schedules: Path, folder: Path, kernels: tuple[str, ...], seed: int) -> None:
    """Write `KERNEL/` with the original, its launch, and one folder for every base."""
    for name in kernels:
        stored = ScheduleSet.load(schedules / f"{name}.xz")
        home = folder / name
        write_bytes_atomically(home / "original.cubin", stored.cubin)
        head = {"kernel": stored.kernel, "launch": stored.about["launch"]}
        write_text_atomically(home / "kernel.json", json.dumps(head) + "\n")
        original = parse(stored.cubin, name)
        wanted, climbs = BASES[name]
        bases = [Base(original)]
        seen = {original.digest}
        for number in range(wanted * TRIES):
            if len(bases) > wanted:
                break
            rng = random.Random(f"{name}/{seed}/{number}")
            base = make_base(original, stored.kernel, rng)
            if base.cubin.digest in seen:
                continue
            seen.add(base.cubin.digest)
            findings = prove(original, stored.kernel, base.steps, AliasMode.TRITON)
            print(f"{name} base {len(bases)}: {base.why}, {len(findings)} findings", flush=True)
            if not findings:
                write_steps(home / f"base{len(bases)}", base.steps)
                bases.append(base)
        for number in range(min(climbs, len(bases))):
            began = time.monotonic()
            base = bases[number]
            found = run_search(
                base.cubin,
                PLAYERS["greedy"],
                BaseModel(original, base.cubin, stored.kernel),
                CLIMB,
                SearchOptions(
                    stored.kernel, AliasMode.TRITON, seed=seed, elsewhere=bool(base.steps)
                ),
            )
            if found.best and found.best[0][0] > 1.0:
                score, candidate = found.best[0]
                write_bytes_atomically(home / f"start{number}.cubin", candidate.cubin)
                seconds = time.monotonic() - began
                print(f"{name} start {number}: model says {score:.4f}, {seconds:.0f} s", flush=True)
