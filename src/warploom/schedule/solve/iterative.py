"""A schedule with overlap, by placing and displacing: what a search that ran out of time falls back
to, and the upper end of the intervals it has to look at.

Iterative modulo scheduling: operations in the order of their height, each at the first moment of
one interval where its unit, its group's instruction stream and the waits of its group have room;
where none has, it is put there all the same and what stands in its way is taken out again, until
everything is placed or the budget is used up. Source: Rau, "Iterative Modulo Scheduling", MICRO-27
(1994), section 3. Ours: warp groups (a few assignments are tried), hand-offs, blocking waits, and
sub-tiles that move together where they must run one program (`solve.uniform`).

A value in registers may live `unroll` intervals, which is a dependence of its birth on its readers.
How much is alive at a time is not looked at while placing: the checker decides about the result.
Nothing is proved: the interval is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from warploom.schedule.check.checker import check
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.bounds import lower_bounds, serial_length, topological_order
from warploom.schedule.model.graph import Edge, Graph, Node
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.solve.fallback import assignments, without_limits
from warploom.schedule.solve.subtiles import corresponding

BUDGET = 6  # placements for each operation before an interval is given up (Rau uses 2 to 6)
FIRST = 0.12  # of the interval: the first step up, each next twice as long
SMALL = 64  # operations
WORTH = 0.98  # of the best interval: what other groups must reach to be looked at
FINEST = 0.005  # of the interval: where bisection between a failure and a success stops

Ranges = list[tuple[int, int]]  # phases that are taken, both ends included, modulo the interval


@dataclass
class _Item:
    """Operations that move together: (node, cycles after the item)."""

    members: tuple[tuple[Node, int], ...]
    height: int = 0
    last: int = -1
    time: int | None = None


@dataclass(frozen=True)
class _Least:
    """The sink is at least `delay` cycles, which may be negative, after the source."""

    source: _Item
    sink: _Item
    delay: int


@dataclass
class _Placing:
    """One attempt: an interval, a group for every operation, what is placed so far."""

    graph: Graph
    target: Target
    rules: Rules
    interval: int
    group: Mapping[str, str]
    items: list[_Item]
    of: dict[str, tuple[_Item, int]] = field(default_factory=dict[str, tuple[_Item, int]])
    waits: frozenset[str] = frozenset()
    between: dict[tuple[int, int], Ranges] = field(default_factory=dict[tuple[int, int], Ranges])

    def __post_init__(self) -> None:
        self.of = {node.id: (item, off) for item in self.items for node, off in item.members}
        self.waits = frozenset(
            node.id
            for node in self.graph.nodes
            if any(map(self._waits, self.graph.incoming[node.id]))
        )
        self.exclusive = {unit.name for unit in self.target.units if not unit.rate}

    def _crosses(self, edge: Edge) -> bool:
        return self.group[edge.src] != self.group[edge.dst]

    def _waits(self, edge: Edge) -> bool:
        return edge.blocking or (edge.kind in ("data", "order") and self._crosses(edge))

    def constraints(self) -> list[_Least]:
        """Dependences, and how long values may stay in registers, between items."""
        found: list[_Least] = []
        for edge in self.graph.edges:
            (source, ahead), (sink, behind) = self.of[edge.src], self.of[edge.dst]
            spill = edge.spill_cost if self._crosses(edge) else 0
            away = edge.distance * self.interval
            found.append(_Least(source, sink, edge.delay + spill + ahead - behind - away))
            value, reader = self.graph.by_id[edge.src], self.graph.by_id[edge.dst]
            if not (self.rules.unroll and value.registers) or edge.kind == "order":
                continue
            most = self.rules.unroll * self.interval
            held = self._held(edge, value, reader)
            found.append(_Least(sink, source, away + held + behind - ahead - most))
        return [one for one in found if one.source is not one.sink or one.delay > 0]

    def _held(self, edge: Edge, value: Node, reader: Node) -> int:
        """Cycles a value in registers stays alive after the issue of a reader."""
        if self.rules.lifetime == "issue" or reader.in_place == value.id:
            return 0
        if edge.kind == "ring":
            return reader.span + edge.spill_cost
        return reader.span if reader.asynchronous or value.memory else 0

    def window(self, node: Node) -> int:
        """Cycles in which an operation keeps its group from a blocking wait."""
        short = node.asynchronous and self.rules.window == "issue"
        return max(1, node.issue) if short else node.span

    def taken(self, node: Node, other: Node, at: int) -> Ranges:
        """Phases that `node` cannot have while `other` has phase `at`."""
        found: Ranges = []
        for mine in node.uses:
            for theirs in other.uses:
                if mine.unit == theirs.unit and mine.unit in self.exclusive:
                    begin = at + theirs.start - mine.start
                    found.append((begin - mine.cycles + 1, begin + theirs.cycles - 1))
        if self.group[node.id] == self.group[other.id]:
            if node.issue and other.issue:
                found.append((at - node.issue + 1, at + other.issue - 1))
            if node.id in self.waits:
                found.append((at, at + self.window(other) - 1))
            if other.id in self.waits:
                found.append((at - self.window(node) + 1, at))
        return [(low, high) for low, high in found if high >= low]

    def apart(self, item: _Item, other: _Item) -> Ranges:
        """Distances from `other` to `item` that a unit, a stream or a wait forbids."""
        key = (id(item), id(other))
        if key not in self.between:
            self.between[key] = [
                (low - mine, high - mine)
                for node, mine in item.members
                for twin, theirs in other.members
                for low, high in self.taken(node, twin, theirs)
            ]
        return self.between[key]

    def clash(self, item: _Item, time: int, other: _Item) -> bool:
        """Whether two placed items cannot both stay."""
        if other.time is None:
            return False
        away = time - other.time
        return any(
            (away - low) % self.interval <= high - low for low, high in self.apart(item, other)
        )

    def alone(self, item: _Item) -> bool:
        """Whether the members of an item leave each other room."""
        return all(
            (mine - low) % self.interval > high - low
            for number, (node, mine) in enumerate(item.members)
            for twin, theirs in item.members[:number]
            for low, high in self.taken(node, twin, theirs)
        )

    def free(self, item: _Item, earliest: int) -> int | None:
        """The first moment of one interval from `earliest` on that nothing placed forbids."""
        interval = self.interval
        taken: Ranges = []
        for other in self.items:
            if other.time is None or other is item:
                continue
            shift = other.time - earliest
            for low, high in self.apart(item, other):
                if high - low + 1 >= interval:
                    return None
                start = (low + shift) % interval
                taken.append((start, start + high - low))
        moment = 0
        # One that began in the interval before reaches into this one.
        spans = sorted([*taken, *((a - interval, b - interval) for a, b in taken)])
        for low, high in spans:
            if low > moment:
                break
            moment = max(moment, high + 1)
        return earliest + moment if moment < interval else None


def iterative_schedule(
    graph: Graph,
    target: Target,
    rules: Rules,
    pins: Mapping[str, str],
    uniform: bool = False,
    least: int = 0,
    over: Callable[[], bool] = lambda: False,
) -> Schedule | None:
    """The shortest interval that placing found, from `least` or the analytic bound on.

    None when no attempt passes the checker up to the serial interval. `over()` ends the bettering
    of what was found. On a target without groups one without limits stands in for none.
    """
    if not target.groups:
        graph, target, pins = bare(graph), without_limits(target), {}
    low = max(least, lower_bounds(graph, target).minimum)
    best: Schedule | None = None
    serial = serial_length(graph)
    for group in assignments(graph, target, pins):
        at = partial(attempt, graph, target, rules, group, uniform)
        best = _shorter(at, low, serial, best, len(graph.nodes) <= SMALL, over)
        if best is not None and (over() or best.initiation_interval == low):
            break
    return best


def _shorter(
    attempts: Callable[[int], Schedule | None],
    low: int,
    serial: int,
    best: Schedule | None,
    small: bool,
    over: Callable[[], bool],
) -> Schedule | None:
    """`best`, or a shorter interval: doubling steps up from `low`, then bisection."""
    failed, found = low - 1, None
    if best is not None:  # is there anything to gain with these groups?
        found = attempts(int(best.initiation_interval * WORTH))
    else:
        step = max(1, int(low * FIRST))
        # Failing takes longer than succeeding: only small loops begin where most of them fail.
        interval = low if small else low + step
        while found is None and interval <= serial:  # an answer late is better than none
            found = attempts(interval)
            if found is None:
                failed, interval, step = interval, interval + step, 2 * step
    while found is not None and found.initiation_interval - failed > 1 + low * FINEST:
        if over():
            break
        middle = (failed + found.initiation_interval) // 2
        shorter = attempts(middle)
        failed, found = (middle, found) if shorter is None else (failed, shorter)
    return found or best


def attempt(
    graph: Graph,
    target: Target,
    rules: Rules,
    group: Mapping[str, str],
    uniform: bool,
    interval: int,
) -> Schedule | None:
    """A legal schedule at this interval with these groups, or None."""
    items = _items(graph, interval, uniform)
    it = _Placing(graph, target, rules, interval, group, items)
    every = it.constraints()
    if any(one.source is one.sink for one in every) or not all(map(it.alone, items)):
        return None
    if not _heights(it, every) or not _place(it, every):
        return None
    times = {name: (item.time or 0) + off for name, (item, off) in it.of.items()}
    first = min(times.values())
    times = {name: time - first for name, time in times.items()}
    schedule = assemble(graph, target, rules, interval, times, group)
    return schedule if check(graph, target, schedule).passed else None


def _items(graph: Graph, interval: int, uniform: bool) -> list[_Item]:
    if not uniform:
        return [_Item(((node, 0),)) for node in graph.nodes]
    items: list[_Item] = []
    grouped: set[str] = set()
    for images in corresponding(graph):
        nodes = [graph.by_id[name] for name in images]
        grouped |= set(images)
        items.append(
            _Item(tuple((node, (node.subtile or 0) * interval // len(nodes)) for node in nodes))
        )
    return items + [_Item(((n, 0),)) for n in graph.nodes if n.id not in grouped]


def _heights(it: _Placing, every: Sequence[_Least]) -> bool:
    """Longest way to the end from every item; False where a cycle does not fit the interval."""
    for _ in range(len(it.items) + 1):
        moved = False
        for one in every:
            reach = one.sink.height + one.delay
            if reach > one.source.height:
                one.source.height, moved = reach, True
        if not moved:
            return True
    return False


def _place(it: _Placing, every: Sequence[_Least]) -> bool:
    """Everything placed within the budget."""
    rank = {name: place for place, name in enumerate(topological_order(it.graph))}
    number = {id(item): place for place, item in enumerate(it.items)}
    order = [min(rank[node.id] for node, _ in item.members) for item in it.items]
    into: list[list[_Least]] = [[] for _ in it.items]
    out: list[list[_Least]] = [[] for _ in it.items]
    for one in every:
        if one.source is not one.sink:
            into[number[id(one.sink)]].append(one)
            out[number[id(one.source)]].append(one)
    left = set(range(len(it.items)))
    for _ in range(BUDGET * len(it.items)):
        if not left:
            return True
        chosen = max(left, key=lambda n: (it.items[n].height, -order[n]))
        item = it.items[chosen]
        sources = [(one.source.time, one.delay) for one in into[chosen]]
        earliest = max([0, *(time + delay for time, delay in sources if time is not None)])
        moment = it.free(item, earliest)
        if moment is None:
            moment = max(earliest, item.last + 1)
        item.time = item.last = moment
        left.discard(chosen)
        late = {
            number[id(one.sink)]
            for one in out[chosen]
            if one.sink.time is not None and one.sink.time < moment + one.delay
        }
        for place, other in enumerate(it.items):
            if other is item or other.time is None:
                continue
            if place in late or it.clash(item, moment, other):
                other.time = None
                left.add(place)
    return not left


def bare(graph: Graph) -> Graph:
    """The graph without what only warp groups ask for: instruction streams, waits, registers."""
    nodes = tuple(replace(node, issue=0, registers=0) for node in graph.nodes)
    edges = tuple(replace(edge, blocking=False) for edge in graph.edges)
    return replace(graph, nodes=nodes, edges=edges)
