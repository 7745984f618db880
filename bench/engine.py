"""What `optimize` finds for textbook programs, beside the library's tuned tables.

    python -m bench.engine build DIR --seed N  search without a GPU, build what it found
    python -m bench.engine run DIR --out OUT   on a GPU machine: rows of claim `engine-user`
    python -m bench.engine merge FILES         into bench/results/engine.json, for older rows
    python -m bench.engine recorded [DIR]      these rows with what the model says now of the
                                               points that were timed; those of a search by it,
                                               built in DIR, say which it puts first

Cases are those of `bench.engine_model`: the benchmarks' shapes and twenty drawn with the seed; and
the GEMM benchmark's other element types and epilogues, whose textbook is the library's. The
search sees no GPU: a row's ours is the kernel that it predicts to be fastest, in microseconds,
and its ratio is tuned table / ours. The next ones are timed beside it in shuffled rounds of bursts,
so that a row also says what the model's order was worth: the best of all that were timed. Results
are compared with float64 in rows drawn at random, and with the table's kernel everywhere.

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
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench import engine_model, gemm_cases, sitting
from bench import kernel_bench as kb
from bench.engine_model import operands, shape_of
from bench.evidence import Evidence, read_rows, write_rows
from warploom.autosched.points import Point
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built, compile_source
from warploom.codegen.ir.plan import KernelSchedule
from warploom.engine.outcome import Outcome, bound_of, bounds_of, told
from warploom.engine.points import Space
from warploom.engine.search import KNOWN, SECONDS, SOLVED_OF, search
from warploom.engine.store import PointStore
from warploom.errors import WarploomError
from warploom.files import cache_folder, write_text_atomically
from warploom.flows.targets import read_target
from warploom.flows.tune import tune
from warploom.flows.tuned import TuneSettings
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import choose_gemm
from warploom.kernels.select import select
from warploom.perf.launch_time import MODEL, Launch, at_bounds
from warploom.perf.replay import replay
from warploom.rewrites.rules import RULES, Form
from warploom.runtime.stats import median_interval
from warploom.tile import DType

RESULTS = Path(__file__).parent / "results"
ATTENTION, GEMM = "examples/textbook_attention.py:kernel", "examples/textbook_gemm.py:kernel"
CASES = (
    "attention 128 causal 4x16x4096",
    "attention 128 full 2x16x8192",
    "gemm 4096x4096x4096",
)  # of the ablations
ROUNDS, TIMED, MEASURED = 12, 3, 8
FAR = 0.02  # of a result from another kernel's, over its largest element
WRONG = 0.01  # of drawn rows from float64, in norm
DRAWN = 64  # rows of a result that are compared with float64
TABLE = "tuned table"
CHOSEN = "tuned_table"  # the folder of what it chooses
WHOLE, NO_MACHINE_CODE, NO_REPLAY = "engine", "without machine-code search", "without replay"
NO_REWRITES, NO_SOLVER = "without rewrites", "without solved orders"
ABLATED = (WHOLE, NO_MACHINE_CODE, NO_REPLAY, NO_REWRITES, NO_SOLVER)
SEED = 20261128  # of the drawn shapes of the rows
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


@dataclass(frozen=True)
class Case:
    """A textbook at a shape: the settings of its program, and the sizes of its arrays.

    `config` is of a GEMM whose textbook is the library's, with `kind` of its element types and
    epilogue (`gemm_cases.OTHERS`).
    """

    name: str
    shape: str
    origin: str
    known: Mapping[str, int]
    kind: str = ""
    config: GemmConfig = field(default_factory=GemmConfig)

    @property
    def title(self) -> str:
        """Program and shape."""
        return f"{self.name} {self.kind} {self.shape}" if self.kind else f"{self.name} {self.shape}"

    @property
    def types(self) -> tuple[str, str]:
        """Shape and element type as the rows of `bench.gemm_sitting` have them."""
        own = self.config.dtype.name
        if self.kind in ("fp8", "promoted"):
            return self.shape, f"{own} {self.kind}"
        return f"{self.shape} {self.kind}".strip(), own

    @property
    def settings(self) -> dict[str, str]:
        """What of its configuration is not the usual one, for the command line."""
        usual, found = GemmConfig(), dict[str, str]()
        for one in fields(usual):
            value = getattr(self.config, one.name)
            if one.name != "tile" and value != getattr(usual, one.name):
                text = str(value).lower() if isinstance(value, bool) else str(value)
                found[one.name] = value.name if isinstance(value, DType) else text
        return found

    @property
    def folder(self) -> str:
        """Where what was built for it lies."""
        return self.title.replace(" ", "_")

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of its arrays."""
        found = {key: size for key, size in self.known.items() if key != "causal"}
        found |= {"one": 1} if self.config.scales else {}
        return found | ({"keys": found["rows"]} if "rows" in found else {})

    @property
    def space(self) -> Space:
        """What is searched."""
        if self.name == "gemm":
            return Space("gemm", self.settings) if self.kind else Space(GEMM, {})
        causal = str(bool(self.known["causal"])).lower()
        return Space(ATTENTION, {"dim": str(self.known["d"]), "causal": causal})

    def library(self) -> Built:
        """What the tuned table chooses, where that is faster in parts that a second kernel adds
        up."""
        if self.name == "gemm" and not self.kind:
            choice = choose_gemm(*(self.known[name] for name in "mnk"), sliced=True)
            return choice.selected(GemmConfig()).build()
        settings = {key: str(size) for key, size in self.sizes.items()} | self.settings
        if self.name == "attention":
            settings["head_dim"] = settings.pop("d")
            settings["causal"] = str(bool(self.known["causal"])).lower()
        return select(self.name, settings).build()


