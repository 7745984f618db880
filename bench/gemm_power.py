"""Claim `gemm-power`: GEMM variants that run alone for a while, at the power limit.

    python -m bench.gemm_power run --out DIR     on the GPU machine, after `bench/gemm.py build`
    python -m bench.gemm_power merge FILE...     evidence of runs into bench/results/gemm_power.json

`bench/gemm.py` takes short samples of many candidates in turn, under one clock: it compares
cycles. A GPU at its power limit gives a kernel that runs alone the clock which its energy for a
multiply allows, and takes tens of milliseconds to settle. Here a candidate runs alone for `SETTLE`
seconds, then is measured over `MEASURED` seconds: its rate, power and SM clock (NVML), and the
clock again with a kernel that counts cycles. Rounds are shuffled.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import gemm as base
from bench import gemm_cases as cases
from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from bench.sitting import CYCLE_FLOPS, POWER_CAP, SMS, Loop, Meter, Reading, settled
from warploom.codegen.compile.build import Built

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "bench" / "results" / "gemm_power.json"
SETTLE, MEASURED = 0.2, 0.35  # seconds of each candidate, not counted and counted
# case -> the variants beside the default one, by bench/gemm.py's names
CASES: dict[str, tuple[str, ...]] = {
    "time 16384x16384x16384": (
        "128x256",
        "192x256",
        "192x256-along-n",
        "128x384",
        "256x192-along-n",
        "128x128",
        "200x128-swap-ab",
        "single",
        "128x256-bands-of-2",
        "128x256-bands-of-32",
    ),
    "time 8192x8192x8192": ("128x256", "192x256", "192x256-along-n", "128x192-at-once"),
    "time 4096x4096x4096": ("128x256",),
    "time 5000x5000x5000": ("152x256-swap-ab",),
    "leaky 16384x16384x16384": ("leaky 128x256", "leaky 192x256-along-n"),
}
PLAIN = "cuBLAS without activation"  # what is left of the baseline if its second kernel is free


def case(name: str, rounds: int) -> dict[str, Any]:
    """One case in a worker: every candidate alone, `rounds` times in shuffled order."""
    torch = kb.load_torch()
    what, shape = name.split(" ", 1)
    m, n, k = (int(part) for part in shape.split("x"))
    chosen = base.default_of(what, (m, n, k))
    names = tuple(dict.fromkeys((chosen, *CASES[name])))
    config = cases.VARIANTS[names[0]][0]
    values = cases.operands(torch, config, m, n, k, 0)
    calls = {
        **base.baselines(torch, what),
        **{variant: base.caller(torch, variant) for variant in names},
    }
    checks = base.verify(torch, config, values, calls)
    if what == "leaky":
        calls[PLAIN] = base.baselines(torch, "time")["cuBLAS"]

    def bound(call: base.Call) -> Callable[[], None]:
        return lambda: call(values)

    loops = {variant: Loop(torch, bound(call)) for variant, call in calls.items()}
    meter, order, shuffle = Meter(torch), list(loops), random.Random(0)
    readings: dict[str, list[Reading]] = {variant: [] for variant in order}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for variant in order:
            readings[variant].append(settled(meter, loops[variant], SETTLE, MEASURED))
    return {
        "shape": shape if what in ("time", "promoted") else f"{shape} {what}",
        "dtype": f"{config.dtype.name}{' promoted' if what == 'promoted' else ''}",
        "default": chosen,
        "work": 2.0 * m * n * k,
        "limit": meter.limit(),
        "baselines": list(base.baselines(torch, what)),
        "checks": checks,
        "readings": {name: [vars(r) for r in found] for name, found in readings.items()},
    }


def summary(result: Mapping[str, Any], name: str) -> dict[str, float]:
    """Medians over the rounds of one candidate."""
    found: Sequence[Mapping[str, Any]] = result["readings"][name]
    work = result["work"]
    top = SMS * CYCLE_FLOPS[result["dtype"].split()[0]] * 1e6

    def median(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.median(value(r) for r in found)

    return {
        "rate": median(lambda r: r["calls"] * work / r["seconds"] * 1e-12),
        "watts": median(lambda r: r["watts"]),
        "mhz": median(lambda r: r["mhz"]),
        "busy": median(lambda r: r["calls"] * work / r["seconds"] / (top * r["mhz"])),
    }


def _shown(value: float) -> float:
    return round(value, 3) if value < 10 else round(value)


def report(out: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Evidence rows and a table of a run."""
    env = kb.environment()
    rows: list[list[object]] = [
        ["shape", "type", "kernel", "TFLOP/s", "W", "MHz", "busy", "pJ/FLOP", "ratio", "check"]
    ]
    evidence: list[Evidence] = []
    for result in (r for r in results if "readings" in r):
        found = {name: summary(result, name) for name in result["readings"]}
        bases = {name: found[name]["rate"] for name in result["baselines"]}
        best = max(bases, key=lambda name: bases[name])
        for name, values in found.items():
            ratio = values["rate"] / bases[best]
            check = result["checks"].get(name, "")
            capped = all(r["reasons"] & POWER_CAP for r in result["readings"][name])
            # At its limit the GPU takes that power; NVML's own readings lag behind.
            values["pJ/FLOP"] = result["limit"] / values["rate"] if capped else math.nan
            rows.append([result["shape"], result["dtype"], name, *values.values(), ratio, check])
            if name in bases or name == PLAIN:
                continue
            built = Built.read(base.FOLDER / "plain" / kb.slug(name))
            evidence.append(
                Evidence(
                    "gemm-power",
                    f"gemm {name}",
                    result["shape"],
                    result["dtype"],
                    env["device"],
                    env["driver"],
                    built.resources.compiler,
                    env["date"],
                    kb.command_line(),
                    "TFLOP/s",
                    "higher",
                    values["rate"],
                    bases,
                    ratio,
                    samples=len(result["readings"][name]),
                    checks={
                        "numerics": check,
                        **{key: _shown(x) for key, x in values.items() if key != "rate"},
                        **{f"{best} {key}": _shown(x) for key, x in found[best].items()},
                        **({"plain": round(found[PLAIN]["rate"], 1)} if PLAIN in found else {}),
                    },
                    notes=f"torch {env['torch']}; {result['limit']:.0f} W limit; alone for "
                    f"{MEASURED} s after {SETTLE} s",
                )
            )
    write_rows(out / "gemm_power.json", evidence)
    print(kb.table(rows))


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
    elif args.mode == "run":
        names = [name for name in CASES if any(o in name for o in args.only.split(","))]
        report(args.out, kb.run_workers(case, args, names))
    else:
        sys.exit("build with: python -m bench.gemm build")


if __name__ == "__main__":
    main()
