"""Lower bounds on the initiation interval, with the unit or the cycle that binds.

Resource bound (ResMII): max over units of ceil(sum of reserved cycles / instances).
Recurrence bound (RecMII): max over dependence cycles of ceil(sum of delays / sum of distances),
the smallest interval at which the edge weights delay - distance * II leave no positive cycle.
Source: Rau, "Iterative Modulo Scheduling", MICRO-27 (1994), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.schedule.model.graph import Edge, Graph
from warploom.schedule.model.target import Target


@dataclass(frozen=True)
class Bounds:
    """What no schedule can beat: cycles demanded of each unit, and the longest recurrence."""

    resource: int
    unit: str
    load: dict[str, int]
    recurrence: int
    cycle: tuple[str, ...]

    @property
    def minimum(self) -> int:
        """MinII: the larger of both bounds, at least 1."""
        return max(1, self.resource, self.recurrence)

    @property
    def reason(self) -> str:
        """What binds, in words."""
        if self.resource >= self.recurrence:
            return f"unit {self.unit} is 100 % busy: {self.load[self.unit]} cycles an iteration"
        return f"recurrence {' -> '.join(self.cycle)} takes {self.recurrence} cycles an iteration"


def lower_bounds(graph: Graph, target: Target) -> Bounds:
    """Both bounds of a graph on a target."""
    load = unit_load(graph, target)
    needs = {name: -(-cycles // target.unit(name).capacity) for name, cycles in load.items()}
    unit = max(needs, key=lambda name: needs[name], default="")
    # A reservation longer than the interval would meet its own next copy.
    for node in graph.nodes:
        for use in node.uses:
            alone = target.unit(use.unit).capacity < 2 * use.amount
            if alone and use.cycles > needs[unit]:
                unit = use.unit
                needs[unit] = use.cycles
    recurrence, cycle = recurrence_bound(graph)
    return Bounds(needs.get(unit, 0), unit, needs, recurrence, cycle)


def unit_load(graph: Graph, target: Target) -> dict[str, int]:
    """Cycles that one iteration reserves of each unit, in the target's order."""
    load = {unit.name: 0 for unit in target.units}
    for node in graph.nodes:
        for use in node.uses:
            load[use.unit] += use.cycles * use.amount
    return load


def recurrence_bound(graph: Graph) -> tuple[int, tuple[str, ...]]:
    """RecMII and the cycle that attains it, first node repeated; (0, ()) without a cycle."""
    low, cycle = 0, ()
    high = sum(edge.delay for edge in graph.edges)
    found = positive_cycle(graph, 0)
    if not found:
        return 0, ()
    while low < high:
        # Invariant: an interval below `low` has a positive cycle, `high` has none.
        middle = (low + high) // 2
        here = positive_cycle(graph, middle)
        if here:
            low, found = middle + 1, here
        else:
            high = middle
    cycle = (found[0].src, *(edge.dst for edge in found))
    return low, cycle


def positive_cycle(graph: Graph, interval: int) -> list[Edge]:
    """A cycle with sum(delay - distance * interval) > 0, found by Bellman-Ford; [] when none."""
    best = {node.id: 0 for node in graph.nodes}
    via: dict[str, Edge] = {}
    last: str | None = None
    for _ in range(len(graph.nodes) + 1):
        last = None
        for edge in graph.edges:
            reach = best[edge.src] + edge.delay - edge.distance * interval
            if reach > best[edge.dst]:
                best[edge.dst], via[edge.dst], last = reach, edge, edge.dst
        if last is None:
            return []
    node = last or ""
    for _ in graph.nodes:  # walk back far enough to be on the cycle itself
        node = via[node].src
    found = [via[node]]
    while found[0].src != node:
        found.insert(0, via[found[0].src])
    return found


def longest_path(graph: Graph, interval: int) -> int:
    """Fewest cycles from the first issue to the last end at an interval, by dependences alone.

    Requires an interval of at least the recurrence bound; below it there is no finite answer.
    """
    start = {node.id: 0 for node in graph.nodes}
    for _ in graph.nodes:
        moved = False
        for edge in graph.edges:
            reach = start[edge.src] + edge.delay - edge.distance * interval
            if reach > start[edge.dst]:
                start[edge.dst], moved = reach, True
        if not moved:
            break
    return max(start[node.id] + node.span for node in graph.nodes)


def topological_order(graph: Graph) -> list[str]:
    """Nodes such that every edge of distance 0 leads forward."""
    left = {n.id: sum(e.distance == 0 for e in graph.incoming[n.id]) for n in graph.nodes}
    ready = [name for name, count in left.items() if count == 0]
    order: list[str] = []
    while ready:
        name = ready.pop(0)
        order.append(name)
        for edge in graph.outgoing[name]:
            if edge.distance == 0:
                left[edge.dst] -= 1
                if left[edge.dst] == 0:
                    ready.append(edge.dst)
    return order


def serial_length(graph: Graph) -> int:
    """The interval at which nothing overlaps: where a search for a feasible one may stop.

    Every operation after the one before it, with every hand-off paid: if a graph has no schedule
    at this interval, its structure is at fault (groups, memory, registers), not its speed.
    """
    work = sum(
        max([node.span, *(use.start + use.cycles for use in node.uses)]) for node in graph.nodes
    )
    waits = sum(edge.delay + edge.spill_cost for edge in graph.edges)
    return work + waits
