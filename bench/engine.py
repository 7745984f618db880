"""What `optimize` finds for textbook programs, beside the library's tuned tables.

    python -m bench.engine build DIR          search without a GPU, build what it found
    python -m bench.engine run DIR --out OUT  on a GPU machine: rows of claim `engine-user`
    python -m bench.engine merge FILE         into bench/results/engine.json

The search sees no GPU: a row's ours is the kernel that it predicts to be fastest, in microseconds,
and its ratio is tuned table / ours. The next ones are timed beside it in shuffled rounds of bursts,
so that a row also says what the model's order was worth: the best of all that were timed.

    python -m bench.engine build DIR --ablate          the whole engine, and without each part of it
    python -m bench.engine run DIR --ablate --out OUT  rows of claim `engine-search`
    python -m bench.engine merge FILE --ablate         into bench/results/engine_search.json

The whole engine is the search and then the search for the order of the winner's machine code, by
the model. Each engine that lacks a part searches as long, with a store of its own; `build` prints
what the model says of what each chose, which is no measurement. A row's ours is the whole engine's
kernel and its ratio is without the part / ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.front_door import operands
from warploom.autosched.points import Point
from warploom.codegen.compile.build import Built
from warploom.codegen.ir.plan import KernelSchedule
from warploom.engine.points import Space
from warploom.engine.search import (
    BEST_OF,
    SECONDS,
    Outcome,
    bound_of,
    bounds_of,
    search,
    told,
)
from warploom.engine.store import PointStore
from warploom.errors import WarploomError
from warploom.evidence import Evidence, read_rows, write_rows
from warploom.files import cache_folder, write_text_atomically
from warploom.flows.targets import read_target
from warploom.flows.tune import tune
from warploom.flows.tuned import TuneSettings
from warploom.kernels.select import Selected, select
from warploom.perf.launch_time import Launch, at_bounds
from warploom.perf.replay import replay
from warploom.rewrites.rules import Form
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results"
ATTENTION, GEMM = "examples/textbook_attention.py:kernel", "examples/textbook_gemm.py:kernel"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "attention 128 causal 4096": (ATTENTION, {"batch": 4, "heads": 16, "rows": 4096}),
    "attention 128 causal 16384": (ATTENTION, {"batch": 1, "heads": 16, "rows": 16384}),
    "attention 128 full 8192": (ATTENTION, {"batch": 2, "heads": 16, "rows": 8192}),
    "gemm 4096x4096x4096": (GEMM, {"m": 4096, "n": 4096, "k": 4096}),
    "gemm 8192x8192x8192": (GEMM, {"m": 8192, "n": 8192, "k": 8192}),
}
ROUNDS, TIMED = 40, 6
FAR = 0.02  # of a result from another kernel's, over its largest element
TABLE = "tuned table"
WHOLE, NO_MACHINE_CODE, NO_REPLAY = "engine", "without machine-code search", "without replay"
NO_REWRITES, NO_SOLVER = "without rewrites", "without solved orders"
ABLATED = (WHOLE, NO_MACHINE_CODE, NO_REPLAY, NO_REWRITES, NO_SOLVER)
TUNED_SECONDS = 60.0  # of the search through a winner's machine code


class Plain(Space):
    """The space of a program as its author wrote it."""

    def forms(self, settings: tuple[tuple[str, str], ...]) -> tuple[Form, ...]:
        """No rule is applied."""
        return (Form((), self.textbook(settings)),)


def by_bounds(
    space: Space, point: Point, sizes: Mapping[str, int], gpu: str, best: float
) -> Outcome:
    """The outcome of a point by the model of an iteration only: its loops take what no order is
    below, and nothing is around them. What the compiler refuses is refused."""
    try:
        selected = space.selected(point, gpu)
        bound = bound_of(selected, sizes, gpu)
        if bound >= best:
            return {"pruned": True, "bound": bound}
        selected.build()
        launch = Launch(selected.program, selected.launch, sizes, gpu)
        return told(launch, at_bounds(bounds_of(selected, gpu)), bound)
    except WarploomError as error:
        return {"refused": str(error)}


def settings_of(title: str) -> tuple[str, dict[str, int], dict[str, str]]:
    """Of a case: the program, all sizes of its arrays, and the settings of the program."""
    name, sizes = CASES[title]
    if "rows" not in sizes:
        return name, sizes, {}
    known = {**sizes, "keys": sizes["rows"], "d": 128}
    return name, known, {"causal": str("causal" in title).lower()}


def ablate(out: Path, effort: str, titles: Sequence[str]) -> None:
    """What the whole engine finds for each case, and what it finds without each of its parts."""
    best_of = BEST_OF[effort]
    SECONDS[NO_SOLVER], BEST_OF[NO_SOLVER] = SECONDS[effort], (*best_of[:-1], 0)
    for title in titles:
        name, sizes, settings = settings_of(title)
        spaces = {one: Space(name, settings) for one in (NO_MACHINE_CODE, NO_REPLAY, NO_SOLVER)}
        spaces[NO_REWRITES] = Plain(name, settings)
        note: dict[str, Any] = {}
        for what, space in spaces.items():
            folder = out / "ablated" / title.replace(" ", "_") / what.replace(" ", "_")
            kind = NO_SOLVER if what == NO_SOLVER else effort
            evaluate = by_bounds if what == NO_REPLAY else None
            with closing(PointStore(folder / "points.sqlite")) as store:
                found = search(space, sizes, "h200", store, kind, evaluate=evaluate)
            point = found.useful[0].point
            selected = space.selected(point, "h200")
            built = selected.build()
            built.write(folder)
            note[what] = {"point": str(point), "tried": len(found.found)}
            note[what]["predicted"] = predicted(selected, built.cubin, sizes)
            print(title, what, note[what], flush=True)
            if what == NO_MACHINE_CODE:
                tuned = ordered(folder, built)
                tuned.write(folder.with_name(WHOLE))
                whole = predicted(selected, tuned.cubin, sizes)
                note[WHOLE] = {**note[what], "predicted": whole}
                print(title, WHOLE, note[WHOLE], flush=True)
        write_text_atomically(folder.with_name("case.json"), json.dumps(note, indent=1))


def predicted(selected: Selected, cubin: bytes, sizes: Mapping[str, int]) -> float:
    """Microseconds of a launch of machine code, by the whole model."""
    assert isinstance(selected.schedule, KernelSchedule)
    launch = Launch(selected.program, selected.launch, sizes, "h200")
    walked = replay(selected.program, selected.schedule, cubin, rates=launch.rates())
    return launch.time(walked).microseconds


def ordered(folder: Path, built: Built) -> Built:
    """A kernel with the order of machine code that a search by the model finds."""
    target = read_target(str(folder / f"{built.source.name}.cubin"), None, None)
    report = tune(target, TuneSettings(seconds=TUNED_SECONDS), folder / "tuned")
    return replace(built, cubin=report.cubin.data)


def ablated(torch: Any, title: str, folder: Path) -> Iterator[Evidence]:
    """What the kernel of the whole engine is worth beside those without a part of it."""
    note = json.loads((folder / "case.json").read_text())
    built = {one: Built.read(folder / one.replace(" ", "_")) for one in ABLATED}
    times, off = measured(torch, title, built, WHOLE)
    for what in ABLATED[1:]:
        middle, *interval = median_interval(times[WHOLE], times[what])
        _, *control = median_interval(times[WHOLE], times[sitting.CONTROL])
        yield Evidence(
            claim="engine-search",
            kernel=f"textbook {title.split(maxsplit=1)[0]} {what}",
            shape=title.partition(" ")[2],
            dtype="bf16",
            **kb.provenance(),
            compiler=built[WHOLE].resources.compiler,
            unit="us",
            better="lower",
            ours=statistics.median(times[WHOLE]),
            baselines={what: statistics.median(times[what])},
            ratio_to_best=middle,
            ci95=(interval[0], interval[1]),
            control=(control[0], control[1]),
            samples=ROUNDS,
            checks={
                "numerics": "pass" if max(off[what], off[WHOLE]) < FAR else "fail",
                "predicted": round(note[WHOLE]["predicted"], 1),
                "predicted_without": round(note[what]["predicted"], 1),
            },
            notes=f"{note[WHOLE]['point']}; {what}: {note[what]['point']}",
        )


def measured(
    torch: Any, title: str, built: Mapping[str, Built], right: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds of kernels in shuffled rounds of bursts, with the one that is `right` once more
    as a control; and how far each one's result is from that one's, over its largest element."""
    arrays = operands(torch, title.split(maxsplit=1)[0], CASES[title][1])
    results: dict[str, Any] = {}

    def call(name: str) -> Any:
        kernel = built[name].kernel()
        return lambda: kernel(arrays, stream=int(torch.cuda.current_stream().cuda_stream))

    calls = {name: call(name) for name in built}
    out = "c" if "c" in arrays else "o"
    for name, one in calls.items():
        arrays[out].fill_(float("nan"))
        one()
        torch.cuda.synchronize()
        results[name] = arrays[out].float().clone()
    scale = results[right].abs().max()
    off = {n: float((results[n] - results[right]).abs().max() / scale) for n in built}
    timed = {**calls, sitting.CONTROL: calls[right]}
    bursts = sitting.measure(sitting.Gpu(torch, timed), ROUNDS, False, 0)["bursts"]
    return {key: [1e3 * ms for ms in one["ms"]] for key, one in bursts.items()}, off


