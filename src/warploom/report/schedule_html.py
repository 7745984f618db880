"""The page of `warploom schedule`: the interval and its proof, and the steady state to look at."""

from __future__ import annotations

from typing import Any

from warploom.report.optimize_html import Page, page_html
from warploom.report.pages import SPECIAL, Figure, sentence
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import UNIT_TITLES, Target
from warploom.schedule.view.steady import Row, steady_rows

SHOWN = 3  # intervals, one after the other


def schedule_html(graph: Graph, target: Target, schedule: Schedule) -> str:
    """One self-contained file. Its cycles are those of the costs that were solved with."""
    proof, interval = schedule.proof, schedule.initiation_interval
    ids = [node.id for node in graph.nodes]
    rings = ", ".join(f"{name} x{depth}" for name, depth in schedule.ring_depth.items())
    figures = [
        Figure(f"{interval:,}", "cycles an iteration", target.name, "solved"),
        Figure(f"{proof.lower_bound:,}", "lower bound", proof.reason, "proved"),
        Figure(str(schedule.stages), "iterations in flight", f"rings {rings or 'none'}", "solved"),
    ]
    if graph.flops:
        each = f"{graph.flops:,} FLOP an iteration"
        figures.append(Figure(f"{graph.flops / interval:,.0f}", "FLOP a cycle", each, "solved"))
    known = proof.confirmed or "not asked of code that shares nothing with the solver"
    sought = [f"{sentence(str(one))}." for one in schedule.objectives]
    sought += [f"{sentence(name)}: not reached in time." for name in proof.unreached]
    answers = [
        ("What binds", [f"{sentence(proof.reason)}."]),
        ("Is it the shortest", [f"Proof: {proof.status}, {known}."]),
        ("What else was sought", sought),
    ]
    rows = [_row_json(row, ids, interval) for row in steady_rows(graph, target, schedule)]
    shown = {"loop": graph.name, "cycles": SHOWN * interval, "iterations": SHOWN, "rows": rows}
    steps = [(node.id, list[int](), _kind(node.op)) for node in graph.nodes]
    title = f"{graph.name} on {target.name}"
    used = {use.unit for node in graph.nodes for use in node.uses}
    names = [one.name for one in target.units if one.name in used and one.name in UNIT_TITLES]
    units = "".join(f" {name} is {UNIT_TITLES[name]}." for name in names)
    summary = f"{len(graph.nodes)} operations in {len(schedule.groups)} groups.{units}"
    return page_html(
        Page(title, summary, figures, answers, [shown], steps=steps, schedule_text=str(schedule))
    )


def _row_json(row: Row, ids: list[str], interval: int) -> dict[str, Any]:
    """A row's bars of each interval; as of `flows.optimize_page`."""
    bars = [
        [bar.start + turn * interval, bar.end + turn * interval, ids.index(bar.node), "code", ""]
        for turn in range(SHOWN)
        for bar in row.bars
    ]
    return {"name": row.name, "bars": bars}


def _kind(op: str) -> str:
    """How an operation is coloured."""
    if op == "mma":
        return "matmul"
    if op in SPECIAL:
        return "special"
    return "copy" if op in ("load", "store") else "math"
