"""A schedule without search: one operation after the other, so that a time-out has an answer.

Groups are tried in a few ways (one group, one a sub-tile); the checker decides which is legal.
Its interval is the serial length, far from the best: what it gives is a schedule marked unproved
with an honest gap, where the solver had no time to find a first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from warploom.schedule.bounds import topological_order
from warploom.schedule.checker import check
from warploom.schedule.encoding import Encoding
from warploom.schedule.graph import Graph
from warploom.schedule.readout import assemble, death
from warploom.schedule.rules import Rules
from warploom.schedule.schedule import Schedule
from warploom.schedule.target import WARP_GROUP, GroupSpec, Target

MANY = 1 << 20


def serial_schedule(
    graph: Graph, target: Target, rules: Rules, interval: int, pins: Mapping[str, str]
) -> Schedule | None:
    """A legal schedule at `interval` (cycles) in which nothing overlaps; None when none is met.

    Requires an interval of at least `bounds.serial_length(graph)`.
    """
    for order in _orders(graph):
        for group in _assignments(graph, target, pins):
            times = _times(graph, group, order)
            schedule = assemble(graph, target, rules, interval, times, group)
            if check(graph, target, schedule).passed:
                return schedule
    return None


def serial_values(it: Encoding, pins: Mapping[str, str]) -> dict[int, int]:
    """The serial schedule as values of the model's variables by index; empty when none is legal."""
    graph, rules, interval = it.graph, it.rules, it.longest
    target = it.target
    if not target.groups:  # the modulo problem: one group without limits stands in for none
        everyone = (GroupSpec("all", WARP_GROUP),)
        target = replace(
            target, groups=everyone, own_load_group=False, register_pool=0,
            registers_per_thread=MANY, reserved_registers=0,
        )  # fmt: skip
        pins = {}
    plain = serial_schedule(graph, target, rules, interval, pins)
    if plain is None:
        return {}
    shift = -plain.time[it.anchor] % interval  # the anchor's phase is 0
    values = {variable.index: plain.time[name] + shift for name, variable in it.time.items()}
    for (name, w), literal in it.member.items():
        values[literal.index] = int(target.groups[w].name == plain.group[name])
    for name, variable in it.depth.items():
        values[variable.index] = plain.ring_depth[name]
    for name, variable in it.life.items():
        values[variable.index] = death(graph, rules, interval, plain.time, name) - plain.time[name]
    return values


def _assignments(graph: Graph, target: Target, pins: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Each operation in the first group that fits, or spread over groups by its sub-tile."""
    for spread in (False, True):
        for narrow_first in (False, True):
            group: dict[str, str] = {}
            for node in graph.nodes:
                fitting = [g for g in target.groups if target.fits(graph, node.id, g)]
                fitting.sort(key=lambda g: g.warps if narrow_first else -g.warps)
                alike = [g for g in fitting if g.warps == fitting[0].warps]
                turn = (node.subtile or 0) % len(alike) if spread else 0
                group[node.id] = pins.get(node.id, alike[turn].name)
            yield group


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
