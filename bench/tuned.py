"""What was measured of the variants of the tuned tables, and how good the choice among them is.

    python -m bench.tuned            put the rows of bench/results into kernels/*/tuned.toml, with
                                     replays of the model as it is
    python -m bench.tuned --check    print only
    python -m bench.tuned build DIR          for sizes drawn with --seed: the chosen, the next ones;
                                             with --few for products of few rows; with --near CASES
                                             for cases of `bench.gemm_sitting` also points of which
                                             one option is another: what the model puts first
    python -m bench.tuned run DIR --out OUT  on a GPU machine: rows of claim `tuned-tables`, which
                                             time them in shuffled rounds of bursts, products beside
                                             the library; a row tells the point, which `record`
                                             makes a variant where the table has it not
    python -m bench.tuned merge FILE         into bench/results/choices.json

At every measured shape a variant is chosen as if the shape had not been measured: the loss is that
of its measured time against the best one there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.attention_cases import PACKED
from bench.evidence import Evidence, read_rows, write_rows
from warploom.autosched.plans import variations
from warploom.autosched.points import Point
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built
from warploom.errors import WarploomError
from warploom.files import write_text_atomically
from warploom.flows.record import recorded_replay, renewed, with_rows
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import GEMM
from warploom.kernels.library import configure, entry
from warploom.kernels.select import full_sizes, select
from warploom.kernels.tuned.table import Kind, Row, Table, as_toml
from warploom.kernels.tuned.variant import Variant
from warploom.runtime.kernel import Kernel
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results"
MODEL, BESIDE = "engine_model.json", "choices.json"
CLAIM = "tuned-tables"
DTYPES = {"fp8": "e4m3 fp8", "promoted": "e4m3 promoted"}
WORDS = ("gelu", "gelu_tanh", "batched")  # of a row's shape
# Of each kernel the rows of its variants; those of the model of a launch and of the sittings, which
# know one kernel a shape, the default; then those of `run`.
TABLES: Mapping[str, tuple[Table, tuple[str, ...]]] = {
    "attention": (ATTENTION, ("attention_variants.json", MODEL, "attention_forward.json", BESIDE)),
    "gemm": (GEMM, ("gemm.json", MODEL, "gemm_sittings.json", BESIDE)),
}
EARLIER = "an earlier kernel"  # in the notes of a row: what it measured is built no more
BATCH = 3  # of the batched products of `bench.gemm`
ROUNDS, BEST, CONTROL = 12, 2, "again"
SHAPES, TOLD = 80, 2  # so many sizes of products drawn at random, and the fastest variants of each
FEW_TIMED = 6  # variants of a product of few rows
NEAR, NEAR_TIMED = 2, 8  # variants that points are near to, and points of a case
BEYOND_L2, MOST_COPIES = 2e8, 12  # bytes of operands that alternate, and how many sets at most
TOKENS, WIDTH = 16384, 2048  # of attention: batch * rows, heads * head size


@dataclass(frozen=True)
class Time:
    """A variant's measured microseconds at a shape, under some settings."""

    kind: str
    name: str
    sizes: Mapping[str, Any]
    microseconds: float


