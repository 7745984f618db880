"""What was measured of the variants of the tuned tables, and how good the choice among them is.

    python -m bench.tuned            put the rows of bench/results into kernels/*/tuned.toml, with
                                     replays of the model as it is
    python -m bench.tuned --check    print only
    python -m bench.tuned build DIR          for sizes drawn with --seed: the chosen, the next ones;
                                             with --few for products of few rows: every variant
    python -m bench.tuned run DIR --out OUT  on a GPU machine: rows of claim `tuned-tables`, which
                                             time them in shuffled rounds of bursts
    python -m bench.tuned merge FILE         into bench/results/choices.json

At every measured shape a variant is chosen as if the shape had not been measured: the loss is that
of its measured time against the best one there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.attention_cases import PACKED
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built
from warploom.evidence import Evidence, read_rows, write_rows
from warploom.files import write_text_atomically
from warploom.flows.record import renewed, with_rows
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.variant import GEMM
from warploom.kernels.library import configure, entry
from warploom.kernels.select import full_sizes, select
from warploom.kernels.tuned.table import Kind, Row, Table, as_toml
from warploom.runtime.kernel import Kernel
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results"
MODEL, BESIDE = "engine_model.json", "choices.json"
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
    shape, _, what = row.shape.partition(" ")
    kinds = {"bf16": "16-bit", "e4m3 fp8": "8-bit", "e4m3 promoted": "8-bit promoted"}
    name = named(row)
    if not row.kernel.startswith("gemm") or row.dtype not in kinds or name not in GEMM.variants:
        return None
    if what not in ("", "fp8", "promoted") and "default" not in row.kernel:
        return None
    m, n, k = map(int, shape.split("x"))
    sizes = {"m": m, "n": n, "k": k, "batch": BATCH if what == "batched" else 1}
    time = row.ours if row.unit == "us" else 2e-6 * prod(sizes.values()) / row.ours
    return Time(kinds[row.dtype], name, sizes, time)


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
        alike: dict[tuple[str, str], list[tuple[Time, Evidence]]] = {}
        for row in read_rows(RESULTS / file):
            if (found := READ[name](row)) is not None:
                alike.setdefault((found.kind, str(found.sizes)), []).append((found, row))
        for (kind, _), group in alike.items():
            common = max(set[str].intersection(*(set(row.baselines) for _, row in group)))
            usual = statistics.median(row.baselines[common] for _, row in group)
            times = {
                one.name: round(one.microseconds * row.baselines[common] / usual, 2)
                for one, row in group
            }
            source = f"{file}, {max(row.date for _, row in group)}"
            rows.setdefault(kind, []).append(Row(group[0][0].sizes, {}, times, source))
    return rows


def recorded(name: str) -> dict[str, Kind]:
    """The table's records with these rows, and with those of sizes drawn at random, of which only
    the fastest by the model are told."""
    table, rows = TABLES[name][0], measured(name)
    known: dict[str, Kind] = {}
    for label, kind in renewed(name, print).items():
        config = configure(name, kind.settings)[0]
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
    """The variants of each case, and what is told of them."""
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        name, known = case["kernel"], case.pop("settings")
        table, case["folders"] = TABLES[name][0], {}
        config = configure(name, known)[0]
        for one in case.pop("names"):
            variant, folder = table.variants[one], f"{number}-{one}"
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
            "sizes": sizes,
            "b": "nk",
            "copies": max(1, min(MOST_COPIES, int(BEYOND_L2 / (2 * n * k)))),
            "settings": known,
            "names": [*dict.fromkeys([select("gemm", known).name, *best])],
        }


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


def run(where: Path, out: Path) -> None:
    """Time the variants of each case beside each other; the first is the chosen one."""
    import torch  # noqa: PLC0415

    from bench import engine_model  # noqa: PLC0415

    rows = list[Evidence]()
    for case in json.loads((where / "cases.json").read_text()):
        sets = [engine_model.operands(torch, case) for _ in range(case.get("copies", 1))]
        calls: dict[str, Callable[[], None]] = {}
        first = next(iter(case["folders"]))
        for one in (*case["folders"], CONTROL):
            built = Built.read(where / case["folders"].get(one, case["folders"][first]))
            kernel = built.kernel()
            calls[one] = functools.partial(_launch, torch, kernel, itertools.cycle(sets))
        bursts = sitting.measure(sitting.Gpu(torch, calls), ROUNDS, False, 0)["bursts"]
        times = {one: [1e3 * ms for ms in found["ms"]] for one, found in bursts.items()}
        _, *control = median_interval(times[first], times[CONTROL])
        compiler = Built.read(where / case["folders"][first]).resources.compiler
        for one in case["folders"]:
            middle, *interval = median_interval(times[one], times[first])
            row = Evidence(
                claim="tuned-tables",
                kernel=f"{case['kernel']} {one}",
                shape=engine_model.shape_of(case["sizes"]),
                dtype="bf16",
                **kb.provenance(),
                compiler=compiler,
                unit="us",
                better="lower",
                ours=statistics.median(times[one]),
                baselines={first: statistics.median(times[first])},
                ratio_to_best=middle,
                ci95=(interval[0], interval[1]),
                control=(control[0], control[1]),
                samples=ROUNDS,
            )
            rows.append(row)
            print(row.kernel, row.shape, round(row.ours, 2), flush=True)
        write_rows(out / BESIDE, rows)


def _launch(torch: Any, kernel: Kernel, sets: Iterator[dict[str, Any]]) -> None:
    """On the stream of the moment: a graph captures another one."""
    kernel(next(sets), stream=int(torch.cuda.current_stream().cuda_stream))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "build", "run", "merge"), nargs="?")
    parser.add_argument("where", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few", action="store_true", help="build: products of few rows")
    args = parser.parse_args()
    if args.what == "build":
        build(args.where, few_rows() if args.few else drawn_sizes(args.seed))
    elif args.what == "run":
        run(args.where, args.out)
    elif args.what == "merge":
        merged = {(r.kernel, r.shape): r for r in read_rows(RESULTS / BESIDE)}
        merged |= {(r.kernel, r.shape): r for r in read_rows(args.where)}
        write_rows(RESULTS / BESIDE, [*merged.values()])
    else:
        write(args.check)


def write(check: bool) -> None:
    """Put the rows into the tables; with `check` only say what the choice loses."""
    for name, (table, _) in TABLES.items():
        known = recorded(name)
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
