"""The order of a loop's ops bettered by walking what is emitted.

Many schedules share the least interval, and what separates them the solver's graph cannot say: the
matmuls that must be waited for at the back edge of the emitted loop, the poll before a slot, the
arithmetic that meets another group's matmul. The walk (`perf.pace`) can. So the last objective,
after the solver's, is the walked pace: ops are moved one at a time to other places of the interval,
over its ends too, and what walks faster is kept.

*requires*  a kernel schedule, the graphs of its loops (`perf.extract`)
*before -> after*  an order of ops that the graphs allow -> one that walks at least as fast
*keeps*  every dependence of the graphs, groups, rings' depths, turns, copies; it never walks slower

Deterministic for a seed. Of the solver's claims the proved bound stays; the objectives do not, as
times are places in an order afterwards (as in `autosched.named`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from warploom.autosched.releases import releases
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.perf.extract import Extraction
from warploom.perf.pace import pace
from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.solve.readout import assemble

ITERATIONS = 24  # of a walk that compares
BETTER = 0.0005  # of the pace: what a move must gain to be kept
SLACK = 0.004  # of the pace: how much worse a move may be, early in the search


@dataclass(frozen=True)
class Walker:
    """The pace of a kernel schedule: the sum over its loops, or None where it is not legal."""

    placement: Placement
    problems: Sequence[Extraction]
    table: CostTable

    def __call__(self, schedule: KernelSchedule) -> float | None:
        """Cycles an iteration, over all loops."""
        try:
            block = lower(self.placement.program, schedule)
            return sum(pace(block, e.loop, e.graph, self.table, ITERATIONS) for e in self.problems)
        except (InputError, CheckFailed):
            return None


def refine(
    schedule: KernelSchedule, walker: Walker, tries: int = 300, seed: int = 1
) -> KernelSchedule:
    """The best schedule met within so many walks, the given one if none is better.

    Raises `InputError` when the given schedule does not lower.
    """
    start = walker(schedule)
    if start is None:
        raise InputError(f"schedule {schedule.name} of {walker.placement.program.name} is illegal")
    best, pace_of_best = schedule, start
    share = max(1, tries // max(1, len(walker.problems)))
    for problem in walker.problems:
        best, pace_of_best = _one_loop(best, pace_of_best, problem, walker, share, seed)
    if pace_of_best > start * (1 - BETTER):
        return schedule
    name = schedule.name.removesuffix("-walked")
    return replace(best, name=f"{name}-walked")


def fewest_copies(schedule: KernelSchedule, walker: Walker) -> KernelSchedule:
    """The schedule without copies of tiles that its order does without, which saves registers.

    One copy less may put a wait where none was, so what walks slower keeps it.
    """
    least = walker(schedule)
    if least is None:
        raise InputError(f"schedule {schedule.name} of {walker.placement.program.name} is illegal")
    for index in schedule.loops:
        for name in sorted(dict(schedule.loops[index].params.get("copies", {}))):
            loop = schedule.loops[index]
            copies = {k: v for k, v in dict(loop.params["copies"]).items() if k != name}
            fewer = replace(loop, params={**loop.params, "copies": copies})
            made = replace(schedule, loops={**schedule.loops, index: fewer})
            walked = walker(made)
            if walked is not None and walked <= least * (1 + SLACK):
                schedule = made
    return schedule


def _one_loop(
    schedule: KernelSchedule,
    pace_now: float,
    problem: Extraction,
    walker: Walker,
    tries: int,
    seed: int,
) -> tuple[KernelSchedule, float]:
    draw = random.Random(seed)
    placement, graph, loop = walker.placement, problem.graph, schedule.loops[problem.loop]
    limit = min(group.registers for group in loop.groups[1:])
    times = order_of(loop, graph)
    best, here = (schedule, pace_now), pace_now
    seen = {_key(times, graph)}
    for number in range(tries):
        moved = _move(times, graph, draw)
        if moved is None:
            break
        key = _key(moved, graph)
        if key in seen:
            continue
        seen.add(key)
        made = _with_times(schedule, problem, placement, moved, limit)
        walked = None if made is None else walker(made)
        if made is None or walked is None:
            continue
        cooling = SLACK * (1 - number / tries)
        if walked <= here * (1 + cooling):
            times, here = moved, walked
        if walked < best[1] * (1 - BETTER):
            best = made, walked
    return best


def order_of(loop: Schedule, graph: Graph) -> dict[str, int]:
    """Places of the ops of sub-tile 0 in the order they issue, a step apart: stage and rank."""
    own = [node.id for node in graph.nodes if not node.variable_latency and not node.subtile]
    interval = loop.initiation_interval
    ranked = sorted(own, key=lambda name: (loop.time[name] % interval, own.index(name)))
    stages = {name: loop.time[name] // interval for name in own}
    count = len(own)
    return {name: stages[name] * count + rank for rank, name in enumerate(ranked)}


def _key(times: Mapping[str, int], graph: Graph) -> tuple[tuple[str, int], ...]:
    count, least = len(times), min(times.values())
    del graph
    return tuple(sorted((name, time - least // count * count) for name, time in times.items()))


def _move(times: Mapping[str, int], graph: Graph, draw: random.Random) -> dict[str, int] | None:
    """One op elsewhere, where all its dependences hold; None when nothing can move."""
    count = len(times)
    names = sorted(times)
    for _ in range(64):
        name = draw.choice(names)
        low, high = -2 * count, 4 * count
        for edge in graph.incoming[name]:
            if edge.src in times and edge.src != name:
                low = max(low, times[edge.src] - edge.distance * count)
        for edge in graph.outgoing[name]:
            if edge.dst in times and edge.dst != name:
                high = min(high, times[edge.dst] + edge.distance * count)
        # Between neighbours `place` and `place + 1`; next to itself nothing changes.
        places = [p for p in range(low, high) if p not in (times[name] - 1, times[name])]
        if places:
            return _renumbered(times, name, draw.choice(places) + 0.5)
    return None


def _renumbered(times: Mapping[str, int], name: str, place: float) -> dict[str, int]:
    """The order with one op at `place`; ranks counted anew, every op keeps its iteration."""
    count = len(times)
    moved: dict[str, float] = {**times, name: place}
    ranked = sorted(moved, key=lambda one: moved[one] % count)
    return {one: int(moved[one] // count) * count + rank for rank, one in enumerate(ranked)}


def _with_times(
    schedule: KernelSchedule,
    problem: Extraction,
    placement: Placement,
    times: Mapping[str, int],
    limit: int,
) -> KernelSchedule | None:
    """The kernel schedule with this order in one loop; None where registers do not suffice."""
    loop, graph, parts = schedule.loops[problem.loop], problem.graph, placement.parts
    count = len(times)
    step = max(parts, loop.initiation_interval // count if loop.proof.solver else 64)
    interval = count * step
    first = min(times.values()) // count * count
    time: dict[str, int] = {}
    for node in graph.nodes:
        if node.variable_latency:
            continue
        part = node.subtile or 0
        twin = f"{node.id.rsplit('/', 1)[0]}/0"
        time[node.id] = (times[twin] - first) * step + part * (interval // parts)
    for node in graph.nodes:
        if node.variable_latency:
            readers = [time[edge.dst] for edge in graph.outgoing[node.id]]
            time[node.id] = min(readers) - interval
    shift = -min(time.values()) // interval * interval + interval
    time = {name: value + shift for name, value in time.items()}
    copies = {str(k): int(v) for k, v in dict(loop.params.get("copies", {})).items()}
    rules = Rules(unroll=max([1, *copies.values()]))
    laid = assemble(graph, problem.target, rules, interval, time, dict(problem.pins))
    if max(group.registers for group in laid.groups if group.warps > 1) > limit:
        return None
    params = {key: value for key, value in loop.params.items() if key != "free_running"}
    params["positions"] = True  # times are places in an order from here on
    made = replace(
        loop,
        initiation_interval=interval,
        length=laid.length,
        time=time,
        objectives=(),
        params=params,
    )
    loops = {**schedule.loops, problem.loop: made}
    latency = {node.id: node.latency for node in graph.nodes}
    found = releases(placement, replace(schedule, loops=loops), problem.loop, latency)
    loops[problem.loop] = replace(made, params={**params, "release": found})
    return replace(schedule, loops=loops)
