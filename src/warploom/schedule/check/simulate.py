"""Run a schedule as the machine would: warp groups issue in order, nobody looks at a clock.

The schedule's times are used for one thing only: the order of operations in each group (and, if
asked, on each shared unit). From there on every operation issues as soon as the hardware lets it:
its group's instruction stream is free, its operands have arrived, its unit is free, its ring slot
is empty. Variable-latency operations take a random time within their range.

What it shows: no deadlock, no live buffer overwritten, and the rate of the steady state. With
`order="schedule"` units serve operations in the schedule's order, as named barriers (ping-pong)
would make them; with `order="free"`, first come first served. A gap between the two rates says
that the order has to be enforced by barriers to hold the interval.

Shares no code with the encoding or the checker.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field

from warploom.errors import CheckFailed, InputError
from warploom.schedule.model.graph import Edge, Graph, Node
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target

Instance = tuple[str, int]  # a node and its iteration
SHORT = 0.02  # of the interval: a free-running rate within this is the schedule's


@dataclass(frozen=True)
class Run:
    """One simulated run.

    rate        cycles an iteration over the second half of the run
    deadlock    instances at the head of their groups when nothing could move; empty: none
    hazards     live buffers that were overwritten, in words
    issues      issue cycle of every instance
    """

    rate: float
    cycles: int
    deadlock: tuple[str, ...]
    hazards: tuple[str, ...]
    issues: dict[Instance, int]

    @property
    def clean(self) -> bool:
        """Whether it ran to the end and nothing live was overwritten."""
        return not self.deadlock and not self.hazards

    def raise_if_failed(self) -> None:
        """Turn a deadlock or hazard into a `CheckFailed`."""
        if self.deadlock:
            raise CheckFailed(f"deadlock: {', '.join(self.deadlock)} wait for each other")
        if self.hazards:
            raise CheckFailed(f"buffer overwritten while alive: {self.hazards[0]}")


@dataclass
class _Group:
    """The instruction stream of a warp group: its instances in program order."""

    program: list[Instance]
    next: int = 0
    last: int = 0  # when it last issued: the next one is not earlier
    free: int = 0  # an operation that takes issue slots can follow
    drained: int = 0  # everything it executes itself is done: a barrier wait can start


@dataclass
class _Machine:
    """State of one run."""

    graph: Graph
    target: Target
    schedule: Schedule
    iterations: int
    latency: dict[Instance, int]
    ordered: bool
    groups: list[_Group] = field(default_factory=list[_Group])
    issued: dict[Instance, int] = field(default_factory=dict[Instance, int])
    unit_free: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    unit_queue: dict[str, list[Instance]] = field(default_factory=dict[str, list[Instance]])
    unit_next: dict[str, int] = field(default_factory=dict[str, int])


def simulate(
    graph: Graph,
    target: Target,
    schedule: Schedule,
    iterations: int = 40,
    seed: int | None = None,
    order: str = "schedule",
) -> Run:
    """Run `iterations` iterations; `seed` draws random latencies (None: the nominal ones)."""
    if order not in ("schedule", "free"):
        raise InputError(f"simulate: order {order!r}, expected 'schedule' or 'free'")
    if iterations < 4:
        raise InputError(f"simulate: {iterations} iterations, expected at least 4")
    latency = _draw(graph, iterations, seed)
    it = _Machine(graph, target, schedule, iterations, latency, order == "schedule")
    _programs(it)
    stuck = _run(it)
    done = [i for i in range(iterations) if all((n.id, i) in it.issued for n in graph.nodes)]
    cycles = max((t + it.latency[i] for i, t in it.issued.items()), default=0)
    hazards = _overwrites(it)
    return Run(_rate(it, done), cycles, stuck, hazards, it.issued)


def _draw(graph: Graph, iterations: int, seed: int | None) -> dict[Instance, int]:
    """Issue-to-result cycles of every instance."""
    chance = random.Random(seed)
    latency: dict[Instance, int] = {}
    for node in graph.nodes:
        low, high = node.latency_range or (node.latency, node.latency)
        for i in range(iterations):
            drawn = node.variable_latency and seed is not None
            latency[node.id, i] = chance.randint(low, high) if drawn else node.latency
    return latency


def _programs(it: _Machine) -> None:
    """Order instances by schedule time; equal times by dependence (a topological rank)."""
    rank = _topological(it.graph)
    interval = it.schedule.initiation_interval

    def when(instance: Instance) -> tuple[int, int, int]:
        name, i = instance
        return it.schedule.time[name] + i * interval, rank[name], i

    everything = [(node.id, i) for node in it.graph.nodes for i in range(it.iterations)]
    everything.sort(key=when)
    streams: dict[str, list[Instance]] = defaultdict(list)
    for instance in everything:
        streams[it.schedule.group[instance[0]]].append(instance)
    it.groups = [_Group(program) for program in streams.values()]
    for unit in it.target.units:
        it.unit_free[unit.name] = [0] * unit.capacity
        it.unit_next[unit.name] = 0
        users = {n.id for n in it.graph.nodes for use in n.uses if use.unit == unit.name}
        it.unit_queue[unit.name] = [] if unit.rate else [e for e in everything if e[0] in users]


def _topological(graph: Graph) -> dict[str, int]:
    left = {n.id: sum(e.distance == 0 for e in graph.incoming[n.id]) for n in graph.nodes}
    ready = [n.id for n in graph.nodes if left[n.id] == 0]
    rank: dict[str, int] = {}
    while ready:
        name = ready.pop(0)
        rank[name] = len(rank)
        for edge in graph.outgoing[name]:
            if edge.distance == 0:
                left[edge.dst] -= 1
                if left[edge.dst] == 0:
                    ready.append(edge.dst)
    return rank


def _run(it: _Machine) -> tuple[str, ...]:
    """Issue the earliest possible head of any group until all are done or none can move."""
    total = sum(len(group.program) for group in it.groups)
    while len(it.issued) < total:
        choices: list[tuple[int, int]] = []
        for index, group in enumerate(it.groups):
            if group.next < len(group.program):
                moment = _earliest(it, group, group.program[group.next])
                if moment is not None:
                    heapq.heappush(choices, (moment, index))
        if not choices:
            heads = [g.program[g.next] for g in it.groups if g.next < len(g.program)]
            return tuple(f"{name}[{i}]" for name, i in heads)
        moment, index = choices[0]
        _issue(it, it.groups[index], moment)
    return ()


def _earliest(it: _Machine, group: _Group, instance: Instance) -> int | None:
    """When the head of a group could issue; None while something it needs has not issued."""
    name, i = instance
    node = it.graph.by_id[name]
    moment = max(group.last, group.free) if node.issue else group.last
    waits = False
    for edge in it.graph.incoming[name]:
        source = (edge.src, i - edge.distance)
        if source[1] < 0:
            continue
        if source not in it.issued:
            return None
        crosses = it.schedule.group[edge.src] != it.schedule.group[name]
        waits |= edge.blocking or (crosses and edge.kind in ("data", "order"))
        moment = max(moment, it.issued[source] + _delay(it, edge, source, crosses))
    released = _slot_free(it, node, i)
    if released is None:
        return None
    moment = max(moment, released)
    if waits:
        moment = max(moment, group.drained)
    for use in node.uses:
        unit = it.target.unit(use.unit)
        if unit.rate:  # served a little at a time: only its total counts, in `_rate`
            continue
        queue = it.unit_queue[use.unit]
        if it.ordered and queue[it.unit_next[use.unit]] != instance:
            return None
        free = sorted(it.unit_free[use.unit])[use.amount - 1]
        moment = max(moment, free - use.start)
    return moment


def _delay(it: _Machine, edge: Edge, source: Instance, crosses: bool) -> int:
    """The edge's delay; for a load the drawn latency, where the graph counts the nominal one."""
    node = it.graph.by_id[edge.src]
    drawn = edge.delay
    if node.variable_latency and edge.kind == "ring" and edge.delay:
        drawn = edge.delay - node.latency + it.latency[source]
    return drawn + (edge.spill_cost if crosses else 0)