def cases(seed: int, only: Sequence[str] = ()) -> dict[str, Case]:
    """By title, those whose title begins with one of the words, if there are any."""
    found = [Case(n, shape_of(known), o, known) for n, o, known in engine_model.cases(seed)]
    for kind, (config, shapes) in gemm_cases.OTHERS.items():
        batch = {"batch": gemm_cases.BATCH} if config.batched else {}
        for shape in shapes:
            known = {**dict(zip("mnk", shape, strict=True)), **batch}
            found.append(Case("gemm", shape_of(known), "benchmark", known, kind, config))
    found.sort(key=lambda case: case.origin != "benchmark")  # the others, where time is left
    return {one.title: one for one in found if not only or one.title.startswith(tuple(only))}


def ablate(out: Path, effort: str, titles: Sequence[str]) -> None:
    """What the whole engine finds for each case, and what it finds without each of its parts."""
    SECONDS[NO_SOLVER], KNOWN[NO_SOLVER] = SECONDS[effort], KNOWN[effort]
    SOLVED_OF[NO_SOLVER] = 0
    for title, case in cases(0, titles or CASES).items():
        began = time.monotonic()
        sizes, space = case.sizes, case.space
        spaces: dict[str, Space] = dict.fromkeys((NO_MACHINE_CODE, NO_REPLAY, NO_SOLVER), space)
        spaces[NO_REWRITES] = Plain(space.name, space.given)
        among = out / "ablated" / case.folder
        note: dict[str, Any] = {}
        for what, space in spaces.items():
            folder = among / what.replace(" ", "_")
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
            print(f"{time.monotonic() - began:5.0f} s", title, what, note[what], flush=True)
            if what == NO_MACHINE_CODE:
                tuned = ordered(folder, built)
                tuned.write(folder.with_name(WHOLE))
                whole = predicted(selected, tuned.cubin, sizes)
                note[WHOLE] = {**note[what], "predicted": whole}
                print(title, WHOLE, note[WHOLE], flush=True)
        write_text_atomically(among / "case.json", json.dumps(note, indent=1))


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


