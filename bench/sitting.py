"""The protocol of the headline figures: several sittings, short bursts and kernels left alone.

A sitting is one process. In it every candidate of a case is timed in two ways.

* Bursts: `BURST` seconds of calls after `REST` seconds of rest, in rounds of shuffled order. The
  mean power stays below the limit, so that the clock does not follow the kernel and a ratio is one
  of cycles. A kernel that counts cycles reads the clock behind each burst.
* Alone: `SETTLE` seconds of calls that do not count, then `ALONE` seconds that do. A kernel that
  takes more than the power limit gets the clock that its energy allows.

A row needs `LEAST` sittings. Its ratio is the geometric mean over the sittings of the median ratio
of a round; its interval is Student's over the sittings, so that it holds what differs between
processes and not only what differs between rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench import kernel_bench as kb
from bench.evidence import Evidence
from bench.kernel_bench import in_shuffled_rounds
from warploom import machine
from warploom.errors import InputError

BURST, REST = 0.004, 0.012  # seconds of a sample, and of rest before it
SETTLE, ALONE = 0.5, 1.0  # seconds of a kernel alone: not counted, and counted
GRAPH = 0.04  # seconds of calls between two looks at the clock
SPIN = 400_000  # cycles of the kernel that reads the clock
LEAST = 3  # sittings
CONTROL = "control"  # a second copy of the first baseline
# Student's t, two-sided 95 %, by degrees of freedom.
STUDENT = {2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}
SMS = machine.load("h200").integer("sm.count")
CYCLE_FLOPS = {"bf16": 4096, "fp16": 4096, "e4m3": 8192}  # dense, of an SM (machine data)
Calls = Mapping[str, Callable[[], Any]]
Interval = tuple[float, float, float]


def interval(ratios: Sequence[float]) -> Interval:
    """(geometric mean, low, high) of one ratio a sitting, 95 %."""
    if len(ratios) < LEAST:
        raise InputError(f"an interval over {len(ratios)} sittings: expected at least {LEAST}")
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    factor = STUDENT[min(len(logs) - 1, max(STUDENT))]
    half = factor * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


class Timer(Protocol):
    """What times candidates by name: a GPU, or nothing at all in a dry run."""

    names: list[str]
    refused: dict[str, str]

    def again(self, name: str) -> None:
        """Take a second copy of a candidate as the control."""
        ...

    def burst(self, name: str) -> tuple[float, float]:
        """Milliseconds a call and MHz."""
        ...

    def alone(self, name: str) -> Reading:
        """One candidate at the power limit."""
        ...


@dataclass
class Reading:
    """One candidate alone over one window."""

    calls: int = 0
    seconds: float = 0.0  # of calls, without what read the clock
    watts: float = 0.0  # median of the samples
    sampled_mhz: float = 0.0
    mhz: float = 0.0  # counted cycles over time, between calls
    reasons: int = 0  # bits of nvmlClocksEventReasons (4: power cap)
    elapsed: float = 0.0


def measure(timer: Timer, rounds: int, alone: bool, seed: int) -> dict[str, dict[str, Any]]:
    """What one sitting sees of one case: bursts in shuffled rounds, then each candidate alone."""
    samplers = {name: functools.partial(timer.burst, name) for name in timer.names}
    bursts = {
        name: {"ms": [ms for ms, _ in found], "mhz": [round(mhz) for _, mhz in found]}
        for name, found in in_shuffled_rounds(samplers, rounds, seed).items()
    }
    order = random.Random(seed).sample(timer.names, len(timer.names))
    readings = {name: asdict(timer.alone(name)) for name in order} if alone else {}
    return {"bursts": bursts, "alone": readings}


class Dry:
    """Calls every candidate once and makes times up: whether a sitting would run at all."""

    def __init__(self, calls: Calls, eager: bool = False) -> None:
        self.names, self.refused = list(calls), dict[str, str]()
        for call in calls.values():
            call()

    def again(self, name: str) -> None:
        """One candidate more."""
        assert name in self.names
        self.names.append(CONTROL)

    def burst(self, name: str) -> tuple[float, float]:
        """A made-up time."""
        return 1.0 + 0.01 * self.names.index(name), 1980.0

    def alone(self, name: str) -> Reading:
        """A made-up reading."""
        return Reading(1000, self.burst(name)[0], 700.0, 1400.0, 1400.0, 4, 1.0)


class Gpu:
    """Candidates on the present GPU, captured into graphs unless `eager`: then what the host does
    is timed too, and only work that the GPU has not finished hides it."""

    def __init__(self, torch: Any, calls: Calls, eager: bool = False) -> None:
        self._torch, self._eager = torch, eager
        self.names: list[str] = []
        self.refused: dict[str, str] = {}
        self._runs: dict[str, tuple[Callable[[], None], int]] = {}
        self._calls = dict(calls)
        self._meter: Meter | None = None
        for name, call in calls.items():
            try:
                self._runs[name] = self._captured(call, BURST)
            except Exception as error:  # a library may refuse to be captured
                self.refused[name] = f"{type(error).__name__}: {error}"[:200]
            else:
                self.names.append(name)

    def again(self, name: str) -> None:
        """A second copy of a candidate, captured anew, as the control."""
        self._calls[CONTROL] = self._calls[name]
        self._runs[CONTROL] = self._captured(self._calls[name], BURST)
        self.names.append(CONTROL)

    def _captured(self, call: Callable[[], Any], seconds: float) -> tuple[Callable[[], None], int]:
        for _ in range(3):
            call()
        once = kb.timed(self._torch, call, 5) * 1e-3
        repeats = max(1, min(1000, round(seconds / once)))

        def every() -> None:
            for _ in range(repeats):
                call()

        if self._eager:
            return every, repeats
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            every()
        return graph.replay, repeats

    def burst(self, name: str) -> tuple[float, float]:
        """One sample after a rest; the GPU waits in a spinning kernel until all is queued."""
        run, repeats = self._runs[name]
        cuda = self._torch.cuda
        marks = [cuda.Event(enable_timing=True) for _ in range(3)]
        time.sleep(REST)
        if not self._eager:
            cuda._sleep(SPIN)
        marks[0].record()
        run()
        marks[1].record()
        cuda._sleep(SPIN)
        marks[2].record()
        marks[2].synchronize()
        mhz = SPIN / (marks[1].elapsed_time(marks[2]) * 1e3)
        return marks[0].elapsed_time(marks[1]) / repeats, mhz

    def alone(self, name: str) -> Reading:
        """One candidate: settle, then measure."""
        if self._meter is None:
            self._meter = Meter(self._torch)
        return settled(self._meter, Loop(self._torch, self._calls[name]), SETTLE, ALONE)


class Loop:
    """Calls of one candidate captured in a graph, run until a time has passed."""

    def __init__(self, torch: Any, call: Callable[[], Any]) -> None:
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
            cuda._sleep(SPIN // 4)
            mark[2].record()
            marks.append(mark)
            if len(marks) > 2:
                marks[-3][2].synchronize()
        marks[-1][2].synchronize()
        found.elapsed = time.perf_counter() - began
        found.calls = self.calls * len(marks)
        found.seconds = sum(a.elapsed_time(b) for a, b, _ in marks) * 1e-3
        spins = [b.elapsed_time(c) for _, b, c in marks]
        found.mhz = SPIN // 4 / (statistics.median(spins) * 1e3)
        return found


def settled(meter: Meter, loop: Loop, settle: float, measured: float) -> Reading:
    """Let a candidate settle, then measure it."""
    loop.run(settle)
    first = time.perf_counter()
    found = loop.run(measured)
    found.reasons = meter.reasons()
    inside = [(w, mhz) for t, w, mhz in list(meter.samples) if t > first]
    found.watts = statistics.median(w for w, _ in inside)
    found.sampled_mhz = statistics.median(mhz for _, mhz in inside)
    return found


SM_CLOCK, POWER_INSTANT = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT
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


@dataclass(frozen=True)
class Seen:
    """What one sitting saw of one case: rates in TFLOP/s by name, ratios to the first baseline."""

    case: Mapping[str, Any]
    rates: Mapping[str, float]
    samples: Mapping[str, Sequence[float]]  # milliseconds a call, by round
    mhz: Mapping[str, float]
    watts: Mapping[str, float]
    capped: Mapping[str, bool]

    def ratio(self, name: str, base: str) -> float:
        """The median over the rounds of base time / its time: above 1, `name` is faster."""
        pairs = zip(self.samples[base], self.samples[name], strict=True)
        return statistics.median(b / a for b, a in pairs)


def seen_in_bursts(case: Mapping[str, Any]) -> Seen:
    """The short samples of a case in one sitting."""
    bursts = case["bursts"]
    samples = {name: found["ms"] for name, found in bursts.items()}
    return Seen(
        case,
        {name: case["work"] * 1e-9 / statistics.median(ms) for name, ms in samples.items()},
        samples,
        {name: statistics.median(found["mhz"]) for name, found in bursts.items()},
        {},
        {},
    )


def seen_alone(case: Mapping[str, Any]) -> Seen:
    """The long samples of a case in one sitting: one each."""
    alone = case["alone"]
    samples = {name: [1e3 * r["seconds"] / r["calls"]] for name, r in alone.items()}
    return Seen(
        case,
        {name: case["work"] * 1e-9 / ms[0] for name, ms in samples.items()},
        samples,
        {name: r["mhz"] for name, r in alone.items()},
        {name: r["watts"] for name, r in alone.items()},
        {name: bool(r["reasons"] & POWER_CAP) for name, r in alone.items()},
    )


def read_sitting(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the header, the cases that were timed) of a sitting's file: one JSON line each."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not the lines of a sitting ({error})") from None
    if not lines or "argv" not in lines[0]:
        raise InputError(f"{path}: the first line says no argv, expected a sitting's header")
    header = lines[0]
    if header.get("dry"):
        raise InputError(f"{path}: a dry run has made-up times, expected a sitting on a GPU")
    return header, [line for line in lines[1:] if "bursts" in line]


def rows_of(
    paths: Sequence[Path], claim: str, look: Callable[[Mapping[str, Any]], Seen]
) -> tuple[list[Evidence], list[str]]:
    """The rows of several sittings, and the cases that fewer than `LEAST` of them timed."""
    if len({path.resolve() for path in paths}) < LEAST:
        raise InputError(f"rows of {len(paths)} sittings: expected at least {LEAST}")
    together: dict[str, list[tuple[dict[str, Any], Seen]]] = {}
    starts: set[tuple[str, str]] = set()
    for path in paths:
        header, cases = read_sitting(path)
        # Two may begin in the same second: they have other samples.
        began = header["started"], json.dumps([case["bursts"] for case in cases])
        if began in starts:
            raise InputError(f"{path}: began at {header['started']} as another file did")
        starts.add(began)
        for case in cases:
            if look is seen_alone and not case["alone"]:
                continue
            together.setdefault(case["name"], []).append((header, look(case)))
    rows: list[Evidence] = []
    short: list[str] = []
    for name, found in together.items():
        if len(found) < LEAST:
            short.append(f"{name}: {len(found)} sittings")
            continue
        rows += _rows(claim, found)
    return rows, short


def _rows(claim: str, found: Sequence[tuple[dict[str, Any], Seen]]) -> list[Evidence]:
    header, first = found[0]
    every = [seen for _, seen in found]
    # A library that one sitting refused is no baseline of the row.
    bases = [b for b in first.case["baselines"] if all(b in s.samples for s in every)]
    mean = {b: statistics.geometric_mean([s.rates[b] for s in every]) for b in bases}
    best = max(mean, key=lambda name: mean[name])
    _, low, high = interval([s.ratio(CONTROL, first.case["baselines"][0]) for s in every])
    fastest = max(s.rates[b] for s in every for b in bases)
    own = [n for n in first.case["checks"] if all(n in s.samples for s in every)]
    rows: list[Evidence] = []
    for name in own:
        ratio, least, most = interval([s.ratio(name, best) for s in every])
        rate = statistics.median(s.rates[name] for s in every)
        kind, door = first.case["dtype"], name != "default"
        rows.append(
            Evidence(
                claim,
                f"{claim} {name}",
                first.case["shape"],
                kind,
                header["device"],
                header["driver"],
                first.case["compiler"],
                header["date"],
                " ; ".join(dict.fromkeys(h["argv"] for h, _ in found)),
                "TFLOP/s",
                "higher",
                rate,
                {b: statistics.median(s.rates[b] for s in every) for b in bases},
                ratio,
                (least, most),
                (low, high),
                sum(len(s.samples[name]) for s in every),
                {
                    "numerics": _numerics(name, every),
                    "sittings": [_sitting(h, s, name, bases, best) for h, s in found],
                    "fastest baseline": round(fastest, 1),
                    "over the fastest": round(rate / fastest, 3),
                    "of the limit": round(_share(every, name, kind), 3),
                    "refused": first.case["refused"],
                    **({"same image": all(s.case["same image"] for s in every)} if door else {}),
                },
                f"torch {header['torch']}; {first.case['default']}",
            )
        )
    return rows


def _numerics(name: str, every: Sequence[Seen]) -> str:
    found = [s.case["checks"].get(name, "not checked") for s in every]
    return next((one for one in found if one != "pass"), "pass")


def _share(every: Sequence[Seen], name: str, kind: str) -> float:
    """Of the tensor cores' cycles, at the clock that was read."""
    top = SMS * CYCLE_FLOPS[kind.split(maxsplit=1)[0]] * 1e-6
    return statistics.median(s.rates[name] / (top * s.mhz[name]) for s in every)


