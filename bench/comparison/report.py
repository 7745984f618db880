"""Rows and figures of the comparison, from the logs alone."""

from __future__ import annotations

import datetime
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.comparison.broker import CONFIRMED
from bench.comparison.runs import METHODS
from bench.evidence import Evidence, write_rows
from warploom.errors import InputError
from warploom.files import write_text_atomically

CLAIM = "search-comparison"
FIGURES = Path(__file__).parents[2] / "docs" / "img"
COLOURS = ("#999999", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#d62728", "#17becf",
           "#000000", "#e377c2", "#bcbd22", "#7f3b08")  # fmt: skip
WIDTH, HEIGHT, MARGIN = 640, 340, 48
SHARE = 0.95
MILESTONES = (20, 50, 100, 200, 300)

Curve = list[float]


def report(work: Path, results: Path) -> int:
    """Write the rows and a figure for each kernel; returns the exit status.

    Raises `InputError` when the folder holds no finished comparison.
    """
    rows: list[Evidence] = []
    for log in sorted(work.glob("*.jsonl")):
        lines = last_sittings([json.loads(line) for line in log.read_text().splitlines()])
        compared = [line for line in lines if "compare" in line]
        device = next((line["device"] for line in lines if "device" in line), None)
        if not compared or device is None:
            print(f"{log.stem}: no comparison in its log, left out")
            continue
        curves = curves_of(lines)
        rows += kernel_rows(log.stem, lines, compared, device, curves)
        figure = draw(log.stem, curves)
        write_text_atomically(FIGURES / f"search_comparison_{log.stem}.svg", figure)
    if not rows:
        raise InputError(f"{work} holds no finished comparison on a GPU")
    write_rows(results / "search_comparison.json", rows)
    print(f"{len(rows)} rows in {results / 'search_comparison.json'}, figures in {FIGURES}")
    return 0


