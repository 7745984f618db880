"""The constraint model, redundantly: values too wide to be in registers at the same time.

What a loop carries in registers (an accumulator: rescaled, added to, rescaled ...) is alive at
every moment, whatever the times: each value of its cycle lives until the next one is born. In a
group whose members are known, let `standing` be those words. Two other values that do not fit
beside them and each other never overlap, so their lifetimes are a unit of their own.

The limit at births (`encoding_groups`) says the same, but only once all times are nearly fixed;
said as a no-overlap it refutes intervals at once: one group for attention in two sub-tiles (graph
B of the tests) is refuted below 2432 cycles without search, and up to 2650 in seconds.

*requires*  lifetimes, and a group for every value: pinned, or the only one that fits
*before -> after*  the register limit stated at births -> and as no-overlap of the widest values
*keeps*  every schedule of the model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from warploom.schedule.model.graph import Graph
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.encoding_lives import least_life, longest_life
from warploom.schedule.solve.solver import IntervalVar


def add_exclusive(it: Encoding, pins: Mapping[str, str]) -> None:
    """No-overlap of the lifetimes of values that do not fit beside each other."""
    for group, names in _members(it, pins).items():
        wide = [
            name
            for name in exclusive(it.graph, names, it.target.words_per_warp)
            if least_life(it, it.graph.by_id[name]) > 0  # one that dies at once meets nobody
        ]
        if len(wide) < 2:
            continue
        both: list[IntervalVar] = []
        for name in wide:
            for number, start in enumerate((it.phase[name], it.again[name])):
                last = 2 * it.longest + longest_life(it, it.graph.by_id[name])
                end = it.model.new_int_var(0, last, "")
                both.append(
                    it.model.new_interval_var(
                        start, it.life[name], end, f"{group}: {name} alive{'+' * number}"
                    )
                )
        it.model.add_no_overlap(both)


def exclusive(graph: Graph, names: Iterable[str], limit: int) -> list[str]:
    """Values of one group of which no two can be alive together; the widest that is known."""
    own = [name for name in names if graph.by_id[name].registers]
    cycles = standing(graph, own)
    words = {name: graph.by_id[name].words_per_warp for name in own}
    left = limit - sum(min(words[name] for name in cycle) for cycle in cycles)
    carried = {name for cycle in cycles for name in cycle}
    return [name for name in own if name not in carried and 2 * words[name] > left]


def standing(graph: Graph, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Disjoint cycles of values, each carried round the loop in registers; widest first."""
    inside = set(names)
    found: list[tuple[int, tuple[str, ...]]] = []
    for edge in graph.edges:
        if edge.kind == "data" and edge.distance == 1 and {edge.src, edge.dst} <= inside:
            way = _way(graph, edge.dst, edge.src, inside)
            if way:
                found.append((min(graph.by_id[name].words_per_warp for name in way), way))
    chosen: list[tuple[str, ...]] = []
    for _, way in sorted(found, key=lambda item: (-item[0], len(item[1]), item[1])):
        if not any(set(way) & set(other) for other in chosen):
            chosen.append(way)
    return chosen


def _way(graph: Graph, first: str, last: str, inside: set[str]) -> tuple[str, ...]:
    """The widest way from `first` to `last`, each read by the next in the same iteration."""
    best: dict[str, tuple[int, tuple[str, ...]]] = {
        first: (graph.by_id[first].words_per_warp, (first,))
    }
    front = [first]
    while front:
        name = front.pop()
        width, way = best[name]
        for edge in graph.outgoing[name]:
            if edge.kind != "data" or edge.distance or edge.dst not in inside or edge.dst in way:
                continue
            narrowest = min(width, graph.by_id[edge.dst].words_per_warp)
            if narrowest > best.get(edge.dst, (0, ()))[0]:
                best[edge.dst] = (narrowest, (*way, edge.dst))
                front.append(edge.dst)
    return best.get(last, (0, ()))[1]


def _members(it: Encoding, pins: Mapping[str, str]) -> dict[str, list[str]]:
    """The values of every group, where all of them have one home; {} where some can choose."""
    found: dict[str, list[str]] = {}
    for node in it.graph.nodes:
        if not node.registers:
            continue
        fitting = [g.name for g in it.target.groups if it.target.fits(it.graph, node.id, g)]
        home = pins.get(node.id) or (fitting[0] if len(fitting) == 1 else None)
        if home is None:
            return {}
        found.setdefault(home, []).append(node.id)
    return found
