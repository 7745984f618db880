"""Evidence for derivations: `python -m bench.derive` writes bench/results/derive.json.

Rows: seconds from the formula to FlashAttention in a fresh process, with lemmas searched for and
registered; percent of a proven bound of each derivation; values moved by execution against the
formula; integer tiles against exhaustive search. DRAM bytes beside profiler counters are in
bench/counters.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import random
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.evidence import Evidence, write_rows
from warploom.derive.cost import cost
from warploom.derive.cost.integers import choose
from warploom.derive.derive import derive
from warploom.derive.formula.library import formula
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 116224
COMMAND = "python -m bench.derive"
DERIVED = (
    "attention",
    "spherical",
    "rmsnorm_matmul",
    "layernorm_matmul",
    "cross_entropy",
    "linear_attention",
    "gqa",
    "gqa_decode",
    "mla",
    "causal",
    "variance",
    "matmul",
)
PROBLEMS = 240
COLD_STARTS = 10


def row(
    kernel: str,
    shape: str,
    unit: str,
    better: str,
    ours: float,
    name: str,
    base: float,
    notes: str,
    samples: int = 1,
    **checks: object,
) -> Evidence:
    """One evidence row with this machine's provenance."""
    ratio = ours / base if better == "higher" else base / ours
    device = f"{platform.machine()} CPU, Python {platform.python_version()}"
    return Evidence(
        "derive",
        kernel,
        shape,
        "fp64",
        device,
        "",
        "",
        datetime.now(UTC).date().isoformat(),
        COMMAND,
        unit,
        better,
        ours,
        {name: base},
        ratio,
        samples=samples,
        checks=checks,
        notes=notes,
    )


def cold_start(lemmas: bool) -> Evidence:
    """Process start to derivation, with or without the registered lemmas: the best wall clock, and
    the best processor time."""
    code = (
        "from warploom.derive import derive, formula\n"
        f"d = derive(formula('attention'), memory={MEMORY}, lemmas={lemmas})\n"
        "assert len(d.kernels) == 1"
    )
    times: list[float] = []
    worked: list[float] = []
    for _ in range(COLD_STARTS):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(time.perf_counter() - start)
        worked.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    how = "registered lemmas" if lemmas else "no lemma registered: the search finds it"
    return row(
        "attention",
        "q=x=4096 d=128" + ("" if lemmas else ", --no-lemmas"),
        "s",
        "lower",
        min(worked),
        "limit",
        2.0,
        f"formula to FlashAttention, imports included; {how}; processor time, best of the samples "
        "(the machine was shared, its wall clock is in the checks)",
        COLD_STARTS,
        wall_seconds=round(min(times), 3),
    )


def percent_of_bound(name: str) -> Evidence:
    """How far a derivation is from a proven bound, with its numeric check."""
    start = time.perf_counter()
    found = derive(formula(name), memory=MEMORY)
    seconds = time.perf_counter() - start
    error, moved = found.verify()
    sizes = " ".join(f"{axis}={size}" for axis, size in found.diagram.sizes)
    return row(
        name,
        sizes,
        "values",
        "lower",
        found.traffic,
        f"proven {found.bound.name} bound",
        found.bound.value,
        f"M={MEMORY} values; lemmas: {', '.join(found.lemmas) or 'none'}",
        error=error,
        seconds=round(seconds, 3),
        percent_of_bound=round(found.percent_of_bound, 2),
        executed_equals_formula="pass" if moved == found.shrunk().traffic else "fail",
    )


def integers() -> Evidence:
    """Worst ratio to exhaustive search over random problems."""
    rng = random.Random(42)
    cases = (("matmul", "g_a g_c s_b"), ("attention", "g_q s_x"), ("mlp", "g_m s_h s_d"))
    worst, solved = 1.0, 0
    while solved < PROBLEMS:
        name, nest = cases[solved % len(cases)]
        sizes = {axis: rng.randint(2, 22) for axis in formula(name).size}
        loops = [Loop(s[2:], "group" if s[0] == "g" else "stream") for s in nest.split()]
        made = make_kernel(formula(name).resized(sizes), loops)
        assert not isinstance(made, Refusal)
        multiples = {axis: rng.choice((1, 1, 2, 3, 4)) for axis in sizes}
        capacity = rng.randint(60, 900)
        best = exhaustive(made, capacity, multiples)
        if math.isinf(best):
            continue
        solved += 1
        worst = max(worst, choose(made, capacity, multiples).score / best)
    return row(
        "integer tiles",
        f"{PROBLEMS} random problems",
        "worst ratio",
        "lower",
        worst,
        "allowed",
        1.05,
        "score of the chosen tiles over exhaustive search",
        PROBLEMS,
    )


def exhaustive(made: Kernel, capacity: float, multiples: dict[str, int]) -> float:
    """The best score by trying every legal combination."""
    best = math.inf
    options = [
        [
            t
            for t in range(1, made.body.size[loop.axis] + 1)
            if t % multiples.get(loop.axis, 1) == 0 or t == made.body.size[loop.axis]
        ]
        for loop in made.loops
    ]
    columns, moved = cost.memory(made), cost.traffic(made)
    for tiles in itertools.product(*options):
        values = {axis: float(size) for axis, size in made.body.size.items()}
        for loop, tile in zip(made.loops, tiles, strict=True):
            values[loop.axis] = math.ceil(made.body.size[loop.axis] / tile) * tile
            values[loop.symbol] = float(tile)
        if all(column.value(values) <= capacity for column in columns):
            best = min(best, moved.value(values))
    return best


def main() -> None:
    """Write all rows."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        cold_start(lemmas=False),
        cold_start(lemmas=True),
        *(percent_of_bound(name) for name in DERIVED),
        integers(),
    ]
    write_rows(ROOT / "bench" / "results" / "derive.json", rows)
    for entry in rows:
        print(f"{entry.kernel:18} {entry.ours:.4g} {entry.unit} against {dict(entry.baselines)}")


if __name__ == "__main__":
    main()
