"""Small random problems in which everything can bind, and every schedule of them by exhaustion."""

from __future__ import annotations

import itertools
from itertools import pairwise

from hypothesis import strategies as st

from warploom.schedule import Edge, Graph, GroupSpec, Node, Schedule, Target, Unit, UnitUse, check
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.rules import Rules

MEMORY = 64  # bytes
STAGES = 2


@st.composite
def tight_graphs(draw: st.DrawFn, most: int = 3) -> Graph:
    """Values of a quarter to all of a memory or of a warp's registers, rings, late reservations,
    edges over up to three iterations, hand-offs longer than an interval."""
    count = draw(st.integers(2, most))
    nodes = tuple(_node(draw, index) for index in range(count))
    edges: list[Edge] = []
    for _ in range(draw(st.integers(1, count + 1))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        distance = draw(st.sampled_from([0, 0, 1, 2, 3] if a < b else [1, 1, 2, 3]))
        kind = draw(st.sampled_from(["data", "data", "ring", "order"]))
        blocking = draw(st.booleans()) and a != b
        delay, spill = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 5]))
        edges.append(Edge(f"n{a}", f"n{b}", delay, distance, kind, spill, blocking))
    return Graph("tight", nodes, tuple(edges))


@st.composite
def carrying_graphs(draw: st.DrawFn) -> Graph:
    """Values of half a group's registers, some carried round the loop: two fit beside nothing."""
    names = [f"n{index}" for index in range(draw(st.integers(2, 3)))]
    nodes = tuple(
        Node(
            name,
            name,
            (UnitUse("TC", 1),),
            latency=draw(st.integers(1, 2)),
            registers=draw(st.sampled_from([64, 64, 128])),
            asynchronous=draw(st.booleans()),
        )
        for name in names
    )
    edges = [Edge(a, b, draw(st.integers(1, 2))) for a, b in pairwise(names)]
    for _ in range(draw(st.integers(1, 2))):
        first = draw(st.integers(0, len(names) - 1))
        last = draw(st.integers(first, len(names) - 1))
        edges.append(Edge(names[last], names[first], draw(st.integers(0, 1)), 1))
    return Graph("carrying", nodes, tuple(edges))


def _node(draw: st.DrawFn, index: int) -> Node:
    uses = tuple(
        UnitUse(draw(st.sampled_from(["TC", "PAIR"])), draw(st.integers(1, 3)), start)
        for start in draw(st.sampled_from([(), (0,), (0,), (2,), (0, 4)]))
    )
    return Node(
        f"n{index}",
        f"op{index}",
        uses,
        latency=draw(st.integers(0, 3)),
        issue=draw(st.integers(0, 1)),
        registers=draw(st.sampled_from([0, 0, 4, 64, 128])),
        memory=draw(st.sampled_from([{}, {}, {"smem": 16}, {"smem": 40}, {"tmem": 30}])),
        asynchronous=draw(st.booleans()),
    )


def tight_target(groups: int) -> Target:
    """One register a thread, so that 128 words fill a group; a unit of two instances."""
    compute = tuple(GroupSpec(f"compute{i}", 4) for i in range(groups))
    units = (Unit("TC"), Unit("PAIR", capacity=2))
    memories = {"smem": 3 * MEMORY, "tmem": MEMORY}
    return Target("tight", units, memories, compute, registers_per_thread=1)


def every_schedule(graph: Graph, target: Target, rules: Rules, interval: int) -> list[Schedule]:
    """Every legal schedule of at most `STAGES` stages, decided by the checker alone.

    The first issue is at 0: a common shift changes nothing.
    """
    names = [node.id for node in graph.nodes]
    found: list[Schedule] = []
    for times in itertools.product(range(STAGES * interval), repeat=len(names)):
        if min(times):
            continue
        at = dict(zip(names, times, strict=True))
        for chosen in itertools.product([g.name for g in target.groups], repeat=len(names)):
            placed = dict(zip(names, chosen, strict=True))
            schedule = assemble(graph, target, rules, interval, at, placed)
            if schedule.length <= STAGES * interval and check(graph, target, schedule).passed:
                found.append(schedule)
    return found
