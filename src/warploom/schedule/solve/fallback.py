"""A schedule without search: one operation after the other, so that a time-out has an answer.

Groups are tried in a few ways (`assignments`); the checker decides which is legal.
Its interval is the length of one iteration, far from the best: what it gives is a schedule marked
unproved with an honest gap, where the solver had no time to find a first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from warploom.schedule.check.checker import check
from warploom.schedule.model.assemble import assemble, death
from warploom.schedule.model.bounds import serial_length, topological_order
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import WARP_GROUP, GroupSpec, Target
from warploom.schedule.solve.encoding import Encoding

MANY = 1 << 20


def serial_schedule(
    graph: Graph, target: Target, rules: Rules, pins: Mapping[str, str]
) -> Schedule | None:
    """A legal schedule in which nothing overlaps, the shortest of a few; None when none is met.

    Its interval is where the last operation ends, or the serial bound where that breaks a rule.
    On a target without groups one group without limits stands in for none.
    """
    if not target.groups:
        target, pins = without_limits(target), {}
    found: list[Schedule] = []
    for order in _orders(graph):
        for group in assignments(graph, target, pins):
            times = _times(graph, group, order)
            ends = [times[n.id] + max(n.span, n.drain) for n in graph.nodes]
            for interval in (max(1, *ends), serial_length(graph)):
                schedule = assemble(graph, target, rules, interval, times, group)
                if check(graph, target, schedule).passed:
                    found.append(schedule)
                    break
    return min(found, key=lambda schedule: schedule.initiation_interval, default=None)


def without_limits(target: Target) -> Target:
    """One group that can hold everything, in place of none."""
    return replace(
        target,
        groups=(GroupSpec("all", WARP_GROUP),),
        own_load_group=False,
        register_pool=0,
        registers_per_thread=MANY,
        reserved_registers=0,
    )


def values_of(it: Encoding, plain: Schedule) -> dict[int, int]:
    """A schedule as values of the variables of a model at its interval, by index."""
    interval = plain.initiation_interval
    shift = -plain.time[it.anchor] % interval  # the anchor's phase is 0
    values = {variable.index: plain.time[name] + shift for name, variable in it.time.items()}
    for (name, w), literal in it.member.items():
        values[literal.index] = int(it.target.groups[w].name == plain.group[name])
    for name, variable in it.depth.items():
        values[variable.index] = plain.ring_depth[name]
    for name, variable in it.life.items():
        died = death(it.graph, it.rules, interval, plain.time, name)
        values[variable.index] = died - plain.time[name]
    return values


def assignments(graph: Graph, target: Target, pins: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Who runs what, a few ways: one group a sub-tile, one group, runs of the dependence order."""
    order = topological_order(graph)
    seen: list[dict[str, str]] = []
    for way in _ways(graph, target, order):
        group = {node.id: pins.get(node.id, way[node.id]) for node in graph.nodes}
        if group not in seen:
            seen.append(group)
            yield group


def _ways(graph: Graph, target: Target, order: Sequence[str]) -> Iterator[dict[str, str]]:
    rank = {name: place for place, name in enumerate(order)}
    widest = sum(g.warps >= 4 and not g.loads for g in target.groups)
    runs = [f"runs {n}" for n in range(widest, 1, -1)]
    kinds = (
        ["sub-tile", "first", *runs] if any(n.subtile for n in graph.nodes) else [*runs, "first"]
    )
    for kind in kinds:
        for narrow in (False, True):
            found: dict[str, str] = {}
            for node in graph.nodes:
                fitting = [g for g in target.groups if target.fits(graph, node.id, g)]
                fitting.sort(key=lambda g: g.warps if narrow else -g.warps)
                alike = [g for g in fitting if g.warps == fitting[0].warps]
                turn = 0
                if kind == "sub-tile":
                    turn = (node.subtile or 0) % len(alike)
                elif kind != "first":
                    parts = int(kind.split()[1])
                    turn = min(rank[node.id] * parts // len(order), len(alike) - 1)
                found[node.id] = alike[turn].name
            yield found


def _times(graph: Graph, group: Mapping[str, str], order: list[str]) -> dict[str, int]:
    """Issue times in the given order, each after the span of the one before."""
    times: dict[str, int] = {}
    moment = 0
    for name in order:
        for edge in graph.incoming[name]:
            if edge.distance == 0:
                crossing = edge.spill_cost if group[edge.src] != group[edge.dst] else 0
                moment = max(moment, times[edge.src] + edge.delay + crossing)
        times[name] = moment
        node = graph.by_id[name]
        moment += max(node.span, node.drain)
    return times


def _orders(graph: Graph) -> Iterator[list[str]]:
    """Dependence orders: as written, and one that keeps few words in registers at a time."""
    yield topological_order(graph)
    yield _frugal_order(graph)


def _frugal_order(graph: Graph) -> list[str]:
    """Always the ready operation that leaves the fewest words alive."""
    uses = {
        n.id: {e.dst for e in graph.outgoing[n.id] if e.kind != "order" and e.distance == 0}
        for n in graph.nodes
    }
    blockers = {n.id: {e.src for e in graph.incoming[n.id] if e.distance == 0} for n in graph.nodes}
    order: list[str] = []
    done: set[str] = set()

    def growth(name: str) -> int:
        node = graph.by_id[name]
        freed = {e.src for e in graph.incoming[name] if uses[e.src] - done == {name}}
        return node.words_per_warp - sum(graph.by_id[value].words_per_warp for value in freed)

    while len(order) < len(graph.nodes):
        ready = [n.id for n in graph.nodes if n.id not in done and blockers[n.id] <= done]
        chosen = min(ready, key=growth)
        order.append(chosen)
        done.add(chosen)
    return order
