"""What `optimize` finds for textbook programs, beside the library's tuned tables.

    python -m bench.engine build DIR          search without a GPU, build what it found
    python -m bench.engine run DIR --out OUT  on a GPU machine: rows of claim `engine-user`
    python -m bench.engine merge FILE         into bench/results/engine.json

The search sees no GPU: a row's ours is the kernel that it predicts to be fastest, in microseconds,
and its ratio is tuned table / ours. The next ones are timed beside it in shuffled rounds of bursts,
so that a row also says what the model's order was worth: the best of all that were timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.front_door import operands
from warploom.codegen.compile.build import Built
from warploom.engine.points import Space
from warploom.engine.search import search
from warploom.engine.store import PointStore
from warploom.evidence import Evidence, read_rows, write_rows
from warploom.files import cache_folder
from warploom.kernels.select import select
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "engine.json"
ATTENTION, GEMM = "examples/textbook_attention.py:kernel", "examples/textbook_gemm.py:kernel"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "attention 128 causal 4096": (ATTENTION, {"batch": 4, "heads": 16, "rows": 4096}),
    "attention 128 causal 16384": (ATTENTION, {"batch": 1, "heads": 16, "rows": 16384}),
    "attention 128 full 8192": (ATTENTION, {"batch": 2, "heads": 16, "rows": 8192}),
    "gemm 4096x4096x4096": (GEMM, {"m": 4096, "n": 4096, "k": 4096}),
    "gemm 8192x8192x8192": (GEMM, {"m": 8192, "n": 8192, "k": 8192}),
}
ROUNDS, TIMED = 40, 6
TABLE = "tuned table"


def build(out: Path, effort: str) -> None:
    """Search every case and build the points that will be timed, and the table's kernel."""
    for title, (name, sizes) in CASES.items():
        known = {**sizes, **({"keys": sizes["rows"], "d": 128} if "rows" in sizes else {})}
        store = PointStore(cache_folder() / "points.sqlite")
        settings = {"causal": str("causal" in title).lower()} if "rows" in sizes else {}
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
    _, sizes = CASES[title]
    names = {str(n): folder / str(n) for n in range(len(note["points"]))}
    built = {name: Built.read(where) for name, where in names.items()}
    built[TABLE] = Built.read(folder / TABLE.replace(" ", "_"))
    arrays = operands(torch, title.split(maxsplit=1)[0], sizes)
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
    scale = results[TABLE].abs().max()
    off = {n: float((results[n] - results[TABLE]).abs().max() / scale) for n in names}
    timed = {**calls, sitting.CONTROL: calls[TABLE]}
    bursts = sitting.measure(sitting.Gpu(torch, timed), ROUNDS, False, 0)["bursts"]
    samples = {key: [1e3 * ms for ms in one["ms"]] for key, one in bursts.items()}
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
            "numerics": "pass" if all(one < 0.02 for one in off.values()) else "fail",
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
    args = parser.parse_args()
    if args.what == "merge":
        write_rows(RESULTS, read_rows(args.where))
        return
    if args.what == "build":
        build(args.where, args.effort)
        return
    import torch  # noqa: PLC0415

    rows: list[Evidence] = []
    for title in CASES:
        rows.append(row(torch, title, args.where / title.replace(" ", "_")))
        write_rows(args.out / "engine.json", rows)
        print(title, rows[-1].ratio_to_best, rows[-1].control, rows[-1].checks, flush=True)
        print(rows[-1].notes, flush=True)


if __name__ == "__main__":
    main()