def ablated(torch: Any, case: Case, folder: Path) -> Iterator[Evidence]:
    """What the kernel of the whole engine is worth beside those without a part of it."""
    note = json.loads((folder / "case.json").read_text())
    built = {one: Built.read(folder / one.replace(" ", "_")) for one in ABLATED}
    times, off, _ = measured(torch, case, built, WHOLE)
    for what in ABLATED[1:]:
        middle, *interval = median_interval(times[WHOLE], times[what])
        _, *control = median_interval(times[WHOLE], times[sitting.CONTROL])
        yield Evidence(
            claim="engine-search",
            kernel=f"textbook {case.name} {what}",
            shape=case.shape,
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
    torch: Any, case: Case, built: Mapping[str, Built], right: str
) -> tuple[dict[str, list[float]], dict[str, float], list[float]]:
    """Microseconds of kernels in shuffled rounds of bursts, with the one that is `right` once more
    as a control; how far each one's result is from that one's, over its largest element; and each
    one's relative error in places compared with float64."""
    torch.manual_seed(0)
    arrays = arrays_of(torch, case)
    results: dict[str, Any] = {}

    def call(name: str) -> Any:
        kernel, own = built[name].kernel(), {one: arrays[one] for one in built[name].taken}
        return lambda: kernel(own, stream=int(torch.cuda.current_stream().cuda_stream))

    calls = {name: call(name) for name in built}
    at, expected = exact(torch, case, arrays)
    errors: list[float] = []
    out = "c" if "c" in arrays else "o"
    for name, one in calls.items():
        arrays[out].fill_(float("nan"))
        one()
        torch.cuda.synchronize()
        results[name] = arrays[out].clone()
        errors.append(float((results[name][at].double() - expected).norm() / expected.norm()))
    scale = results[right].abs().max().float()
    off = {n: float((results[n] - results[right]).abs().max() / scale) for n in built}
    results.clear()
    timed = {**calls, sitting.CONTROL: calls[right]}
    bursts = sitting.measure(sitting.Gpu(torch, timed), ROUNDS, False, 0)["bursts"]
    return {key: [1e3 * ms for ms in one["ms"]] for key, one in bursts.items()}, off, errors


def arrays_of(torch: Any, case: Case) -> dict[str, Any]:
    """Random operands, and room for the result."""
    if not case.kind:
        return operands(torch, {"kernel": case.name, "sizes": case.known})
    m, n, k = (case.known[name] for name in "mnk")
    found = gemm_cases.operands(torch, case.config, m, n, k, 0)
    return {name: found[name] for name in case.config.arrays}