def build(out: Path, effort: str) -> None:
    """Search every case and build the points that will be timed, and the table's kernel."""
    for title in CASES:
        name, known, settings = settings_of(title)
        store = PointStore(cache_folder() / "points.sqlite")
        space = Space(name, settings)
        explored = search(space, known, "h200", store, effort, print)
        store.close()
        print(f"{title}: {explored}", flush=True)
        folder = out / title.replace(" ", "_")
        rows = []
        for number, found in enumerate(explored.useful[:TIMED]):
            space.selected(found.point, "h200").build().write(folder / str(number))
            rows.append({"point": str(found.point), "predicted": found.microseconds})
        library = title.split()[0]
        settings = {key: str(size) for key, size in known.items() if key != "d"}
        settings |= {"causal": "true"} if "causal" in title else {}
        select(library, settings).build().write(folder / TABLE.replace(" ", "_"))
        note = {"points": rows, "tried": len(explored.found), "pruned": explored.pruned}
        (folder / "case.json").write_text(json.dumps(note, indent=1))


def row(torch: Any, title: str, folder: Path) -> Evidence:
    """One case, timed."""
    note = json.loads((folder / "case.json").read_text())
    names = {str(n): folder / str(n) for n in range(len(note["points"]))}
    built = {name: Built.read(where) for name, where in names.items()}
    built[TABLE] = Built.read(folder / TABLE.replace(" ", "_"))
    samples, off = measured(torch, title, built, TABLE)
    middle, *interval = median_interval(samples["0"], samples[TABLE])
    _, *control = median_interval(samples[TABLE], samples[sitting.CONTROL])
    median = {key: statistics.median(one) for key, one in samples.items()}
    best = min(names, key=lambda name: median[name])
    return Evidence(
        claim="engine-user",
        kernel=f"textbook {title.split(maxsplit=1)[0]}",
        shape=title.partition(" ")[2],
        dtype="bf16",
        **kb.provenance(),
        compiler=built["0"].resources.compiler,
        unit="us",
        better="lower",
        ours=median["0"],
        baselines={TABLE: median[TABLE]},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=ROUNDS,
        checks={
            "numerics": "pass" if all(one < FAR for one in off.values()) else "fail",
            "best timed": round(median[best], 1),
            "place of the best": int(best) + 1,
            "points tried": note["tried"],
            "predicted": round(note["points"][0]["predicted"], 1),
        },
        notes=json.dumps(
            [{**one, "measured": round(median[str(n)], 2)} for n, one in enumerate(note["points"])]
        ),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("where", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--ablate", action="store_true", help="the engine without its parts")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    args = parser.parse_args()
    file = "engine_search.json" if args.ablate else "engine.json"
    if args.what == "merge":
        write_rows(RESULTS / file, read_rows(args.where))
        return
    if args.what == "build" and args.ablate:
        ablate(args.where, args.effort, args.cases)
        return
    if args.what == "build":
        build(args.where, args.effort)
        return
    import torch  # noqa: PLC0415

    rows: list[Evidence] = []
    for title in args.cases:
        slug = title.replace(" ", "_")
        if args.ablate:
            rows += ablated(torch, title, args.where / "ablated" / slug)
        else:
            rows.append(row(torch, title, args.where / slug))
        write_rows(args.out / file, rows)
        print(title, rows[-1].ratio_to_best, rows[-1].control, rows[-1].checks, flush=True)
        print(rows[-1].notes, flush=True)


if __name__ == "__main__":
    main()
