"""Fit the constants of the GEMM time model to measured rows, and say how honest the fit is.

    python -m bench.fit_gemm             fit to bench/results/gemm.json, print, write the constants
    python -m bench.fit_gemm --check     print only

Leave one out: for each measured shape the constants are fitted without its rows, the model picks a
variant, and the loss of that pick against the best variant measured there is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from warploom.evidence import read_rows
from warploom.kernels.gemm.choose import GEMM_CHOICES, TRANSPOSED, preferred
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import CONSTANTS_FILE, Constants, GemmChoice
from warploom.tile import BF16, E4M3

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "bench" / "results" / "gemm.json"
# Where the search begins: microseconds, rows of 128 B a microsecond, bytes a microsecond.
FIRST = Constants(
    step=0.8,
    operands=0.24,  # of power, by `bench/gemm_shares.py`: no time here depends on these two
    requested=0.13,
    relief=0.4,
    aligned=1000.0,
    ragged=400.0,
    epilogue=2.0,
    at_once=1.6,
    direct=3.0,
    start=2.0,
    dependent_start=1.0,
    narrow=1.15,
    two_per_sm=1.05,
    latency=1.0,
    late=2.0,
    cluster_reduce=2.0,
    drain=0.35,
    combine=3.0,
    summed=3e6,
)
POWER = ("operands", "requested")
CLOSE = 4.0  # a row counts as (best time of its shape / its time) to this power
Shape = tuple[int, int, int]
# prefix of the kernel's name, element type in the row, configuration
KINDS = (
    ("", "bf16", GemmConfig()),
    (
        "fp8 promoted ",
        "e4m3 promoted",
        GemmConfig(dtype=E4M3, out=BF16, b="nk", scales=True, promote=True),
    ),
)


@dataclass(frozen=True)
class Row:
    """One measured variant."""

    shape: Shape
    choice: GemmChoice
    config: GemmConfig
    time: float
    weight: float


def read(path: Path) -> list[Row]:
    """The measured rows of variants of the table: bf16 without an epilogue, and promoted fp8."""
    named = {
        (f"gemm {prefix}{choice.name}", kind): (choice, config)
        for prefix, kind, config in KINDS
        for choice in (*GEMM_CHOICES.values(), *TRANSPOSED)
    }
    times: dict[tuple[Shape, tuple[str, str]], float] = {}
    found = [r for r in read_rows(path) if (r.kernel, r.dtype) in named and r.shape.count("x") == 2]
    rates: dict[tuple[str, str], list[float]] = {}
    for row in found:
        rates.setdefault((row.shape, row.dtype), []).append(max(row.baselines.values()))
    for row in found:
        m, n, k = (int(part) for part in row.shape.split("x"))
        # Runs find the GPU at different clocks: they are compared by their ratio to the baseline.
        rate = row.ratio_to_best * statistics.median(rates[row.shape, row.dtype])
        times[(m, n, k), (row.kernel, row.dtype)] = 2e-6 * m * n * k / rate
    best: dict[tuple[Shape, str], float] = {}
    for (shape, (_, kind)), time in times.items():
        best[shape, kind] = min(time, best.get((shape, kind), math.inf))
    order = {id(choice): at for at, choice in enumerate((*GEMM_CHOICES.values(), *TRANSPOSED))}
    rows = [
        Row(shape, *named[key], time, (best[shape, key[1]] / time) ** CLOSE)
        for (shape, key), time in times.items()
    ]
    return sorted(rows, key=lambda row: order[id(row.choice)])


def error(rows: Sequence[Row], of: Constants) -> float:
    """Weighted mean of squared log ratios, those beyond a fifth counted linearly."""
    total = 0.0
    for row in rows:
        predicted = row.choice.microseconds(row.config, *row.shape, of=of)
        ratio = abs(math.log(predicted / row.time))
        total += row.weight * (ratio * ratio if ratio < 0.2 else 0.2 * (2 * ratio - 0.2))
    return total / sum(row.weight for row in rows)


def fit(
    rows: Sequence[Row],
    first: Constants = FIRST,
    rounds: int = 24,
    held: Mapping[str, float] | None = None,
) -> Constants:
    """Descend along one constant at a time, in its logarithm, with shrinking steps."""
    held = held or {}
    first = replace(first, **held)
    names = [f.name for f in fields(Constants)]
    held = {**{name: getattr(first, name) for name in POWER}, **held}
    point = [math.log(getattr(first, name)) for name in names]

    def at(values: Sequence[float]) -> float:
        return error(rows, Constants(*(math.exp(v) for v in values)))

    best, width = at(point), [0.2] * len(point)
    for _ in range(rounds):
        for place in (i for i, name in enumerate(names) if name not in held):
            best = _along(point, place, width, best, at)
    return Constants(*(math.exp(v) for v in point))


def _along(
    point: list[float],
    place: int,
    width: list[float],
    best: float,
    at: Callable[[Sequence[float]], float],
) -> float:
    moved = False
    for sign in (1.0, -1.0):
        while True:
            trial = list(point)
            trial[place] += sign * width[place]
            value = at(trial)
            if value >= best:
                break
            point[place], best, moved = trial[place], value, True
    if not moved:
        width[place] /= 2
    return best


def pick(shape: Shape, rows: Sequence[Row], of: Constants) -> tuple[str, float]:
    """(the model's variant among those measured, its loss against the best measured)."""
    there = [row for row in rows if row.shape == shape and not row.config.promote]
    times = [row.choice.microseconds(row.config, *shape, of=of) for row in there]
    timed = [(time, row.choice) for time, row in zip(times, there, strict=True)]
    best = preferred(timed, there[0].config)
    chosen = next(row for row in there if row.choice is best)
    return chosen.choice.name, chosen.time / min(row.time for row in there) - 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument(
        "--hold", nargs="*", default=[], metavar="NAME=VALUE", help="constants no row tells yet"
    )
    args = parser.parse_args()
    rows = read(args.rows)
    held = {name: float(value) for name, value in (part.split("=") for part in args.hold)}
    whole = fit(rows, held=held)
    print(json.dumps({k: float(f"{v:.4g}") for k, v in asdict(whole).items()}))
    print(
        f"{len(rows)} rows; root mean square of the log ratio {math.sqrt(error(rows, whole)):.3f}"
    )
    print(f"{'shape':22} {'fitted pick':24} {'loss':>6}   {'left-out pick':24} {'loss':>6}")
    left_out: dict[str, float] = {}
    for shape in dict.fromkeys(row.shape for row in rows):
        name, loss = pick(shape, rows, whole)
        others = fit([row for row in rows if row.shape != shape], whole, 6, held)
        other, lost = pick(shape, rows, others)
        label = "x".join(map(str, shape))
        left_out[label] = round(lost, 4)
        print(f"{label:22} {name:24} {loss:6.1%}   {other:24} {lost:6.1%}")
    if not args.check:
        data = {
            "source": f"bench/fit_gemm.py on {len(rows)} rows of bench/results/gemm.json (H200)",
            "held": held,
            "constants": {k: float(f"{v:.4g}") for k, v in asdict(whole).items()},
            "loss_with_the_shape_left_out": left_out,
        }
        CONSTANTS_FILE.parent.mkdir(parents=True, exist_ok=True)
        CONSTANTS_FILE.write_text(json.dumps(data, indent=1) + "\n")
        print(f"constants in {CONSTANTS_FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