def exact(torch: Any, case: Case, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """Drawn places of the result, and what it is there in float64."""
    if case.name == "gemm":
        at = torch.randint(case.sizes["m"], (DRAWN,), device="cuda")
        return (..., at, slice(None)), gemm_cases.expected(
            torch, case.config, dict(arrays), at, torch.float64
        )
    sizes = case.sizes
    b, h, at = (
        torch.randint(sizes[x], (DRAWN,), device="cuda") for x in ("batch", "heads", "rows")
    )
    found: list[Any] = []
    for batch, head, row in zip(b.tolist(), h.tolist(), at.tolist(), strict=True):
        keys = row + 1 if case.known["causal"] else sizes["keys"]
        k, v = (arrays[x][batch, head, :keys].double() for x in "kv")
        scores = k @ arrays["q"][batch, head, row].double() / math.sqrt(sizes["d"])
        found.append(torch.softmax(scores, 0) @ v)
    return (b, h, at), torch.stack(found)


def build(out: Path, effort: str, some: Mapping[str, Case], timed: int) -> None:
    """Search every case and build the points that will be timed, and the table's kernel."""
    for title, case in some.items():
        with closing(PointStore(cache_folder() / "points.sqlite")) as store:
            explored = search(case.space, case.sizes, "h200", store, effort)
        print(f"{title}: {explored}", flush=True)
        folder = out / case.folder
        rows: list[dict[str, Any]] = []
        for number, found in enumerate(explored.forms(timed)):
            case.space.selected(found.point, "h200").build().write(folder / str(number))
            rows.append({"point": str(found.point), "predicted": found.microseconds})
        library = case.library()
        library.write(folder / CHOSEN)
        note = {
            "compiler": library.resources.compiler,
            "points": rows,
            "tried": len(explored.found),
            "pruned": explored.pruned,
        }
        (folder / "case.json").write_text(json.dumps(note, indent=1))
        print(f"  {rows[0] if rows else 'nothing found'}", flush=True)


def rows(torch: Any, case: Case, folder: Path) -> Iterator[Evidence]:
    """One case, timed: the point that the model puts first and, where as many were built as
    `optimize` measures, the fastest of them."""
    note: dict[str, Any] = json.loads((folder / "case.json").read_text())
    names = [str(n) for n in range(len(note["points"]))]
    built = {name: Built.read(folder / name) for name in names}
    built[TABLE] = Built.read(folder / CHOSEN)
    samples, off, errors = measured(torch, case, built, TABLE)
    right = all(one < FAR for one in off.values()) and all(one < WRONG for one in errors)
    seen: dict[str, Any] = {"numerics": "pass" if right else "fail", "error": f"{max(errors):.1e}"}
    yield row(case, note, samples, "0", {**seen, "points tried": note["tried"]})
    if len(names) >= MEASURED:
        # Chosen in one half of the rounds, told of in the other: the least of eight is no figure.
        half = {name: one[: ROUNDS // 2] for name, one in samples.items()}
        best = min(names, key=lambda name: statistics.median(half[name]))
        rest = {name: one[ROUNDS // 2 :] for name, one in samples.items()}
        seen["points measured"] = len(names)
        one = row(case, note, rest, best, {**seen, "points tried": note["tried"]})
        yield replace(one, kernel=f"{one.kernel}, measured")


def parsed(space: Space, text: str) -> Point:
    """A point from its words."""
    words = text.split()
    order = next(n for n, word in enumerate(words) if "=" not in word and word not in RULES)
    settings = (word.partition("=") for word in words[:order] if "=" in word)
    rules = tuple(word for word in words[:order] if word in RULES)
    pairs = tuple((name, value) for name, _, value in settings)
    return Point(pairs, rules, words[order], tuple(words[order + 1 :]))


def recorded(where: Path | None) -> None:
    """The rows with what the model says now of every point that was timed, and which model said it;
    those of which a search by it, built in a folder, puts another one first say so."""
    known = {(one.name, *one.types): one for one in cases(SEED).values()}
    found: list[Evidence] = []
    for one in read_rows(RESULTS / "engine.json"):
        if one.checks.get("model") == MODEL:
            found.append(one)
            continue
        case = known[one.kernel.split()[1].rstrip(","), one.shape, one.dtype]
        points: list[dict[str, Any]] = json.loads(one.notes)
        for note in points:
            selected = case.space.selected(parsed(case.space, note["point"]), "h200")
            cubin, _ = compile_source(selected.emitted(), selected.arch, selected.allow)
            note["predicted"] = predicted(selected, cubin, case.sizes)
        timed = next(n for n, note in enumerate(points) if near(note["measured"], one.ours))
        checks = {**one.checks, "predicted": round(points[timed]["predicted"], 1), "model": MODEL}
        file = where / case.folder / "case.json" if where else None
        if file is not None and file.is_file() and "measured" not in one.kernel:
            first = json.loads(file.read_text())["points"][0]["point"]
            if first != points[0]["point"]:
                checks["first by this model"] = first
        found.append(replace(one, checks=checks, notes=json.dumps(points)))
        print(one.kernel, one.shape, checks.get("first by this model", ""), flush=True)
    write_rows(RESULTS / "engine.json", found)


def near(one: float, other: float) -> bool:
    """Whether two times are the same figure, as it was rounded."""
    return abs(one - other) <= 0.006


def row(
    case: Case,
    note: Mapping[str, Any],
    samples: Mapping[str, list[float]],
    ours: str,
    seen: Mapping[str, Any],
) -> Evidence:
    """The kernel of a number beside the table's, with the best of those that were timed."""
    middle, *interval = median_interval(samples[ours], samples[TABLE])
    _, *control = median_interval(samples[TABLE], samples[sitting.CONTROL])
    median = {key: statistics.median(one) for key, one in samples.items()}
    points = [str(n) for n in range(len(note["points"]))]
    best = min(points, key=lambda name: median[name])
    return Evidence(
        claim="engine-user",
        kernel=f"textbook {case.name}",
        shape=case.types[0],
        dtype=case.types[1],
        **kb.provenance(),
        compiler=note["compiler"],
        unit="us",
        better="lower",
        ours=median[ours],
        baselines={TABLE: median[TABLE]},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=len(samples[ours]),
        checks={
            **seen,
            "origin": case.origin,
            "best timed": round(median[best], 1),
            "place of the best": int(best) + 1,
            "predicted": round(note["points"][int(ours)]["predicted"], 1),
            "model": MODEL,
        },
        notes=json.dumps(
            [{**one, "measured": round(median[str(n)], 2)} for n, one in enumerate(note["points"])]
        ),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge", "recorded"))
    parser.add_argument("where", type=Path, nargs="*", help="a folder; merge: all files of rows")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--ablate", action="store_true", help="the engine without its parts")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes that are drawn")
    parser.add_argument("--cases", nargs="*", default=(), help="what titles begin with")
    parser.add_argument("--budget", type=float, help="seconds of a search, if not the effort's")
    parser.add_argument("--timed", type=int, default=TIMED, help="points built of a case")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case runs later")
    args = parser.parse_args()
    SECONDS[args.effort] = args.budget or SECONDS[args.effort]
    file = "engine_search.json" if args.ablate else "engine.json"
    if args.what == "merge":
        kb.merge(RESULTS / file, args.where)
    elif args.what == "recorded":
        recorded(args.where[0] if args.where else None)
    elif args.what == "build" and args.ablate:
        ablate(args.where[0], args.effort, args.cases)
    elif args.what == "build":
        build(args.where[0], args.effort, cases(args.seed, args.cases), args.timed)
    else:
        run(args.where[0], args.out / file, cases(args.seed, args.cases), args.ablate, args.seconds)


def run(
    where: Path, file: Path, some: Mapping[str, Case], without_parts: bool, seconds: float
) -> None:
    """Every case that was built and begins before the seconds are over; rows are written at
    once."""
    import torch  # noqa: PLC0415

    every: list[Evidence] = []
    began = time.perf_counter()
    for title, case in some.items():
        folder = (where / "ablated" if without_parts else where) / case.folder
        if not (folder / "case.json").is_file():
            continue
        if time.perf_counter() - began > seconds:
            print(f"{title}: no time left", flush=True)
            continue
        try:
            found = [*(ablated if without_parts else rows)(torch, case, folder)]
        except Exception as error:  # a case that fails leaves the others theirs
            print(f"{title}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        every += found
        write_rows(file, every)
        for one in found:
            print(
                f"{one.kernel:20} {one.shape:24} {one.ours:8.1f} us, {one.ratio_to_best:.3f} "
                f"{one.control} {one.checks}",
                flush=True,
            )
    if every:
        print(f"{len(every)} rows, {summary(every)}")


def summary(rows: Sequence[Evidence]) -> str:
    """Geometric means of the ratios, by program."""
    means: list[str] = []
    for name in dict.fromkeys(one.kernel for one in rows):
        ratios = [one.ratio_to_best for one in rows if one.kernel == name]
        means.append(f"{name} {statistics.geometric_mean(ratios):.3f} of {len(ratios)}")
    return ", ".join(means)


if __name__ == "__main__":
    main()