def attention_time(row: Evidence) -> Time | None:
    """What a row says of a variant of attention; None: it is of another kernel."""
    if EARLIER in row.notes:
        return None
    if row.unit == "us" and row.kernel.startswith("attention "):
        head, mask, lengths = row.shape.split()
        batch, heads, rows = map(int, lengths.split("x"))
        sizes = {"heads": batch * heads, "rows": rows, "keys": rows}
        return Time(f"{head} {mask}", named(row), sizes, row.ours)
    name, words = named(row), row.shape.split()
    lead = words.pop(0) if words[0] in ("fp8", "packed") else ""
    if name not in ATTENTION.variants or not words[0].isdigit() or "tables" in words:
        return None
    head, mask = int(words[0]), words[1]
    packed = lead == "packed"
    length = words[2] if len(words) > 2 else "mixed"
    lengths = PACKED[length] if packed else [int(length)] * (TOKENS // int(length))
    work = 4 * WIDTH * sum(n * n for n in lengths) * (0.5 if mask == "causal" else 1.0)
    rows = lengths if packed else lengths[0]
    heads = WIDTH // head * (1 if packed else len(lengths))
    kind = " ".join(filter(None, ({"fp8": "8-bit"}.get(lead, lead), str(head), mask)))
    sizes = {"heads": heads, "rows": rows, "keys": rows}
    return Time(kind, name, sizes, work / row.ours * 1e-6)


def gemm_time(row: Evidence) -> Time | None:
    """What a row says of a variant of GEMM; None: it is of another kernel."""
    if EARLIER in row.notes or not row.kernel.startswith("gemm"):
        return None
    shape, _, what = row.shape.partition(" ")
    kinds = {"bf16": "16-bit", "e4m3 fp8": "8-bit", "e4m3 promoted": "8-bit promoted"}
    name = named(row)
    if row.dtype not in kinds or name not in GEMM.variants.keys() | discovered("gemm").keys():
        return None
    told = what in ("", "fp8", "promoted") or row.claim == CLAIM
    if what == "gelu_tanh" or (not told and "default" not in row.kernel):
        return None
    m, n, k = map(int, shape.split("x"))
    sizes = {"m": m, "n": n, "k": k, "batch": BATCH if what == "batched" else 1}
    time = row.ours if row.unit == "us" else 2e-6 * prod(sizes.values()) / row.ours
    kind = "16-bit gelu" if what == "gelu" else kinds[row.dtype]
    return Time(kind, name, sizes, time)


@functools.cache
def discovered(name: str) -> dict[str, Variant]:
    """The points by name that rows tell of and the kernel's table does not have yet: those that
    were the fastest of their case."""
    table = TABLES[name][0]
    rows = [
        row
        for row in read_rows(RESULTS / BESIDE)
        if row.kernel.startswith(name) and EARLIER not in row.notes
    ]
    least: dict[tuple[str, ...], float] = {}
    for row in rows:
        case = row.shape, row.dtype, *row.baselines
        least[case] = min(row.ours, least.get(case, row.ours))
    return {
        named(row): Variant(named(row), Point.from_json(row.checks["point"]), table.template)
        for row in rows
        if "point" in row.checks
        and named(row) not in table.variants
        and row.ours == least[row.shape, row.dtype, *row.baselines]
    }


def named(row: Evidence) -> str:
    """The variant that a row measured; of a default the notes say which it was."""
    told = row.notes.split("; ")[1] if row.kernel.endswith("default") else row.kernel
    return told.split()[-1]


READ = {"attention": attention_time, "gemm": gemm_time}


def measured(name: str) -> dict[str, list[Row]]:
    """Rows without predictions, by kind.

    Runs find the GPU at different clocks: variants are compared by their ratio to a baseline that
    ran beside all of them.
    """
    rows: dict[str, list[Row]] = {}
    for file in TABLES[name][1]:
        alike: dict[tuple[str, str, str], list[tuple[Time, Evidence]]] = {}
        for row in read_rows(RESULTS / file):
            if (found := READ[name](row)) is not None:
                run = " ".join(row.baselines) if file == BESIDE else ""  # whose chosen one it names
                alike.setdefault((found.kind, str(found.sizes), run), []).append((found, row))
        for (kind, _, run), group in alike.items():
            common = max(set[str].intersection(*(set(row.baselines) for _, row in group)))
            usual = statistics.median(row.baselines[common] for _, row in group)
            times = {
                one.name: round(one.microseconds * row.baselines[common] / usual, 2)
                for one, row in group
            }
            source = f"{file}, {max(row.date for _, row in group)}" + f", beside {run}" * bool(run)
            rows.setdefault(kind, []).append(Row(group[0][0].sizes, {}, times, source))
    return rows


def recorded(name: str) -> dict[str, Kind]:
    """The table's records with these rows, and with those of sizes drawn at random, of which only
    the fastest by the model are told."""
    table, rows = replace(TABLES[name][0], more=discovered(name)), measured(name)
    known: dict[str, Kind] = {}
    for label, kind in _with_new_kinds(name, renewed(name, print), rows).items():
        config = configure(name, kind.settings)[0]
        told = {one for row in rows.get(label, ()) for one in row.measured}
        kind = _with_replays(table, kind, config, sorted(told) if kind.replays else table.variants)  # noqa: PLW2901
        names = [one for one in kind.replays if table.variants[one].takes(config)]
        found: list[Row] = []
        for row in rows.get(label, ()):
            times = {one: row.measured[one] for one in names if one in row.measured}
            predicted = table.predicted(kind, names, config, row.sizes)
            found += [replace(row, predicted=predicted, measured=times)] * bool(times)
        plain = [one for one in names if table.variants[one].whole]
        for sizes in drawn() if name == "gemm" else ():
            best = table.fastest(replace(kind, rows=()), plain, config, sizes, TOLD)
            found.append(Row(sizes, table.predicted(kind, best, config, sizes), {}))
        known[label] = with_rows(kind, found)
    return known


def _with_replays(table: Table, kind: Kind, config: Any, names: Iterable[str]) -> Kind:
    """With those of variants that it does not have yet; some compile for no configuration."""
    replays = dict(kind.replays)
    for one in (table.variants[x] for x in names if x not in kind.replays):
        with contextlib.suppress(WarploomError):
            if one.takes(config):
                replays[one.name] = recorded_replay(one, config)
    return replace(kind, replays=replays)


def _with_new_kinds(
    name: str, known: Mapping[str, Kind], rows: Mapping[str, Sequence[Row]]
) -> Mapping[str, Kind]:
    """With kinds that rows tell of and the table does not have: products with an epilogue that
    takes as long as some steps."""
    new = [label for label in rows if label not in known] if name == "gemm" else []
    settings = {label: {"bias": "true", "activation": label.split()[-1]} for label in new}
    return {**known, **{label: Kind(settings[label], {}, ()) for label in new}}


def drawn() -> Iterator[dict[str, int]]:
    """Sizes of products whose logarithms are evenly spread."""
    random = Random(0)
    for _ in range(SHAPES):
        m, n, k = (round(2 ** random.uniform(8, 14) / 8) * 8 for _ in range(3))
        yield {"m": m, "n": n, "k": k, "batch": 1}


def losses(name: str, known: Mapping[str, Kind]) -> dict[str, tuple[str, float]]:
    """By kind and sizes: what is chosen without the row of these sizes, and what that loses."""
    found: dict[str, tuple[str, float]] = {}
    for label, kind in known.items():
        for row in (row for row in kind.rows if len(row.measured) > 1):
            others = replace(kind, rows=tuple(one for one in kind.rows if one is not row))
            timed = {
                one: row.predicted[one] * others.error(one, row.sizes)
                for one in row.measured
                if one in row.predicted
            }
            chosen = min(timed, key=lambda one: timed[one])
            best = min(row.measured[one] for one in timed)
            sizes = " ".join(
                str(size if isinstance(size, int) else len(size)) for size in row.sizes.values()
            )
            found[f"{label}: {sizes}"] = chosen, row.measured[chosen] / best - 1
    return found


def build(out: Path, cases: Iterator[dict[str, Any]]) -> None:
    """The variants of each case, and what is told of them; `points` are variants that the table
    does not have."""
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        name, known = case["kernel"], case.pop("settings")
        table, case["folders"] = TABLES[name][0], {}
        config = config_of(case) if "what" in case else configure(name, known)[0]
        points: dict[str, Variant] = case.pop("points", {})
        case["points"] = {}
        for one in (*case.pop("names"), *points):
            variant, folder = points.get(one) or table.variants[one], f"{number}-{kb.slug(one)}"
            case["points"][one] = variant.point.to_json()
            made = variant.config(config)
            program = entry(name).program(made)
            Selected(one, made, program, variant.schedule(made)).build().write(out / folder)
            case["folders"][one] = folder
        found.append(case)
        write_text_atomically(out / "cases.json", json.dumps(found, indent=1))


def few_rows() -> Iterator[dict[str, Any]]:
    """Products of few rows with the weights of `gemm-serving`: what is chosen and the variants that
    are fastest by the model alone. Operands alternate that L2 does not hold together."""
    from bench import gemm_serving_cases as serving  # noqa: PLC0415 (which imports torch's rivals)

    for m, (n, k) in itertools.product(serving.ROWS, serving.NARROW):
        sizes = {"m": m, "n": n, "k": k}
        known = {**{x: str(size) for x, size in sizes.items()}, "b": "nk"}
        config, kind = configure("gemm", known)[0], GEMM.known["16-bit"]
        whole = [x for x in kind.replays if (v := GEMM.variants[x]).whole and v.takes(config)]
        asked = entry("gemm").asked(config, full_sizes("gemm", known))
        best = GEMM.fastest(replace(kind, rows=()), whole, config, asked, FEW_TIMED)
        yield {
            "kernel": "gemm",
            "what": "few",
            "sizes": sizes,
            "copies": max(1, min(MOST_COPIES, int(BEYOND_L2 / (2 * n * k)))),
            "settings": known,
            "names": [*dict.fromkeys([select("gemm", known).name, *best])],
        }


def config_of(case: Mapping[str, Any]) -> GemmConfig:
    """The product of a case of `bench.gemm_sitting`, or of few rows."""
    from bench import gemm_cases  # noqa: PLC0415 (which imports this)

    if case["what"] == "few":
        return GemmConfig(b="nk")
    return GemmConfig() if case["what"] == "time" else gemm_cases.OTHERS[case["what"]][0]


def near(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Cases of `bench.gemm_sitting`: what is chosen, what comes next by the model, and the fastest
    of the points that have one other option than one of these."""
    for name in names:
        what, shape = name.split()
        m, n, k = map(int, shape.split("x"))
        case: dict[str, Any] = {"kernel": "gemm", "what": what, "sizes": {"m": m, "n": n, "k": k}}
        config = config_of(case)
        sizes = {"m": m, "n": n, "k": k, "batch": BATCH if config.batched else 1}
        kind = GEMM.kind(config)
        fitting = [x for x in kind.replays if (v := GEMM.variants[x]).whole and v.takes(config)]
        chosen = [GEMM.choose(config, sizes, lambda one: one.whole).name]
        best = [*dict.fromkeys([*chosen, *GEMM.fastest(kind, fitting, config, sizes, NEAR)])]
        times: dict[str, tuple[float, Variant]] = {}
        for one in (GEMM.variants[x] for x in best):
            program = one.program(one.config(config))
            for words in variations(program, one.point.plan):
                point = replace(one.point, plan=words)
                variant = Variant(_near_name(one, words), point, GEMM.template)
                try:
                    launch = variant.launch(variant.config(config), sizes, "h200")
                    time = launch.time(recorded_replay(variant, config)).microseconds
                except WarploomError:
                    continue
                times[variant.name] = time, variant
        points = sorted(times, key=lambda one: times[one][0])[:NEAR_TIMED]
        yield {**case, "settings": {}, "copies": 3 if m * n * k < 2**37 else 1, "names": best,
               "points": {one: times[one][1] for one in points}}  # fmt: skip


def _near_name(variant: Variant, words: Sequence[str]) -> str:
    """A name that says in which option a plan differs."""
    changed = [word for word in words if word not in variant.point.plan]
    gone = [word.partition("=")[0] for word in variant.point.plan if word not in words]
    words = changed or [f"no-{name}" for name in gone]
    return "-".join([variant.name, *(word.replace("=", "") for word in words)])


def drawn_sizes(seed: int) -> Iterator[dict[str, Any]]:
    """Sizes drawn at random: what is chosen and the variants that come next by the model."""
    from bench import engine_model  # noqa: PLC0415 (which reads the tables' rows)

    for name, origin, sizes in engine_model.cases(seed):
        if "drawn" not in origin:
            continue
        known = {x: str(size) for x, size in sizes.items()}
        if name == "attention":
            known |= {"head_dim": known.pop("d"), "causal": ("false", "true")[sizes["causal"]]}
        config = configure(name, known)[0]
        table, asked = TABLES[name][0], entry(name).asked(config, full_sizes(name, known))
        kind = table.kind(config)
        fitting = [one for one in kind.replays if table.variants[one].takes(config)]
        names = [select(name, known).name, *table.fastest(kind, fitting, config, asked, BEST)]
        yield {
            "kernel": name, "sizes": sizes, "settings": known, "names": [*dict.fromkeys(names)]
        }  # fmt: skip


def run(where: Path, out: Path, rounds: int = ROUNDS) -> None:
    """Time the variants of each case beside each other; the first is the chosen one."""
    import torch  # noqa: PLC0415

    from bench import engine_model  # noqa: PLC0415

    rows = list[Evidence]()
    for case in json.loads((where / "cases.json").read_text()):
        what, copies = case.get("what"), range(case.get("copies", 1))
        sets = [_operands(torch, case, seed) for seed in copies]
        built = {one: Built.read(where / folder) for one, folder in case["folders"].items()}
        first = next(iter(built))
        images = {**built, CONTROL: built[first]}
        libraries = _libraries(torch, what) if what else {}
        calls: dict[str, Callable[[], None]] = {}
        for one, image in images.items():
            names = [array.name for array in image.source.arrays]
            calls[one] = functools.partial(
                _launch, torch, image.kernel(), names, itertools.cycle(sets)
            )
        for one, call in libraries.items():
            calls[one] = functools.partial(_call, call, itertools.cycle(sets))
        gpu = sitting.Gpu(torch, calls)
        bursts = sitting.measure(gpu, rounds, False, 0)["bursts"]
        times = {one: [1e3 * ms for ms in found["ms"]] for one, found in bursts.items()}
        beside = [one for one in (first, *libraries) if one in times]
        best = min(beside, key=lambda one: statistics.median(times[one]))
        _, *control = median_interval(times[first], times[CONTROL])
        shape = engine_model.shape_of(case["sizes"])
        for one in (one for one in built if one in times):
            middle, *interval = median_interval(times[one], times[best])
            row = Evidence(
                claim=CLAIM,
                kernel=f"{case['kernel']} {one}",
                shape=f"{shape} {what}" if what in WORDS else shape,
                dtype=DTYPES.get(what, "bf16"),
                **kb.provenance(),
                compiler=built[one].resources.compiler,
                unit="us",
                better="lower",
                ours=statistics.median(times[one]),
                baselines={other: statistics.median(times[other]) for other in beside},
                ratio_to_best=middle,
                ci95=(interval[0], interval[1]),
                control=(control[0], control[1]),
                samples=rounds,
                checks=_checks(torch, case, one, calls[one], sets),
            )
            rows.append(row)
            told = round(row.ours, 2), round(middle, 4), row.checks["numerics"]
            print(row.kernel, row.shape, *told, flush=True)
        write_rows(out / BESIDE, rows)


def _operands(torch: Any, case: Mapping[str, Any], seed: int) -> dict[str, Any]:
    from bench import engine_model, gemm_cases  # noqa: PLC0415

    if "what" not in case:
        return engine_model.operands(torch, dict(case))
    sizes = (case["sizes"][name] for name in "mnk")
    found = gemm_cases.operands(torch, config_of(case), *sizes, seed)
    if "bias" in found:
        found["bias16"] = found["bias"].to(found["c"].dtype)
    return found


def _libraries(torch: Any, what: str) -> Mapping[str, Callable[[dict[str, Any]], None]]:
    from bench import gemm  # noqa: PLC0415

    if what == "few":
        return {"cuBLAS": lambda v: torch.mm(v["a"], v["b"].t(), out=v["c"])}
    return gemm.baselines(torch, what)


def _checks(
    torch: Any, case: Mapping[str, Any], one: str, call: Callable[[], None], sets: Any
) -> dict[str, Any]:
    """Whether the first rows of a product are right, and the point."""
    from bench import gemm  # noqa: PLC0415

    found = {"point": case["points"][one]} if one in case.get("points", {}) else {}
    if "what" not in case:
        return {"numerics": "not checked", **found}
    results = gemm.verify(torch, config_of(case), sets[0], {one: lambda _: _every(call, sets)})
    return {"numerics": results[one], **found}


def _every(call: Callable[[], None], sets: Sequence[Any]) -> None:
    """Once on each of the sets that a call takes in turn."""
    for _ in sets:
        call()


def _call(call: Callable[[dict[str, Any]], None], sets: Iterator[dict[str, Any]]) -> None:
    call(next(sets))


def _launch(
    torch: Any, kernel: Kernel, names: Sequence[str], sets: Iterator[dict[str, Any]]
) -> None:
    """On the stream of the moment: a graph captures another one."""
    values = next(sets)
    kernel(
        {name: values[name] for name in names}, stream=int(torch.cuda.current_stream().cuda_stream)
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "build", "run", "merge"), nargs="?")
    parser.add_argument("where", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--few", action="store_true", help="build: products of few rows")
    parser.add_argument("--near", default="", help="build: points near what these cases get")
    args = parser.parse_args()
    if args.what == "build":
        asked = [one.strip() for one in args.near.split(",") if one.strip()]
        drawn_or_few = few_rows() if args.few else drawn_sizes(args.seed)
        build(args.where, near(asked) if asked else drawn_or_few)
    elif args.what == "run":
        run(args.where, args.out, args.rounds)
    elif args.what == "merge":
        rows = (*read_rows(RESULTS / BESIDE), *read_rows(args.where))
        merged = {(row.kernel, row.shape, row.dtype, *row.baselines): row for row in rows}
        write_rows(RESULTS / BESIDE, [*merged.values()])
    else:
        write(args.check)


def write(check: bool) -> None:
    """Put the rows into the tables; with `check` only say what the choice loses."""
    for name in TABLES:
        known, table = recorded(name), replace(TABLES[name][0], more=discovered(name))
        lost = losses(name, known)
        for label, (chosen, loss) in lost.items():
            print(f"{name} {label:40} {chosen:44} {loss:6.1%}")
        each = [loss for _, loss in lost.values()]
        print(f"{name}: {statistics.mean(each):.2%} lost on average, {max(each):.1%} at most")
        if not check:
            kept = {table.fallback, *(one for kind in known.values() for one in kind.replays)}
            variants = {one: v for one, v in table.variants.items() if one in kept}
            write_text_atomically(table.path, as_toml(variants, known))


if __name__ == "__main__":
    main()
