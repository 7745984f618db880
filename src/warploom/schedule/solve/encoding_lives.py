"""The constraint model: how long values live, and the bounds on that which domains are made of.

A domain too small cuts schedules off, and a solver that minimises the interval then reports the
intervals it cut off as refuted. So every bound here is one that no schedule exceeds.
"""

from __future__ import annotations

from warploom.schedule.model.graph import Edge, Node
from warploom.schedule.solve.encoding import Encoding


def add_lifetimes(it: Encoding) -> None:
    """life[v] = time from issue to the death of v's value (0 when nothing reads it)."""
    for node in it.graph.nodes:
        if not node.registers and not node.memory and node.id not in it.graph.rings:
            continue
        life = it.model.new_int_var(0, longest_life(it, node), f"life[{node.id}]")
        for e in reads(it, node):  # at least: a longer life never helps, so no equality is needed
            apart = it.time[e.dst] - it.time[node.id] + e.distance * it.interval
            it.model.add(life >= apart + held_after(it, e))
        it.life[node.id] = life


def reads(it: Encoding, node: Node) -> list[Edge]:
    """The edges that keep the node's value alive."""
    return [edge for edge in it.graph.outgoing[node.id] if edge.kind != "order"]


def longest_life(it: Encoding, node: Node) -> int:
    """No schedule lets the node's value live longer."""
    return max(
        (
            it.horizon
            + e.distance * it.longest
            + max(it.graph.by_id[e.dst].span + e.spill_cost, held_after(it, e))
            for e in reads(it, node)
        ),
        default=0,
    )


def least_life(it: Encoding, node: Node) -> int:
    """Every schedule lets the node's value live at least this long."""
    return max((e.delay + held_after(it, e) for e in reads(it, node)), default=0)


def most_intervals(it: Encoding, node: Node) -> int:
    """Intervals that the node's value can live: no more copies of it are alive at a time.

    Reader and source of one iteration fit, with the reader's span, into `stages` intervals; every
    iteration between them adds one, and so does what the reader holds the value beyond its span.
    """
    found = it.stages + 2
    for edge in reads(it, node):
        beyond = max(0, held_after(it, edge) - it.graph.by_id[edge.dst].span)
        found = max(found, it.stages + edge.distance + -(-beyond // it.shortest))
    return found


def held_after(it: Encoding, edge: Edge) -> int:
    """Cycles a value stays alive after the issue of this reader (see `Rules.lifetime`)."""
    source, reader = it.graph.by_id[edge.src], it.graph.by_id[edge.dst]
    if it.rules.lifetime == "issue" or reader.in_place == edge.src:
        return 0
    if edge.kind == "ring":
        return reader.span + edge.spill_cost
    if source.memory:
        return reader.drain if reader.asynchronous else reader.span
    return reader.span if reader.asynchronous else 0
