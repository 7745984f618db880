"""What arithmetic and matmuls take from each other, in a graph whose costs are numbers.

Both read registers and disturb each other, as measured (bench/contention.py): an instruction delays
a matmul of another group by `mma.beside` cycles, and arithmetic takes `lanes.beside` or
`mufu.beside` times as long beside one. A graph has one duration
an op and does not know what will run beside it, so here every op has its share of an interval's
contention, as if the tensor core were never idle:

    matmuls     longer by 1 + mma.beside * (issue slots of all arithmetic) / (tensor-core cycles)
    arithmetic  longer by its factor; the pipes themselves serve as much as before

The first is a bound no schedule beats. Let x be the cycles of an interval in which the tensor core
does nothing: at most x instructions (one a cycle: four schedulers, 128 lanes) escape, so

    II >= TC + x + beside * (slots - x) >= TC + beside * slots      since beside < 1

and a schedule whose interval meets the stretched tensor-core load is the best there is under these
costs.

*requires*  the nodes of `perf.extract` and the table they were made with
*before -> after*  ops at their length alone -> at their length beside the iteration's others
*keeps*  ops, what they read and write, the load of every unit but the tensor core
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Node, UnitUse

TENSOR = "TC"
SPECIAL = "SFU"


def crowded(nodes: Iterable[Node], costs: CostTable) -> list[Node]:
    """The nodes with their shares of contention; unchanged for a family without these costs."""
    every = list(nodes)
    factor = stretch(every, costs)
    return [
        _longer(node, factor) if node.asynchronous else _slower(node, slowdown(node, costs))
        for node in every
    ]


def stretch(nodes: Iterable[Node], costs: CostTable) -> float:
    """How many times longer the matmuls of an iteration take beside its arithmetic."""
    every = list(nodes)
    if "mma.beside" not in costs.costs:
        return 1.0
    busy = sum(tensor_cycles(node) for node in every)
    slots = sum(node.issue for node in every if not node.asynchronous)
    return 1.0 + costs.value("mma.beside") * slots / busy if busy else 1.0


def slowdown(node: Node, costs: CostTable) -> float:
    """How many times longer an op takes while a matmul of another group runs."""
    if "lanes.beside" not in costs.costs:
        return 1.0
    special = any(use.unit == SPECIAL and use.cycles == busy_cycles(node) for use in node.uses)
    return costs.value("mufu.beside" if special else "lanes.beside")


def busy_cycles(node: Node) -> int:
    """Cycles of the pipe that holds an op longest."""
    return max((use.cycles for use in node.uses), default=0)


def tensor_cycles(node: Node) -> int:
    """Tensor-core cycles of a node; 0 for arithmetic and loads."""
    return sum(use.cycles for use in node.uses if use.unit == TENSOR)


def _longer(node: Node, factor: float) -> Node:
    more = ceil(tensor_cycles(node) * factor) - tensor_cycles(node)
    if not more:
        return node
    uses = tuple(
        UnitUse(use.unit, use.cycles + more, use.start, use.amount) if use.unit == TENSOR else use
        for use in node.uses
    )
    return replace(node, uses=uses, latency=node.latency + more)


def _slower(node: Node, factor: float) -> Node:
    return replace(node, latency=node.latency + ceil(busy_cycles(node) * (factor - 1.0)))
