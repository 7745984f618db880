"""The lexicographic objective, stage by stage: what is minimised once the interval is settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warploom.schedule.model.graph import Node
from warploom.schedule.model.rules import Prices
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.encoding_groups import carries_registers, same_group
from warploom.schedule.solve.solver import Linear, Style


@dataclass(frozen=True)
class Stage:
    """A named objective: how to state it in a model, its unit, and the searches that prove it.

    Each style takes over from the one before where that ran out of its share of the time.
    """

    name: str
    unit: str
    expression: Callable[[Encoding, Prices], Linear]
    styles: tuple[Style, ...] = (Style(),)


def traffic(it: Encoding, prices: Prices) -> Linear:
    """Cross-group traffic and barriers of one iteration, in points (see `Prices`)."""
    points: list[Linear] = []
    for (src, dst), blocking in _pairs(it).items():
        waits = prices.wait_per_warp * it.graph.by_id[dst].min_warps
        if blocking and prices.local_waits:
            points += [
                it.member[dst, w] * (prices.wait_per_warp * group.warps)
                for w, group in enumerate(it.target.groups)
            ]
        if src == dst:
            continue
        crossing = 1 - same_group(it, src, dst)
        value = any(carries_registers(it.graph, e) for e in it.graph.outgoing[src] if e.dst == dst)
        words = it.graph.by_id[src].registers if value else 0
        price = words // prices.words_per_point + prices.edge
        if blocking != prices.local_waits:
            price += waits  # a barrier that only exists because the edge crosses
        points.append(crossing * price)
    points += [
        used * (prices.warp * g.warps) for used, g in zip(it.used, it.target.groups, strict=True)
    ]
    return sum(points)


def _pairs(it: Encoding) -> dict[tuple[str, str], bool]:
    """Distinct (src, dst) pairs, and whether an edge between them is blocking."""
    pairs: dict[tuple[str, str], bool] = {}
    for edge in it.graph.edges:
        if edge.kind == "alias":
            continue
        key = (edge.src, edge.dst)
        pairs[key] = pairs.get(key, False) or edge.blocking
    return pairs


def register_time(it: Encoding, prices: Prices) -> Linear:
    """Registers x live time of one iteration: (words a warp // 16) x cycles, summed."""
    del prices
    return sum(
        it.life[node.id] * register_weight(node) for node in it.graph.nodes if node.registers
    )


def register_weight(node: Node) -> int:
    """Words a warp holds of the node's value, in sixteens (a row vector counts one)."""
    return max(1, node.words_per_warp // 16) if node.registers else 0


def busiest(it: Encoding, prices: Prices) -> Linear:
    """Cycles an iteration holds the busiest warp group: its slack absorbs late loads and jitter.

    A synchronous operation holds its group for its span, an asynchronous one while it issues.
    """
    del prices
    most = it.model.new_int_var(0, sum(hold_cycles(n) for n in it.graph.nodes), "busiest")
    for w in range(len(it.target.groups)):
        it.model.add(most >= sum(hold_cycles(n) * it.member[n.id, w] for n in it.graph.nodes))
    return most


def hold_cycles(node: Node) -> int:
    """Cycles the node takes of its group's time."""
    return max(1, node.issue) if node.asynchronous else node.span


def length(it: Encoding, prices: Prices) -> Linear:
    """Cycles from the first issue to the last end of one iteration."""
    del prices
    return 0 if it.length is None else it.length


def groups(it: Encoding, prices: Prices) -> Linear:
    """Warps launched."""
    del prices
    return sum(used * g.warps for used, g in zip(it.used, it.target.groups, strict=True))


TRAFFIC = Stage("traffic", "points", traffic)
REGISTER_TIME = Stage(
    "register time",
    "x16 word-cycles",
    register_time,
    (
        Style(1, cuts=False, from_below=True, work=0.4),
        Style(1, cuts=False, work=3.0),
        Style(2, cuts=False, from_below=True, work=2.0),
    ),
)
BUSIEST = Stage("busiest group", "cycles", busiest)
LENGTH = Stage("length", "cycles", length, (Style(2, cuts=False),))
GROUPS = Stage("warps", "warps", groups)
STAGES = (TRAFFIC, REGISTER_TIME, BUSIEST, LENGTH, GROUPS)