def _slot_free(it: _Machine, node: Node, i: int) -> int | None:
    """When the ring slot of iteration i was released by the readers of iteration i - depth."""
    depth = it.schedule.ring_depth.get(node.id)
    if depth is None or i < depth:
        return 0
    moment = 0
    for edge in it.graph.outgoing[node.id]:
        if edge.kind != "ring":
            continue
        reader = (edge.dst, i - depth + edge.distance)
        if reader[1] >= it.iterations:
            continue
        if reader not in it.issued:
            return None
        moment = max(moment, it.issued[reader] + _release(it, edge))
    return moment


def _release(it: _Machine, edge: Edge) -> int:
    """Cycles from a reader's issue to the release of the slot it read."""
    if it.schedule.rules.lifetime == "issue":
        return 0
    return it.graph.by_id[edge.dst].span + edge.spill_cost


def _issue(it: _Machine, group: _Group, moment: int) -> None:
    instance = group.program[group.next]
    node = it.graph.by_id[instance[0]]
    it.issued[instance] = moment
    group.next += 1
    group.last = moment
    group.free = max(group.free, moment + node.issue)
    short = node.asynchronous and it.schedule.rules.window == "issue"
    busy = max(1, node.issue if short else node.latency)
    group.drained = max(group.drained, moment + busy)
    for use in node.uses:
        if it.target.unit(use.unit).rate:
            continue
        it.unit_next[use.unit] += 1
        slots = it.unit_free[use.unit]
        slots.sort()
        for taken in range(use.amount):
            slots[taken] = moment + use.start + use.cycles


