"""Claim `gemm-power`: GEMM variants that run alone for a while, at the power limit.

    python bench/gemm_power.py run --out DIR     on the GPU machine, after `bench/gemm.py build`
    python bench/gemm_power.py merge FILE...     evidence of runs into bench/results/gemm_power.json

`bench/gemm.py` takes short samples of many candidates in turn, under one clock: it compares
cycles. A GPU at its power limit gives a kernel that runs alone the clock which its energy for a
multiply allows, and takes tens of milliseconds to settle. Here a candidate runs alone for `SETTLE`
seconds, then is measured over `MEASURED` seconds: its rate, power and SM clock (NVML), and the
clock again with a kernel that counts cycles. Rounds are shuffled.
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import gemm as base  # noqa: E402
import gemm_cases as cases  # noqa: E402
import kernel_bench as kb  # noqa: E402
from warploom.codegen.build import Built  # noqa: E402
from warploom.evidence import Evidence, write_rows  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "gemm_power.json"
SETTLE, MEASURED = 0.2, 0.35  # seconds of each candidate, not counted and counted
GRAPH = 0.04  # seconds of calls between two looks at the clock
SPIN = 100_000  # cycles of the kernel that measures the clock
SMS = 132
CYCLE_FLOPS = {"bf16": 4096, "fp16": 4096, "e4m3": 8192}  # dense, of an SM (machine data)
# case -> the variants beside the default one, by bench/gemm.py's names
CASES: dict[str, tuple[str, ...]] = {
    "time 16384x16384x16384": (
        "128x256",
        "192x256",
        "192x256-along-n",
        "128x384",
        "256x192-along-n",
        "128x128",
        "200x128-across",
        "single",
        "128x256-bands-of-2",
        "128x256-bands-of-32",
    ),
    "time 8192x8192x8192": ("128x256", "192x256", "192x256-along-n", "128x192-at-once"),
    "time 4096x4096x4096": ("128x256",),
    "time 5000x5000x5000": ("152x256-across",),
    "leaky 16384x16384x16384": ("leaky 128x256", "leaky 192x256-along-n"),
}
SM_CLOCK, POWER_INSTANT = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT
PLAIN = "cuBLAS without activation"  # what is left of the baseline if its second kernel is free
POWER_CAP = 4  # nvmlClocksEventReasonSwPowerCap


class _Field(ctypes.Structure):
    """nvmlFieldValue_t of nvml.h."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


class Meter:
    """Samples power and clock of the present GPU in a thread."""

    def __init__(self, torch: Any, period: float = 0.01) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._ask("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        self._ask("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._device))
        self.samples: list[tuple[float, float, int]] = []  # (seconds, watts, MHz)
        self._period = period
        threading.Thread(target=self._watch, daemon=True).start()

    def _ask(self, name: str, *args: Any) -> None:
        status = getattr(self._nvml, name)(*args)
        if status:
            raise RuntimeError(f"{name}: NVML status {status}")

    def limit(self) -> float:
        """The enforced power limit in watts."""
        value = ctypes.c_uint()
        self._ask("nvmlDeviceGetEnforcedPowerLimit", self._device, ctypes.byref(value))
        return value.value * 1e-3

    def reasons(self) -> int:
        """Why the clock is not higher: bits of nvmlClocksEventReasons (4: power cap)."""
        value = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(value))
        return value.value

    def _watch(self) -> None:
        clock, entry = ctypes.c_uint(), _Field()
        while True:
            entry.field, entry.scope = POWER_INSTANT, 0
            self._ask("nvmlDeviceGetFieldValues", self._device, 1, ctypes.byref(entry))
            self._ask("nvmlDeviceGetClockInfo", self._device, SM_CLOCK, ctypes.byref(clock))
            watts = (entry.value & 0xFFFFFFFF) * 1e-3
            self.samples.append((time.perf_counter(), watts, clock.value))
            time.sleep(self._period)


@dataclass
class Reading:
    """One candidate over one window."""

    calls: int = 0
    seconds: float = 0.0  # of calls, without what measured the clock
    watts: float = 0.0  # median of the samples
    sampled_mhz: float = 0.0
    mhz: float = 0.0  # counted cycles over time, between calls
    reasons: int = 0
    elapsed: float = 0.0


class Loop:
    """Calls of one candidate captured in a graph, run until a time has passed."""

    def __init__(self, torch: Any, call: Callable[[], None]) -> None:
        self.torch = torch
        once = kb.timed(torch, call, 3) * 1e-3
        self.calls = max(1, round(GRAPH / once))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.calls):
                call()

    def run(self, seconds: float) -> Reading:
        """Run for at least that long; fills what the GPU's own clocks tell."""
        cuda, found = self.torch.cuda, Reading()
        marks: list[tuple[Any, Any, Any]] = []
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            mark = tuple(cuda.Event(enable_timing=True) for _ in range(3))
            mark[0].record()
            self.graph.replay()
            mark[1].record()
            cuda._sleep(SPIN)
            mark[2].record()
            marks.append(mark)
            if len(marks) > 2:
                marks[-3][2].synchronize()
        marks[-1][2].synchronize()
        found.elapsed = time.perf_counter() - began
        found.calls = self.calls * len(marks)
        found.seconds = sum(a.elapsed_time(b) for a, b, _ in marks) * 1e-3
        spins = [b.elapsed_time(c) for _, b, c in marks]
        found.mhz = SPIN / (statistics.median(spins) * 1e3)
        return found


def read(meter: Meter, loop: Loop) -> Reading:
    """Let a candidate settle, then measure it."""
    loop.run(SETTLE)
    first = time.perf_counter()
    found = loop.run(MEASURED)
    found.reasons = meter.reasons()
    inside = [(w, mhz) for t, w, mhz in list(meter.samples) if t > first]
    found.watts = statistics.median(w for w, _ in inside)
    found.sampled_mhz = statistics.median(mhz for _, mhz in inside)
    return found


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
            readings[variant].append(read(meter, loops[variant]))
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
                    "python bench/gemm_power.py run",
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
    if args.mode == "worker":
        kb.work(case, args)
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
    elif args.mode == "run":
        names = [name for name in CASES if any(o in name for o in args.only.split(","))]
        report(args.out, kb.run_workers(str(Path(sys.argv[0]).resolve()), args, names))
    else:
        sys.exit("build with: python bench/gemm.py build")


if __name__ == "__main__":
    main()
