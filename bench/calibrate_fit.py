"""From the raw figures of bench/calibrate_schedule.py to the `measured` costs of costs.toml.

What a unit holds (its rate) and what comes on top (a latency) are told apart by size: a cost is
the intercept or the slope of cycles over columns, bytes or instructions, and its low and high ends
are the extremes of what was seen. tests/schedule/test_costs.py checks that the table says this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

KIB = 1024
ROWS = 64  # of every tile
STEP = 2 * 64 * 16  # FLOP of one wgmma for each column
TENSOR = 4096  # FLOP a cycle and SM (bf16)
Point = tuple[float, float]


@dataclass(frozen=True)
class Fit:
    """One cost: value and ends as costs.toml has them, unit, and how it was got."""

    value: float
    low: float
    high: float
    unit: str
    how: str


def line(points: Iterable[Point]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    given = list(points)
    count = len(given)
    mean_x, mean_y = sum(x for x, _ in given) / count, sum(y for _, y in given) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in given)
    slope /= sum((x - mean_x) ** 2 for x, _ in given)
    return mean_y - slope * mean_x, slope


def whole(values: Sequence[float], unit: str, how: str, value: float | None = None) -> Fit:
    """A cost in whole units: the median, between the extremes."""
    middle = round(median(values) if value is None else value)
    low, high = min(middle, round(min(values))), max(middle, round(max(values)))
    return Fit(middle, low, high, unit, how)


def tenths(values: Sequence[float], unit: str, how: str) -> Fit:
    """A cost to one decimal: the median, between the extremes."""
    found = [round(value, 1) for value in (median(values), min(values), max(values))]
    return Fit(found[0], found[1], found[2], unit, how)


def costs(raw: Mapping[str, Any]) -> dict[str, Fit]:
    """Every cost that the raw figures settle."""
    parts = (_loads, _products, _tiles, _beside, _between_groups)
    return {name: fit for part in parts for name, fit in part(raw).items()}


def _loads(raw: Mapping[str, Any]) -> dict[str, Fit]:
    tensor = [r for r in raw["loads"] if r["kind"] == "tensor"]
    stream = [r for r in raw["loads"] if r["kind"] == "stream" and r["blocks"] > 1]

    def over_size(source: str, part: str) -> tuple[float, float]:
        return line((r["bytes"] / KIB, r[part]) for r in tensor if r["from"] == source)

    near, far = over_size("l2", "p50"), over_size("dram", "p90")
    stores = line((r["bytes"] / KIB, r["p50"]) for r in raw["stores"])
    issue = [r["issue"] for r in raw["loads"] if r["kind"] != "stream"]
    slopes = [near[1], over_size("l2", "p10")[1], over_size("dram", "p50")[1]]
    return {
        "load.latency": whole(
            [near[0], over_size("l2", "p10")[0], far[0]], "clk",
            "tensor-map loads of 1 to 32 KiB, extrapolated to none; L2 median, DRAM 90 %", near[0],
        ),
        "load.per_kib": Fit(
            round(slopes[0], 1), round(slopes[1], 1), round(slopes[2], 1), "clk/KiB",
            "slope of the same loads over size, one SM; L2 median, DRAM median",
        ),
        "load.per_kib_all": tenths(
            [r["per_kib"] for r in stream if r["bytes"] >= 16 * KIB], "clk/KiB",
            "a ring of 4 slots kept full by every SM at once, from L2; slots of 16 and 32 KiB",
        ),
        "load.issue": whole(issue, "clk", "one thread: expect_tx and the copy"),
        "store.latency": whole([stores[0]], "clk", "bulk stores of 1 to 32 KiB until written"),
        "store.per_kib": tenths([stores[1]], "clk/KiB", "slope of the same stores, one SM"),
    }  # fmt: skip


def _products(raw: Mapping[str, Any]) -> dict[str, Fit]:
    alone = [r for r in raw["wgmma"] if r["groups"] == 1]

    def tail(mode: str) -> list[float]:
        return [
            r["cycles"] - r["batch"] * STEP * r["columns"] / TENSOR
            for r in alone
            if r["mode"] == mode and r["batch"] >= 4  # kernels issue 4 (depth 64) or more at once
        ]

    # At 64 columns the queue of about 7 wgmma drains fastest: a full one would count as issue.
    issue = [
        line((r["batch"], r["issue"]) for r in alone if _short(r, mode)) for mode in ("ss", "rs")
    ]
    return {
        "mma.latency": whole(tail("ss"), "clk", "wgmma from shared memory, batch to wait"),
        "mma.latency_registers": whole(tail("rs"), "clk", "wgmma with A in registers, as above"),
        "mma.issue": whole([i for i, _ in issue], "clk", "fence and commit: issue of no wgmma"),
        "mma.issue_per_step": whole([s for _, s in issue], "clk", "slope over wgmma of a batch"),
        "mma.queue": whole(
            [
                (r["cycles"] - tail(r["mode"])[0] - r["issue"]) / (STEP * r["columns"] / TENSOR)
                for r in alone
                if r["batch"] == max(x["batch"] for x in alone)
            ], "wgmma", "begun and not done when the last of a batch has issued",
        ),
    }  # fmt: skip


def _short(row: Mapping[str, Any], mode: str) -> bool:
    return row["mode"] == mode and row["columns"] == 64 and row["batch"] <= 8


def _tiles(raw: Mapping[str, Any]) -> dict[str, Fit]:
    def fits(*ops: str, groups: int = 1) -> list[tuple[float, float]]:
        return [
            line((r["columns"], r["cycles"]) for r in raw["tiles"] if _is(r, op, groups))
            for op in ops
        ]

    def per_1024(op: str) -> Fit:
        # Two groups keep the pipe full; each does ROWS x columns elements.
        ((_, slope),) = fits(op, groups=2)
        return tenths([slope / (2 * ROWS) * 1024], "clk/1024 elements", f"{op} of two groups")

    starts = [start for start, _ in fits("scale_shift", "rescale", "convert")]
    special = [fits("exp2")[0][0], *(r["latency"] for r in raw["lanes"] if r["op"] == "ex2")]
    reduce = [start for groups in (1, 2) for start, _ in fits("row_max", "row_sum", groups=groups)]
    return {
        "alu.latency": whole(starts, "clk", "scale, rescale, convert of 64 rows: zero columns"),
        "mufu.latency": whole(special, "clk", "ex2 of 64 rows: zero columns; dependent chain"),
        "reduce.latency": whole(reduce, "clk", "row max and sum of 64 rows: zero columns"),
        "max.per_1024": per_1024("row_max"),
    }


# Instructions of a thread in one operation of bench/contention.py on 64 x 128: 64 elements a thread
# (a conversion takes two), and two shuffles with their combination for both rows of a reduction.
ISSUED = {
    "row_max": 72, "row_sum": 72, "row_sum_local": 64, "scale_shift": 64, "exp2": 64,
    "rescale": 64, "convert": 32,
}  # fmt: skip


def _beside(raw: Mapping[str, Any]) -> dict[str, Fit]:
    taken = [
        (r["matmul_together"] - r["matmul_alone"])
        / (r["matmul_together"] / r["op_together"] * ISSUED[r["op"]])
        for r in raw["beside"]
    ]
    found = [round(value, 2) for value in (median(taken), min(taken), max(taken))]
    how = (
        "what one instruction of another group's arithmetic adds to a batch of wgmma, 7 operations"
    )
    slower = {
        special: [
            round(r["op_together"] / r["op_alone"], 2)
            for r in raw["beside"]
            if (r["op"] == "exp2") == special
        ]
        for special in (False, True)
    }
    lanes = "tile operations beside a wgmma batch of another group and alone, 6 operations"
    return {
        "mma.beside": Fit(found[0], found[1], found[2], "clk/instruction", how),
        "lanes.beside": _times(slower[False], lanes),
        "mufu.beside": _times(slower[True], "the same of ex2"),
    }


def _times(ratios: Sequence[float], how: str) -> Fit:
    return Fit(round(median(ratios), 2), min(ratios), max(ratios), "times", how)


def _is(row: Mapping[str, Any], op: str, groups: int) -> bool:
    return row["op"] == op and row["groups"] == groups


def _between_groups(raw: Mapping[str, Any]) -> dict[str, Fit]:
    one_way = {r["kind"]: r["one_way"] for r in raw["sync"] if r["kind"] != "hand-off"}
    hand = [r for r in raw["sync"] if r["kind"] == "hand-off"]
    fixed, slope = line((r["bytes"] / KIB, r["one_way"]) for r in hand)
    waits = [one_way["named barrier"], *(v for k, v in one_way.items() if "arrive" in k)]
    crossing = one_way["mbarrier, elected arrive"]
    return {
        "handoff.fixed": whole([fixed], "clk", "2 to 32 KiB by shared memory and a named barrier"),
        "handoff.per_kib": tenths([slope], "clk/KiB", "slope of the same over size"),
        "barrier.poll": whole(
            [r["cycles"] for r in raw["shared"] if r["op"] == "latency"], "clk",
            "one look at a barrier that is complete: a read of shared memory",
        ),
        "barrier.wait": whole(waits, "clk", "arrive to wake-up; named barrier, mbarrier", crossing),
        "barrier.named": whole([one_way["named barrier"]], "clk", "named barrier, one way"),
    }  # fmt: skip


def report(raw: Mapping[str, Any]) -> str:
    """The lines of costs.toml."""
    device = raw["device"]
    where = f"one {device['name']}, driver {device['driver_version']}, {raw['date']}"
    return "\n".join(
        f'"{name}" = {{ value = {fit.value:g}, low = {fit.low:g}, high = {fit.high:g}, '
        f'unit = "{fit.unit}", kind = "measured", source = "{where}: {fit.how}" }}'
        for name, fit in costs(raw).items()
    )
