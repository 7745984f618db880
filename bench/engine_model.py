"""What the model of a whole launch says before the run, beside what is measured then.

    python -m bench.engine_model recorded            the rows with what the model says now
    python -m bench.engine_model build DIR --seed N  build the defaults, predict their times
    python -m bench.engine_model run DIR --out OUT   on a GPU machine: rows of claim `engine-model`
    python -m bench.engine_model merge FILE          into bench/results/engine_model.json
    python -m bench.engine_model plot                docs/img/engine_model.svg from these rows and
                                                     those of `bench.engine_points`
    python -m bench.engine_model alone               into bench/results/engine_model_alone.json:
                                                     kernels timed alone for a second

The kernels are those of the tuned tables, at the lengths of the attention benchmark, the shapes of
the GEMM benchmark and others drawn at random; the model was calibrated on none of them. Samples
are bursts of 4 ms after 12 ms of rest (`bench.sitting`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, read_rows, write_rows
from bench.gemm_cases import SHAPES as GEMM_SHAPES
from bench.tables import errors
from bench.tuned import READ, TABLES
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built
from warploom.codegen.ir.plan import KernelSchedule
from warploom.files import write_text_atomically
from warploom.kernels.library import configure
from warploom.kernels.select import select
from warploom.perf.launch_time import Launch, LaunchTime
from warploom.perf.replay import replay
from warploom.runtime.stats import median_interval

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "engine_model.json"
ALONE = RESULTS.with_name("engine_model_alone.json")
POINTS = RESULTS.with_name("engine_points.json")
PLOT = ROOT.parent / "docs" / "img" / "engine_model.svg"
ROUNDS, TOKENS, WIDTH = 12, 16384, 2048
CONTROL = "again"


def cases(seed: int) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(kernel, where from, sizes)."""
    drawn = random.Random(seed)

    def between(low: int, high: int, step: int) -> int:
        return round(math.exp(drawn.uniform(math.log(low), math.log(high))) / step) * step

    for d in (64, 128):
        for causal in (False, True):
            for rows in (1024, 2048, 4096, 8192, 16384):
                yield "attention", "benchmark", _attention(d, causal, rows, TOKENS // rows)
    for m, n, k in GEMM_SHAPES:
        yield "gemm", "benchmark", {"m": m, "n": n, "k": k}
    for _ in range(10):
        rows = between(512, TOKENS, 1)
        sizes = _attention(drawn.choice((64, 128)), drawn.random() < 0.5, rows, TOKENS // rows or 1)
        yield "attention", f"drawn with seed {seed}", sizes
        m, n, k = between(512, 12288, 8), between(512, 12288, 8), between(512, 12288, 8)
        yield "gemm", f"drawn with seed {seed}", {"m": m, "n": n, "k": k}


def _attention(d: int, causal: bool, rows: int, batch: int) -> dict[str, int]:
    return {"batch": batch, "heads": WIDTH // d, "rows": rows, "d": d, "causal": int(causal)}


def predicted(name: str, sizes: dict[str, int]) -> tuple[Selected, Built, LaunchTime]:
    """The default kernel for a case, and how long it will take."""
    settings = {key: str(size) for key, size in sizes.items()}
    known = dict(sizes)
    if name == "attention":
        settings["head_dim"], settings["keys"] = settings.pop("d"), settings["rows"]
        settings["causal"] = "true" if known.pop("causal") else "false"
        known["keys"] = known["rows"]
    chosen = select(name, settings)
    assert isinstance(chosen.schedule, KernelSchedule)
    built = chosen.build()
    launch = Launch(chosen.program, chosen.launch, known, "h200")
    walked = replay(chosen.program, chosen.schedule, built.cubin, rates=launch.rates())
    return chosen, built, launch.time(walked)


def build(out: Path, seed: int) -> None:
    """Build every case and write its prediction beside it."""
    noted: list[dict[str, Any]] = []
    for number, (name, origin, sizes) in enumerate(cases(seed)):
        chosen, built, found = predicted(name, sizes)
        built.write(out / str(number))
        told = {"predicted": found.microseconds, "mhz": found.mhz, "limits": found.limits}
        noted.append(
            {"kernel": name, "origin": origin, "sizes": sizes, "name": chosen.name, **told}
        )
        print(number, noted[-1], flush=True)
        write_text_atomically(out / "cases.json", json.dumps(noted, indent=1))


def by_table(name: str, row: Evidence, limit: str) -> tuple[LaunchTime, str, float] | None:
    """What the model says of a row's kernel under a limit of power, from the replay of the tuned
    table; the variant, and the microseconds that were measured. None: another kernel was."""
    table, measured = TABLES[name][0], READ[name](row)
    if measured is None or measured.name not in table.known[measured.kind].replays:
        return None
    kind, variant = table.known[measured.kind], table.variants[measured.name]
    config = variant.config(configure(name, kind.settings)[0])
    launch = replace(variant.launch(config, measured.sizes, "h200"), limit=limit)
    return launch.time(kind.replays[measured.name]), measured.name, measured.microseconds


def alone() -> list[Evidence]:
    """Kernels that ran for a second, under the board's limit of power, with their predictions."""
    rows: list[Evidence] = []
    for name in TABLES:
        for row in read_rows(ROOT / "results" / f"{name}_alone.json"):
            if (one := by_table(name, row, "power.limit")) is None:
                continue
            found, variant, ours = one
            rows.append(
                replace(
                    row,
                    claim="engine-model",
                    kernel=f"{name} {variant}",
                    unit="us",
                    better="lower",
                    ours=ours,
                    baselines={"predicted": found.microseconds},
                    ratio_to_best=found.microseconds / ours,
                    ci95=None,
                    control=None,
                    checks=_told(found, ours),
                )
            )
    return rows


def recorded() -> list[Evidence]:
    """The rows with what the model says now, from the replays of the tuned tables."""
    rows: list[Evidence] = []
    for row in read_rows(RESULTS):
        one = by_table(row.kernel.split()[0], row, "power.burst")
        assert one is not None
        found, *_ = one
        rows.append(
            replace(
                row,
                baselines={"predicted": found.microseconds},
                ratio_to_best=found.microseconds / row.ours,
                ci95=None,
                checks={**row.checks, **_told(found, row.ours)},
                notes="measured before, predicted afterwards",
            )
        )
    return rows


def _told(found: LaunchTime, ours: float) -> dict[str, Any]:
    return {
        "error": round(found.microseconds / ours - 1.0, 4),
        "predicted_mhz": round(found.mhz),
        "limits": found.limits,
    }


def operands(torch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Normal random arrays by parameter, bf16."""
    sizes = case["sizes"]
    if case["kernel"] == "gemm":
        m, n, k = (sizes[name] for name in "mnk")
        shapes = {"a": (m, k), "b": (n, k) if case.get("b") == "nk" else (k, n), "c": (m, n)}
    else:
        lead = sizes["batch"], sizes["heads"], sizes["rows"], sizes["d"]
        shapes = dict.fromkeys("qkvo", lead)
    return {x: torch.randn(shape, device="cuda").bfloat16() for x, shape in shapes.items()}


def shape_of(sizes: dict[str, int]) -> str:
    """As a row has it."""
    return "x".join(str(sizes[name]) for name in "mnk" if name in sizes) or (
        f"{sizes['d']} {'causal' if sizes['causal'] else 'full'} "
        f"{sizes['batch']}x{sizes['heads']}x{sizes['rows']}"
    )


def row(torch: Any, case: dict[str, Any], folder: Path) -> Evidence:
    """One case, timed."""
    kernel, compiler = Built.read(folder).kernel(), Built.read(folder).resources.compiler
    arrays = operands(torch, case)

    def call() -> None:
        kernel(arrays, stream=int(torch.cuda.current_stream().cuda_stream))

    gpu = sitting.Gpu(torch, {"ours": call, CONTROL: call})
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples = {key: [1e3 * ms for ms in one["ms"]] for key, one in bursts.items()}
    predicted = [case["predicted"]] * ROUNDS
    middle, *interval = median_interval(samples["ours"], predicted)
    _, *control = median_interval(samples["ours"], samples[CONTROL])
    ours = statistics.median(samples["ours"])
    sizes = case["sizes"]
    return Evidence(
        claim="engine-model",
        kernel=f"{case['kernel']} {case['name']}",
        shape=shape_of(sizes),
        dtype="bf16",
        **kb.provenance(),
        compiler=compiler,
        unit="us",
        better="lower",
        ours=ours,
        baselines={"predicted": case["predicted"]},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=ROUNDS,
        checks={
            "error": round(case["predicted"] / ours - 1.0, 4),
            "predicted_mhz": round(case["mhz"]),
            "limits": case["limits"],
            "origin": case["origin"],
        },
    )


def plot(rows: list[Evidence]) -> str:
    """Predicted over measured as SVG, both in microseconds on logarithmic axes."""
    low, high, size, edge = 4.0, 20000.0, 420.0, 50.0

    def at(value: float) -> float:
        return size * math.log(value / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * edge:.0f} '
        f'{size + 2 * edge:.0f}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<g transform="translate({edge} {edge})"><rect width="{size:.0f}" height="{size:.0f}" '
        'fill="none" stroke="#999"/>',
    ]
    for tick in (10, 100, 1000, 10000):
        x = at(tick)
        parts.append(f'<path d="M{x:.1f} 0V{size:.0f}M0 {size - x:.1f}H{size:.0f}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{size + 16:.0f}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="-6" y="{size - x + 4:.1f}" text-anchor="end">{tick}</text>')
    for factor, dash in ((1.0, ""), (1.08, "3 3"), (1 / 1.08, "3 3")):
        shift = size * math.log(factor) / math.log(high / low)
        parts.append(
            f'<path d="M0 {size - shift:.1f}L{size:.0f} {-shift:.1f}" stroke="#888" '
            f'stroke-dasharray="{dash}"/>'
        )
    for one in rows:
        color = "#c2410c" if "gemm" in one.kernel else "#1d4ed8"
        x, y = at(one.ours), size - at(one.baselines["predicted"])
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity=".7">'
            f"<title>{one.kernel} {one.shape}: {one.checks['error']:+.1%}</title></circle>"
        )
    middle = size / 2
    parts += [
        f'<text x="{middle}" y="{size + 34:.0f}" text-anchor="middle">measured, us</text>',
        f'<text transform="translate(-36 {middle}) rotate(-90)" text-anchor="middle">predicted, us'
        "</text>",
        '<text x="10" y="16" fill="#1d4ed8">attention</text>',
        '<text x="10" y="31" fill="#c2410c">GEMM</text></g></svg>',
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The model of a launch beside measurements.")
    parser.add_argument("what", choices=("recorded", "alone", "build", "run", "merge", "plot"))
    parser.add_argument("where", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "recorded":
        rows = recorded()
        write_rows(RESULTS, rows)
        print(errors(rows))
    elif args.what == "alone":
        rows = alone()
        write_rows(ALONE, rows)
        print(errors(rows))
    elif args.what == "build":
        build(args.where, args.seed)
    elif args.what == "merge":
        write_rows(RESULTS, read_rows(args.where))
    elif args.what == "plot":
        write_text_atomically(PLOT, plot([*read_rows(args.where), *read_rows(POINTS)]))
    else:
        import torch  # noqa: PLC0415

        rows = list[Evidence]()
        for number, case in enumerate(json.loads((args.where / "cases.json").read_text())):
            rows.append(row(torch, case, args.where / str(number)))
            write_rows(args.out / "engine_model.json", rows)
            print(rows[-1].shape, round(rows[-1].ours, 1), rows[-1].checks, flush=True)
        print(errors(rows))


if __name__ == "__main__":
    main()
