"""Cycles an iteration that a kernel schedule should take, named or solved: the model's answer.

The loop's graph (`codegen.extract`) is run by the event simulator (`schedule.simulate`) in the
order the schedule gives each warp group. What the emitted code does besides is made of edges:
a release waits for the matmul that read the slot, and turns hand the tensor core from group to
group. Of a schedule's times nothing but the order is used, so a named schedule, whose times are
positions, is predicted by the same rules as a solved one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from warploom.codegen.block import Ring
from warploom.codegen.extract import Extraction, extract
from warploom.codegen.lower import turn_runs
from warploom.codegen.place import Placement, place
from warploom.codegen.plan import KernelSchedule
from warploom.codegen.rings import make_rings
from warploom.schedule.bounds import lower_bounds
from warploom.schedule.costs import CostTable, costs
from warploom.schedule.graph import Edge, Graph
from warploom.schedule.schedule import Schedule
from warploom.schedule.simulate import simulate
from warploom.tile import Loop, Op, Program

ITERATIONS = 48


@dataclass(frozen=True)
class Prediction:
    """One loop: cycles an iteration in the steady state, and what no schedule can beat."""

    loop: str
    cycles: float
    bound: int
    reason: str
    flops: int


def predict(
    program: Program, schedule: KernelSchedule, gpu: str = "h200", table: CostTable | None = None
) -> dict[str, Prediction]:
    """Predictions by loop."""
    parts = len(schedule.compute)
    placement = place(program, schedule.launch.split, parts)
    rings = make_rings(placement, schedule)
    found: dict[str, Prediction] = {}
    for loop in program.loops():
        copies: dict[str, int] = dict(schedule.loops[loop.index].params.get("copies", {}))
        problem = extract(
            placement,
            loop,
            table or costs(gpu),
            copies=copies,
            skip_unit=schedule.launch.skip_unit,
        )
        found[loop.index] = _one(placement, loop, problem, schedule, rings)
    return found


def _one(
    placement: Placement,
    loop: Loop,
    problem: Extraction,
    schedule: KernelSchedule,
    rings: tuple[Ring, ...],
) -> Prediction:
    times = schedule.loops[loop.index]
    graph = problem.graph
    extra = _release_waits(placement, loop, graph, times, rings)
    if schedule.turns:
        extra += _turns(placement, loop, graph, schedule)
    full = replace(graph, edges=(*graph.edges, *extra))
    # Launch registers and group names beyond the graph's own do not concern the simulator.
    run = simulate(full, problem.target, times, ITERATIONS, order="free")
    run.raise_if_failed()
    bounds = lower_bounds(graph, problem.target)
    return Prediction(loop.index, run.rate, bounds.minimum, bounds.reason, graph.flops)


def _release_waits(
    placement: Placement, loop: Loop, graph: Graph, times: Schedule, rings: tuple[Ring, ...]
) -> list[Edge]:
    """The op after a release issues when the matmul that read the slot is done."""
    releases: Mapping[str, int] = times.params.get("release", {})
    interval = times.initiation_interval
    edges: list[Edge] = []
    for ring in rings:
        names = {load.dst.name for b in ring.buffers for load in b.loads if load.dst is not None}
        readers = [
            op
            for op in loop.body
            if isinstance(op, Op) and op.kind == "mma" and any(v.name in names for v in op.srcs)
        ]
        for part in range(placement.parts) if readers else ():
            key = f"{ring.name}/{part}"
            if key not in releases and ring.name not in releases:
                continue
            moment: int = releases[key] if key in releases else releases[ring.name]
            last = max(readers, key=lambda op: times.time[f"{op.label}/{part}"])
            reader = graph.by_id[f"{last.label}/{part}"]
            own = [n.id for n in graph.nodes if n.subtile == part]
            after = {name: (times.time[name] - moment - 1) % interval for name in own}
            following = min(own, key=after.__getitem__)
            # The first iteration of that op that comes after the release.
            distance = -((times.time[following] - moment - 1) // interval)
            if distance >= 0:
                edges.append(Edge(reader.id, following, reader.latency, distance, "order", 0, True))
    return edges


def _turns(placement: Placement, loop: Loop, graph: Graph, schedule: KernelSchedule) -> list[Edge]:
    """A group's matmuls issue after those of the group whose turn it was before."""
    times = schedule.loops[loop.index]
    interval = times.initiation_interval
    ops = {op.id: op for op in placement.program.ops()}
    runs: dict[int, list[tuple[int, str]]] = {}
    for (op, part), run in turn_runs(schedule, loop, ops).items():
        name = f"{ops[op].label}/{part}"
        runs.setdefault(run, []).append((times.time[name] % interval, name))
    order = [sorted(runs[run]) for run in sorted(runs)]
    edges: list[Edge] = []
    for before, after in pairwise([*order, order[0]]):
        last, first = before[-1][1], after[0][1]
        gap = times.time[last] - times.time[first]
        distance = max(0, -(-(gap + 1) // interval))
        edges.append(Edge(last, first, graph.by_id[last].issue, distance, "order", 0, True))
    return edges