def last_sittings(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines less those of runs that were played again later: their first attempt was cut off,
    and what it measured is no part of the run that counts."""
    began = {line["run"]: at for at, line in enumerate(lines) if line.get("n") == 1}
    kept: list[dict[str, Any]] = []
    for at, line in enumerate(lines):
        if "compare" in line:
            # A result belongs to the run when the comparison came after the run's beginning.
            compare = {run: r for run, r in line["compare"].items() if at > began.get(run, -1)}
            kept.append({**line, "compare": compare})
        elif at >= began.get(line.get("run", ""), -1):
            kept.append(line)
    return kept


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Curve]]:
    """{method: best-so-far of each seed}: at measurement n the best mean score of a candidate
    measured often enough, 1.0 before there is one."""
    scores: dict[str, dict[str, list[float]]] = {}
    found: dict[str, Curve] = {}
    for line in lines:
        if "n" not in line:
            continue
        mine = scores.setdefault(line["run"], {})
        if line["outcome"] == "ok":
            mine.setdefault(line["digest"], []).append(line["speedup"])
        curve = found.setdefault(line["run"], [])
        sure = mine.get(line["digest"], [])
        now = statistics.fmean(sure) if len(sure) >= CONFIRMED else 1.0
        curve.append(max(now, curve[-1] if curve else 1.0))
    methods: dict[str, list[Curve]] = {}
    for run, curve in found.items():
        methods.setdefault(run.split("-", 1)[1].rsplit("-", 1)[0], []).append(curve)
    return methods


def to_share(curve: Curve) -> int | None:
    """Measurements until 95 % of a curve's final gain; None when it gained nothing."""
    gain = curve[-1] - 1.0
    if gain <= 0.0:
        return None
    return next(n for n, best in enumerate(curve, 1) if best - 1.0 >= SHARE * gain)


def failures(lines: Sequence[Mapping[str, Any]], runs: Sequence[str]) -> dict[str, int]:
    """How many measured candidates were wrong or faulted, by outcome: each is a verifier's miss."""
    return dict(
        Counter(
            line["outcome"]
            for line in lines
            if line.get("run") in runs and line.get("outcome", "ok") != "ok"
        )
    )


def gains_after(curves: Sequence[Curve]) -> dict[str, list[float]]:
    """{measurements: best confirmed score so far of each seed}, while every seed still played."""
    shortest = min((len(curve) for curve in curves), default=0)
    return {
        str(n): [round(curve[n - 1], 4) for curve in curves] for n in MILESTONES if n <= shortest
    }


def kernel_rows(
    kernel: str,
    lines: Sequence[Mapping[str, Any]],
    compared: Sequence[Mapping[str, Any]],
    device: Mapping[str, Any],
    curves: Mapping[str, list[Curve]],
) -> list[Evidence]:
    """One row a method: the seeds' results in the comparison they were part of, the median seed
    first. Logs of several sittings may follow one another: each has a comparison of its own."""
    config = next((line["config"] for line in lines if "config" in line), "?")
    done = {line["run"]: line for line in lines if line.get("done")}
    rows: list[Evidence] = []
    for method in METHODS:
        runs = sorted(r for r, d in done.items() if d["method"] == method and d["measurements"])
        if not runs:
            continue  # not run, or it could not play this kernel: the log says why
        # A run that found nothing hands back the original, whose ratio to itself is 1.
        unchanged = [1.0, 1.0, 1.0]
        of = {run: line for line in compared for run in line["compare"]}
        ratios = {run: of[run]["compare"][run] if run in of else unchanged for run in runs}
        middle = sorted(runs, key=lambda run: ratios[run][0])[len(runs) // 2]
        sitting = of.get(middle, compared[-1])
        ratio = ratios[middle]
        reached = [to_share(curve) for curve in curves.get(method, [])]
        rows.append(
            Evidence(
                claim=CLAIM,
                kernel=f"{kernel} / {method}",
                shape="as in sass-search",
                dtype="as in sass-search",
                device=str(device["name"]),
                driver=str(device["driver_version"]),
                compiler="ptxas of Triton",
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                command=f"python -m bench.search_comparison --kernels {kernel} --methods {method} "
                f"--seeds {len(runs)} --measurements {max(done[r]['measurements'] for r in runs)}",
                unit="us",
                better="lower",
                ours=sitting["median_us"] / ratio[0],
                baselines={f"triton {config}": sitting["median_us"]},
                ratio_to_best=ratio[0],
                ci95=(ratio[1], ratio[2]),
                control=(sitting["control"][0], sitting["control"][1]),
                samples=len(runs),
                checks={
                    "seeds": {run: ratios[run] for run in runs},
                    "measurements": [done[run]["measurements"] for run in runs],
                    "measurements_to_95_percent": reached,
                    "failed_candidates": failures(lines, runs),
                    "search_time_gain_after": gains_after(curves.get(method, [])),
                    "ended": {run: _ended(done[run]) for run in runs},
                },
                notes="median seed; `ours` is the original's time over the ratio",
            )
        )
    return rows


def _ended(line: Mapping[str, Any]) -> str:
    if "error" in line:
        return str(line["error"])
    return "cut short" if "cut_short" in line else "all measurements spent"


def steps(curve: Curve) -> list[tuple[int, float]]:
    """The corners of a curve: (measurement, value) where it rises, and its ends."""
    last = len(curve)
    return [
        (n, value)
        for n, value in enumerate(curve, 1)
        if n in (1, last) or not curve[n - 2] == value == curve[n]
    ]


def draw(kernel: str, curves: Mapping[str, list[Curve]]) -> str:
    """Best-so-far curves: the median of the seeds, with the band from the worst to the best."""
    longest = max((len(c) for seeds in curves.values() for c in seeds), default=1)
    highest = max((c[-1] for seeds in curves.values() for c in seeds), default=1.0)
    top = max(highest, 1.005)

    def at(n: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * n / longest
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - 1.0) / (top - 1.0)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 130} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH + 130}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="20" font-size="13">{kernel}: best so far (search-time scores, '
        "confirmed)</text>",
        f'<polyline points="{at(0, top)} {at(0, 1.0)} {at(longest, 1.0)}" fill="none" '
        'stroke="black"/>',
        f'<text x="{MARGIN}" y="{HEIGHT - 18}">0</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 18}" text-anchor="end">{longest} '
        "measurements</text>",
        f'<text x="4" y="{MARGIN}">{top:.3f}x</text>',
        f'<text x="4" y="{HEIGHT - MARGIN}">1.000x</text>',
    ]
    for number, method in enumerate(name for name in METHODS if name in curves):
        colour = COLOURS[list(METHODS).index(method) % len(COLOURS)]
        ends = min(len(curve) for curve in curves[method])  # no seed is drawn on past its last
        seeds = [curve[:ends] for curve in curves[method]]
        middle = [statistics.median(values) for values in zip(*seeds, strict=True)]
        low, high = ([f(v) for v in zip(*seeds, strict=True)] for f in (min, max))
        band = [at(n, v) for n, v in steps(high)]
        band += [at(n, v) for n, v in reversed(steps(low))]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.12"/>')
        line = " ".join(at(n, value) for n, value in steps(middle))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        y = MARGIN + 16 * number
        parts.append(f'<text x="{WIDTH - MARGIN + 12}" y="{y}" fill="{colour}">{method}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