def _sitting(
    header: Mapping[str, Any], seen: Seen, name: str, bases: Sequence[str], best: str
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "started": header["started"],
        "rounds": len(seen.samples[name]),
        "ours": round(seen.rates[name], 1),
        "baselines": {b: round(seen.rates[b], 1) for b in bases},
        "ratio": round(seen.ratio(name, best), 4),
        "control": round(seen.ratio(CONTROL, seen.case["baselines"][0]), 4),
        "mhz": round(seen.mhz[name]),
        f"{best} mhz": round(seen.mhz[best]),
    }
    if seen.watts:
        found |= {"watts": round(seen.watts[name]), "capped": seen.capped[name]}
    return found


def with_note(rows: Sequence[Evidence], note: str) -> list[Evidence]:
    """The rows, each saying one thing more."""
    return [replace(row, notes=f"{row.notes}; {note}") for row in rows]


def arguments(description: str, cases: Sequence[str], modes: Sequence[str]) -> argparse.Namespace:
    """The command line of a script that has sittings."""

    def front_door(text: str) -> tuple[str, Path]:
        name, equals, folder = text.partition("=")
        if not equals or name not in cases:
            raise argparse.ArgumentTypeError(f"{text!r}: expected CASE=FOLDER, CASE a timed one")
        return name, Path(folder)

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=modes)
    parser.add_argument("files", nargs="*", type=Path, help="merge: files of sittings")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/results")))
    parser.add_argument("--name", default="one", help="sit: the file is sitting-NAME.jsonl")
    parser.add_argument("--only", default="", help="cases that contain one of these, by commas")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the order of rounds")
    parser.add_argument("--dry", action="store_true", help="no GPU, made-up times, nothing merged")
    parser.add_argument("--no-alone", action="store_true", help="bursts only")
    parser.add_argument("--front-door", action="append", type=front_door, default=[])
    parser.add_argument("--without", action="append", default=[], help="a baseline to leave out")
    return kb.read_by_mode(parser, {"build": ("only",), "merge": ("files", "only")})


