"""From the times and groups of operations to a Schedule: what follows from them."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.schedule.model.graph import Graph, Node
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Group, Proof, Schedule
from warploom.schedule.model.target import REGISTER_FLOOR, REGISTER_STEP, WARP, WARP_GROUP, Target


def assemble(
    graph: Graph,
    target: Target,
    rules: Rules,
    interval: int,
    times: Mapping[str, int],
    group: Mapping[str, str],
    depths: Mapping[str, int] | None = None,
) -> Schedule:
    """A Schedule with its lengths, ring depths and register counts filled in, of which nothing is
    proved.

    Depths that are not given, or are deeper than needed, become the least that the times allow.
    """
    length = max(times[n.id] + n.span for n in graph.nodes) - min(times.values())
    deaths = {n.id: death(graph, rules, interval, times, n.id) for n in graph.nodes}
    least = {name: max(1, -(-(deaths[name] - times[name]) // interval)) for name in graph.rings}
    depth = {name: min(least[name], (depths or least)[name]) for name in graph.rings}
    used = [spec for spec in target.groups if spec.name in group.values()]
    groups: list[Group] = []
    for spec in used:
        count = REGISTER_FLOOR
        if spec.warps >= WARP_GROUP:
            own = [n for n in graph.nodes if group[n.id] == spec.name and n.registers]
            count = _registers(own, target, interval, times, deaths)
        groups.append(Group(spec.name, spec.warps, count))
    return Schedule(
        graph.name,
        target.name,
        interval,
        length,
        dict(times),
        dict(group),
        depth,
        tuple(groups),
        (),
        Proof(0, "written", "written by a person"),
        rules,
        dict(graph.params),
    )


def death(graph: Graph, rules: Rules, interval: int, times: Mapping[str, int], name: str) -> int:
    """When the value of `name` dies: the last release by a reader (its issue when unread)."""
    end = times[name]
    for edge in graph.outgoing[name]:
        if edge.kind == "order":
            continue
        reader = graph.by_id[edge.dst]
        held = 0
        if rules.lifetime == "completion" and reader.in_place != name:
            if edge.kind == "ring":
                held = reader.span + edge.spill_cost
            elif graph.by_id[name].memory:
                held = reader.drain if reader.asynchronous else reader.span
            elif reader.asynchronous:
                held = reader.span
        end = max(end, times[edge.dst] + edge.distance * interval + held)
    return end


def _registers(
    held: list[Node],
    target: Target,
    interval: int,
    times: Mapping[str, int],
    deaths: Mapping[str, int],
) -> int:
    """Registers a thread of a group needs: its peak and the reserve, in steps of 8.

    The peak is reached where some value is born.
    """
    peak = 0
    for moment in (times[node.id] for node in held):
        live = sum(
            n.words_per_warp * _copies(times[n.id], deaths[n.id], moment, interval) for n in held
        )
        peak = max(peak, live)
    need = -(-peak // WARP) + target.reserved_registers
    return max(REGISTER_FLOOR, -(-need // REGISTER_STEP) * REGISTER_STEP)


def _copies(birth: int, dead: int, moment: int, interval: int) -> int:
    """How many iterations k put `moment` in [birth + k * II, dead + k * II)."""
    newest = (moment - birth) // interval
    gone = (moment - dead) // interval
    return max(0, newest - gone)
