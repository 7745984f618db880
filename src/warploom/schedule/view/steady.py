"""The steady state as rows of bars: what every picture of a schedule draws."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target


@dataclass(frozen=True)
class Bar:
    """An operation in a row, from `start` to `end` cycles in [0, II).

    It belongs to the iteration `back` older than the newest one in the picture: an operation in a
    later stage runs for an iteration that started earlier. `wait`: it begins at a barrier.
    """

    node: str
    op: str
    start: int
    end: int
    back: int
    subtile: int | None
    wait: bool


@dataclass(frozen=True)
class Row:
    """A unit or a warp group, and its bars; `busy` is the part of the interval they cover."""

    name: str
    kind: str
    bars: tuple[Bar, ...]
    busy: float


def steady_rows(graph: Graph, target: Target, schedule: Schedule) -> list[Row]:
    """Rows for each warp group (operations it runs) and each exclusive unit (reservations).

    Time 0 is where the most loaded unit starts its first operation, so that the picture begins
    with a bar and not in the middle of one.
    """
    origin = _origin(graph, target, schedule)
    rows: list[Row] = []
    for group in schedule.groups:
        bars: list[Bar] = []
        for node in graph.nodes:
            if schedule.group[node.id] != group.name:
                continue
            cycles = max(1, node.issue) if node.asynchronous else node.span
            bars += _wrap(graph, schedule, node.id, schedule.time[node.id] - origin, cycles)
        rows.append(_row(group.name, "group", bars, schedule.initiation_interval))
    for unit in target.units:
        if unit.rate:
            continue
        bars = []
        for node in graph.nodes:
            for use in node.uses:
                if use.unit == unit.name and use.cycles:
                    start = schedule.time[node.id] + use.start - origin
                    bars += _wrap(graph, schedule, node.id, start, use.cycles)
        if bars:
            rows.append(_row(unit.name, "unit", bars, schedule.initiation_interval))
    newest = min((bar.back for row in rows for bar in row.bars), default=0)
    return [
        replace(row, bars=tuple(replace(bar, back=bar.back - newest) for bar in row.bars))
        for row in rows
    ]


def _origin(graph: Graph, target: Target, schedule: Schedule) -> int:
    load = {unit.name: 0 for unit in target.units if not unit.rate}
    for node in graph.nodes:
        for use in node.uses:
            if use.unit in load:
                load[use.unit] += use.cycles
    unit = max(load, key=lambda name: load[name])
    starts = [
        schedule.time[n.id] + use.start for n in graph.nodes for use in n.uses if use.unit == unit
    ]
    return min(starts, default=0)


def _wrap(graph: Graph, schedule: Schedule, name: str, start: int, cycles: int) -> list[Bar]:
    """The parts of [start, start + cycles) modulo II, with the age of each part's iteration."""
    interval = schedule.initiation_interval
    node = graph.by_id[name]
    wait = any(edge.blocking for edge in graph.incoming[name])
    bars: list[Bar] = []
    position, left = start, min(cycles, interval)
    while left > 0:
        back, phase = divmod(position, interval)
        take = min(left, interval - phase)
        first = position == start
        bars.append(Bar(name, node.op, phase, phase + take, back, node.subtile, wait and first))
        position, left = position + take, left - take
    return bars


def _row(name: str, kind: str, bars: list[Bar], interval: int) -> Row:
    bars.sort(key=lambda bar: bar.start)
    covered, last = 0, 0
    for bar in bars:
        covered += max(0, bar.end - max(bar.start, last))
        last = max(last, bar.end)
    return Row(name, kind, tuple(bars), covered / interval)
