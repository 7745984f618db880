"""How well the model of a launch ranks the points of a search: each is timed, its loops counted.

    python -m bench.engine_points build DIR          of the points that searches kept, the fastest
                                                     of each choice of sizes and rules
    python -m bench.engine_points run DIR --out OUT  on a GPU machine: claim `engine-model`
    python -m bench.engine_points merge FILE DIR     into bench/results/engine_points.json, with
                                                     what the model says now of the cubins in DIR

The searches are those of `bench.engine build`, which comes before. A point is built twice, once
with a counter around every steady loop (`compile.probe`); that one runs in bursts too, so that the
cycles of an iteration and the clock are those of the time beside them. What a launch takes besides
its loops is the rest: `outside`, in cycles of an SM at that clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import kernel_bench as kb
from bench import sitting
from bench.engine import FAR, ROUNDS, Case, cases, measured
from bench.engine_model import operands
from bench.evidence import Evidence, read_rows, write_rows
from bench.tables import errors
from warploom import machine
from warploom.autosched.points import Point
from warploom.codegen.compile.build import Built, compile_source, program_key
from warploom.codegen.compile.probe import LOG, WORDS, Reading, probe, readings
from warploom.codegen.ir.plan import KernelSchedule
from warploom.engine.search import compiler
from warploom.engine.store import PointStore
from warploom.errors import WarploomError
from warploom.files import cache_folder, write_text_atomically
from warploom.perf.launch_time import MODEL, Launch
from warploom.perf.replay import replay
from warploom.runtime.driver import CudaDevice
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "engine_points.json"
GPU, COUNTED, BURSTS = "h200", "counted", 5
SMS = machine.load(GPU).integer("sm.count")
MOST = 8  # points of a case
TITLES = (
    "attention 128 full 4x16x4096",
    "attention 128 causal 4x16x4096",
    "attention 64 full 4x32x4096",
    "attention 64 causal 4x32x4096",
    "gemm 4096x4096x4096",
    "gemm 5000x5000x5000",
)
# Points that a search may not put first: (sizes, rules, order, plan) of attention and of GEMM.
SOFTMAX = ("in_powers_of_two", "divide_once_a_row", "skip_masked_blocks", "mask_in_place")
SPLIT, SWAP = "split_mask_loop", "swap_operands"
ATTENTIONS = (
    ("128", "128", (*SOFTMAX, "optimistic_rescale"), "overlapped-early", ("task=overlap",)),
    ("192", "80", (*SOFTMAX, "optimistic_rescale"), "pingpong-early", ("task=overlap",)),
    ("192", "80", (*SOFTMAX, SPLIT, "optimistic_rescale"), "pingpong-early", ("task=prefetch",)),
)
GEMMS = (
    ("128", "256", (), "inflight", ("raster=8", "cluster=m_tile:2")),
    ("256", "128", (SWAP,), "inflight", ()),
    ("256", "128", (SWAP,), "inflight", ("raster=8",)),
    ("256", "128", (SWAP,), "inflight", ("raster=8", "cluster=n_tile:2")),
)
# Of each loop: cycles an iteration, GHz, cycles of all groups in a launch.
Counts = Mapping[str, tuple[float, float, float]]


def kept(case: Case, most: int) -> list[Point]:
    """Of the points that searches predicted at the case's sizes, the fastest of each choice of
    sizes and rules, the fastest of all first."""
    fastest: dict[object, tuple[float, Point]] = {}
    model = f"{GPU}, model {MODEL}"
    with closing(PointStore(cache_folder() / "points.sqlite")) as store:
        for settings in case.space.sizes():
            key = program_key(str(case.space.textbook(settings)))
            for sizes, text, row in store.useful(key, model, compiler()):
                point = Point.from_json(json.loads(text.partition(" in ")[0]))
                here = json.loads(sizes) == case.sizes and row.predicted is not None
                kind, told = (settings, point.rules), row.predicted or 0.0
                if here and (kind not in fastest or told < fastest[kind][0]):
                    fastest[kind] = told, point
    ranked = sorted(fastest.values(), key=lambda pair: pair[0])
    return [point for _, point in ranked[:most]]


def others(case: Case) -> Iterator[Point]:
    """Points that are timed whatever a search says of them."""
    names, points = ("tile_m", "tile_n"), GEMMS
    balance: tuple[str, ...] = ()
    if case.name == "attention":
        names, points = ("rows_of_a_tile", "keys_of_a_tile"), ATTENTIONS
        balance = ("balance=dynamic", "raster=16") if case.known["causal"] else ()
    for *sizes, rules, order, plan in points:
        yield Point(tuple(zip(names, sizes, strict=True)), rules, order, (*balance, *plan))


def build(out: Path, some: Mapping[str, Case]) -> None:
    """Build the points of every case, plain and with counters."""
    for title, case in some.items():
        noted: list[dict[str, Any]] = []
        for point in dict.fromkeys((*kept(case, MOST), *others(case))):
            try:
                folder = out / case.folder / str(len(noted))
                noted.append(built(case, point, folder))
            except WarploomError as error:
                print(f"{title}: {point}: {error}", flush=True)
                continue
            print(f"{title}: {point}: {noted[-1]['predicted']['microseconds']:.1f} us", flush=True)
            write_text_atomically(out / case.folder / "case.json", json.dumps(noted, indent=1))


def built(case: Case, point: Point, folder: Path) -> dict[str, Any]:
    """Build a point into a folder; what is noted of it."""
    plain = case.space.selected(point, GPU).build()
    plain.write(folder)
    source, loops = probe(plain.source)
    cubin, resources = compile_source(source, plain.arch, ("spills", "stack"))
    replace(plain, source=source, cubin=cubin, resources=resources).write(folder / COUNTED)
    return {"point": point.to_json(), "loops": loops, **predicted(case, point, plain.cubin)}


def predicted(case: Case, point: Point, cubin: bytes) -> dict[str, Any]:
    """What the model says of a launch, as plain data: of the whole, and of its loops."""
    selected = case.space.selected(point, GPU)
    assert isinstance(selected.schedule, KernelSchedule)
    launch = Launch(selected.program, selected.launch, case.sizes, GPU)
    walked = replay(selected.program, selected.schedule, cubin, rates=launch.rates())
    found, resident = launch.time(walked), selected.launch.resident
    inside = sum(
        float(np.maximum(0, trips - one.ahead).sum()) * one.cycles
        for trips, one in zip(launch.trips, walked.loops.values(), strict=True)
    )
    return {
        "predicted": {"microseconds": found.microseconds, "mhz": found.mhz, "limits": found.limits},
        "cycles": {name: one.cycles for name, one in walked.loops.items()},
        "outside": found.microseconds * found.mhz - inside / (SMS * resident),
        "groups": len(selected.schedule.compute) * resident,
    }


def counted(torch: Any, case: Case, folder: Path, loops: Sequence[str], us: float) -> Counts:
    """Of each loop (cycles an iteration, GHz, cycles of all groups in a launch): medians over
    bursts of launches that take so many microseconds."""
    device, kernel = CudaDevice(), Built.read(folder / COUNTED).kernel()
    arrays = operands(torch, {"kernel": case.name, "sizes": case.known})
    address, size = kernel.global_memory(LOG)
    launches = max(1, round(sitting.BURST * 1e6 / us))
    every: list[tuple[Reading, ...]] = []
    for _ in range(1 + BURSTS):
        torch.cuda.synchronize()
        device.memset(address, 0, size)
        time.sleep(sitting.REST)
        torch.cuda._sleep(sitting.SPIN)
        for _ in range(launches):
            kernel(arrays, stream=int(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        words = np.frombuffer(device.download(address, size), np.uint64)
        every.append(readings(tuple(loops), [int(word) for word in words[: WORDS * len(loops)]]))
    device.close()
    found: dict[str, tuple[float, float, float]] = {}
    for at, loop in enumerate(loops):
        seen = [one[at] for one in every[1:]]  # the first one warms up
        found[loop] = (
            statistics.median(one.cycles_an_iteration for one in seen),
            statistics.median(one.gigahertz for one in seen),
            statistics.median(one.cycles for one in seen) / launches,
        )
    return found


def rows(torch: Any, case: Case, folder: Path) -> Iterator[Evidence]:
    """The points of a case, timed."""
    noted = json.loads((folder / "case.json").read_text())
    built = {str(n): Built.read(folder / str(n)) for n in range(len(noted))}
    times, off, _ = measured(torch, case, built, "0")
    _, *control = median_interval(times["0"], times[sitting.CONTROL])
    for number, note in enumerate(noted):
        name = str(number)
        ours = statistics.median(times[name])
        told = note["predicted"]["microseconds"]
        middle, *interval = median_interval(times[name], [told] * ROUNDS)
        counts = counted(torch, case, folder / name, note["loops"], ours)
        yield Evidence(
            claim="engine-model",
            kernel=f"textbook {case.name}",
            shape=case.shape,
            dtype="bf16",
            **kb.provenance(),
            compiler=built[name].resources.compiler,
            unit="us",
            better="lower",
            ours=ours,
            baselines={"predicted": told},
            ratio_to_best=middle,
            ci95=(interval[0], interval[1]),
            control=(control[0], control[1]),
            samples=ROUNDS,
            checks={
                "numerics": "pass" if off[name] < FAR else "fail",
                **facts(note, counts, ours),
                "counted": counts,
            },
            notes=str(Point.from_json(note["point"])),
        )


def facts(note: Mapping[str, Any], counts: Counts, ours: float) -> dict[str, Any]:
    """Where predicted and measured time differ: cycles an iteration, the clock, and the cycles that
    an SM is not in a loop, the ends of tasks and the wait for the last one."""
    told, groups = note["predicted"], note["groups"]
    mhz = 1e3 * statistics.median(ghz for _, ghz, cycles in counts.values() if cycles)
    inside = sum(cycles for *_, cycles in counts.values()) / (groups * SMS)
    return {
        "error": round(told["microseconds"] / ours - 1.0, 4),
        "predicted_mhz": round(told["mhz"]),
        "mhz": round(mhz),
        "limits": told["limits"],
        "cycles": {n: [round(note["cycles"][n]), round(one[0])] for n, one in counts.items()},
        "cycles outside of loops": [round(note["outside"]), round(ours * mhz - inside)],
    }


def merge(file: Path, where: Path) -> None:
    """Rows of a run, with what the model says now of the cubins that were timed."""
    notes = {
        (case.shape, str(Point.from_json(note["point"]))): (case, note, folder / str(number))
        for case in cases(0).values()
        for folder in [where / case.folder]
        if (folder / "case.json").is_file()
        for number, note in enumerate(json.loads((folder / "case.json").read_text()))
    }
    found: list[Evidence] = []
    for row in read_rows(file):
        case, note, folder = notes[row.shape, row.notes]
        now = {**note, **predicted(case, Point.from_json(note["point"]), Built.read(folder).cubin)}
        time_ = now["predicted"]["microseconds"]
        found.append(
            replace(
                row,
                baselines={"predicted": time_},
                ratio_to_best=time_ / row.ours,
                ci95=None,
                checks={**row.checks, **facts(now, row.checks["counted"], row.ours)},
            )
        )
    write_rows(RESULTS, found)
    print(errors(found))


def run(where: Path, file: Path, seconds: float) -> None:
    """Every case that was built and begins before the seconds are over."""
    import torch  # noqa: PLC0415

    found: list[Evidence] = []
    began = time.perf_counter()
    for case in cases(0).values():
        folder = where / case.folder
        if not (folder / "case.json").is_file() or time.perf_counter() - began > seconds:
            continue
        try:
            for one in rows(torch, case, folder):
                found.append(one)
                write_rows(file, found)
                print(f"{one.shape:26} {one.ours:8.1f} us", one.checks, one.notes, flush=True)
        except Exception as error:  # a case that fails leaves the others theirs
            print(f"{case.title}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        finally:
            torch.cuda.empty_cache()
    print(errors(found))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("where", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--cases", nargs="*", default=TITLES, help="what titles begin with")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case runs later")
    args = parser.parse_args()
    if args.what == "build":
        build(args.where[0], cases(0, args.cases))
    elif args.what == "merge":
        merge(*args.where)
    else:
        run(args.where[0], args.out / RESULTS.name, args.seconds)


if __name__ == "__main__":
    main()