def _rate(it: _Machine, done: list[int]) -> float:
    """Cycles an iteration, measured on the last operation over the second half of the run.

    Never less than the work of one iteration on a rate unit: a fluid server sustains just that.
    """
    if len(done) < 4:
        return float("inf")
    middle, last = done[len(done) // 2], done[-2]
    if last <= middle:
        middle, last = done[0], done[-1]
    name = max(it.graph.nodes, key=lambda n: it.schedule.time[n.id] + n.span).id
    measured = (it.issued[name, last] - it.issued[name, middle]) / (last - middle)
    fluid = {unit.name: unit.capacity for unit in it.target.units if unit.rate}
    work = dict.fromkeys(fluid, 0)
    for node in it.graph.nodes:
        for use in node.uses:
            if use.unit in fluid:
                work[use.unit] += use.cycles * use.amount
    return max([measured, *(work[unit] / fluid[unit] for unit in fluid)])


def _overwrites(it: _Machine) -> tuple[str, ...]:
    """Ring slots filled before their last reader let go; and memories over capacity."""
    found: list[str] = []
    for name, depth in it.schedule.ring_depth.items():
        for i in range(depth, it.iterations):
            for edge in it.graph.outgoing[name]:
                reader = (edge.dst, i - depth + edge.distance)
                if edge.kind != "ring" or reader not in it.issued or (name, i) not in it.issued:
                    continue
                if it.issued[name, i] < it.issued[reader] + _release(it, edge):
                    found.append(
                        f"slot {i % depth} of {name} refilled under {reader[0]}[{reader[1]}]"
                    )
    for memory, capacity in it.target.memories.items():
        found += _over_capacity(it, memory, capacity)
    return tuple(found)


def _over_capacity(it: _Machine, memory: str, capacity: int) -> list[str]:
    """Values that live in a memory at once and do not fit: one would overwrite another."""
    events: list[tuple[int, int, str]] = []
    for node in it.graph.nodes:
        size = node.memory.get(memory, 0)
        if not size:
            continue
        if node.id in it.schedule.ring_depth:
            capacity -= size * it.schedule.ring_depth[node.id]
            continue
        for i in range(it.iterations):
            if (node.id, i) in it.issued:
                born, dead = it.issued[node.id, i], _death(it, node, i)
                events += [(born, size, node.id), (dead, -size, node.id)]
    held = 0
    for moment, size, name in sorted(events):
        held += size
        if held > capacity:
            return [f"{memory} holds {held} of {capacity} when {name} is written at {moment}"]
    return []


def _death(it: _Machine, node: Node, i: int) -> int:
    """When the value of one instance was last needed in this run."""
    dead = it.issued[node.id, i]
    for edge in it.graph.outgoing[node.id]:
        reader = (edge.dst, i + edge.distance)
        if edge.kind == "order" or reader not in it.issued:
            continue
        user = it.graph.by_id[edge.dst]
        held = 0
        if it.schedule.rules.lifetime == "completion" and user.in_place != node.id:
            held = user.drain if user.asynchronous else user.span
        dead = max(dead, it.issued[reader] + held)
    return dead


@dataclass(frozen=True)
class Rates:
    """Steady-state cycles an iteration: units in schedule order, and first come first served."""

    ordered: float
    free: float
    interval: int

    @property
    def needs_order(self) -> bool:
        """Whether shared units must be kept in order (ping-pong barriers) to hold the interval."""
        return self.free > self.interval * (1 + SHORT)


def verify(graph: Graph, target: Target, schedule: Schedule, seeds: int = 3) -> Rates:
    """Nominal and random runs: raises `CheckFailed` on deadlock, overwrite or a slow steady state.

    Random latencies stretch an iteration when they exceed what the rings cover, so the rate is
    asked of the nominal run only.
    """
    nominal = simulate(graph, target, schedule)
    nominal.raise_if_failed()
    for seed in range(seeds):
        simulate(graph, target, schedule, seed=seed).raise_if_failed()
    if nominal.rate > schedule.initiation_interval + 0.5:
        raise CheckFailed(
            f"steady state takes {nominal.rate:.1f} cycles an iteration, the schedule of "
            f"{graph.name} promises {schedule.initiation_interval}"
        )
    free = simulate(graph, target, schedule, order="free")
    return Rates(nominal.rate, free.rate, schedule.initiation_interval)