def kept(calls: Calls, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The baselines that the command line leaves, and those that it does not."""
    left_out = dict.fromkeys((n for n in calls if n in args.without), "left out by --without")
    return {name: call for name, call in calls.items() if name not in left_out}, left_out


def sit(case: Callable[..., Any], args: argparse.Namespace, names: Sequence[str]) -> int:
    """A sitting: its file, a header and then a line a case as they come; the exit status."""
    args.out.mkdir(parents=True, exist_ok=True)
    file = f"sitting-{args.name}.jsonl"
    header = {
        "argv": kb.command_line(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "rounds": args.rounds,
        "dry": args.dry,
        **({} if args.dry else kb.environment()),
    }
    (args.out / file).write_text(json.dumps(header) + "\n")
    results = kb.run_workers(functools.partial(case, options=args), args, names, file)
    failed = [r for r in results if "error" in r]
    failed += [r for r in results if any(c != "pass" for c in r.get("checks", {}).values())]
    rows: list[list[object]] = [["case", "kernel", "TFLOP/s", "best", "TFLOP/s", "ratio", "MHz"]]
    for result in (r for r in results if "bursts" in r):
        seen = seen_in_bursts(result)
        best = max(result["baselines"], key=lambda name: seen.rates[name])
        for own in result["checks"]:
            rates = seen.rates[own], best, seen.rates[best], seen.ratio(own, best)
            rows.append([result["name"], own, *rates, seen.mhz[own]])
    print(kb.table(rows))
    refused = {r["name"]: r["refused"] for r in results if r.get("refused")}
    print(json.dumps({"refused": refused}, indent=1)[:4000])
    for result in failed:
        print(json.dumps(result)[:400])
    print(f"{len(rows) - 1} rows, {len(failed)} failed: {args.out / file}")
    return 1 if failed else 0
