"""Several iterations as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

One process for the warp groups and one for the units, a track each; 1 cycle is shown as 1 us.
Format: Chrome Trace Event Format, complete events ("X") and metadata ("M").
"""

from __future__ import annotations

from typing import Any

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target

GROUPS, UNITS = 1, 2


def chrome_trace(
    graph: Graph, target: Target, schedule: Schedule, iterations: int = 6
) -> dict[str, Any]:
    """Prologue, steady state and epilogue of `iterations` iterations."""
    events: list[dict[str, Any]] = [
        _name("process_name", GROUPS, 0, f"{graph.name}: warp groups"),
        _name("process_name", UNITS, 0, f"{graph.name}: units"),
    ]
    tracks = {group.name: index for index, group in enumerate(schedule.groups)}
    units = {unit.name: index for index, unit in enumerate(target.units) if not unit.rate}
    events += [_name("thread_name", GROUPS, index, name) for name, index in tracks.items()]
    events += [_name("thread_name", UNITS, index, name) for name, index in units.items()]
    for iteration in range(iterations):
        for node in graph.nodes:
            start = schedule.time[node.id] + iteration * schedule.initiation_interval
            held = max(1, node.issue) if node.asynchronous else node.span
            about = {"iteration": iteration, "op": node.op, "latency": node.latency}
            label = f"{node.id}[{iteration}]"
            track = tracks[schedule.group[node.id]]
            events.append(_event(label, GROUPS, track, start, held, about))
            for use in node.uses:
                if use.unit in units and use.cycles:
                    events.append(
                        _event(label, UNITS, units[use.unit], start + use.start, use.cycles, about)
                    )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": "cycles"}}


def _event(
    name: str, process: int, track: int, start: int, cycles: int, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start,
        "dur": cycles,
        "args": about,
    }


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
