"""What forbids a schedule, stated as gaps between times and choices among them, for `refute`.

Read off the rules as a person reads them (`model.rules`, `model.graph`), not off the solver's
model. What cannot be stated here (units of several instances) is left out: leaving something out
can only leave a bound unconfirmed, never confirm a false one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from warploom.schedule.model.graph import Edge, Graph, Node
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.target import GroupSpec, Target

NOWHERE = -1
WORD_BYTES = 4
MOST_CARRIED = 4  # values that hold what a loop carries: longer cycles are not looked for


@dataclass(frozen=True)
class Gap:
    """time[after] - time[before] >= cycles + turns * II; operations by their place in the graph."""

    before: int
    after: int
    cycles: int
    turns: int = 0


@dataclass(frozen=True)
class Choice:
    """An integer k: `later` holds with k turns more and `sooner` with k + 1 turns fewer.

    So the second operation issues at or after the k-th copy of the first and is done before the
    next one.
    """

    later: tuple[Gap, ...]
    sooner: tuple[Gap, ...]

    def made(self, k: int) -> list[Gap]:
        """The gaps of one k."""
        return [replace(gap, turns=gap.turns + k) for gap in self.later] + [
            replace(gap, turns=gap.turns - k - 1) for gap in self.sooner
        ]


@dataclass(frozen=True)
class Limits:
    """Words a warp of each group may hold: the target's, or less to spare registers of a pool."""

    words: tuple[int, ...]


@dataclass(frozen=True)
class Rulebook:
    """The rules of one problem. `stages`: most overlapped iterations, 0 for any number."""

    graph: Graph
    target: Target
    rules: Rules
    pins: Mapping[str, str]
    stages: int

    @cached_property
    def place(self) -> dict[str, int]:
        """Places of the operations in the graph."""
        return {node.id: number for number, node in enumerate(self.graph.nodes)}

    @cached_property
    def fitting(self) -> tuple[tuple[int, ...], ...]:
        """Groups that can hold each operation."""
        found: list[tuple[int, ...]] = []
        for node in self.graph.nodes:
            pin = self.pins.get(node.id)
            found.append(
                tuple(
                    w
                    for w, group in enumerate(self.target.groups)
                    if pin in (None, group.name) and self._holds(group, node)
                )
            )
        return tuple(found)

    def _holds(self, group: GroupSpec, node: Node) -> bool:
        if self.target.own_load_group and group.loads is not node.variable_latency:
            return False
        return group.warps >= node.min_warps

    @cached_property
    def latest(self) -> int:
        """The latest that an operation's reservation starts after its issue."""
        return max((use.start for node in self.graph.nodes for use in node.uses), default=0)

    def limits(self) -> Limits:
        """What the target allows."""
        most = 32 * (self.target.registers_per_thread - self.target.reserved_registers)
        return Limits((most,) * len(self.target.groups))

    def homes(self) -> tuple[int, ...]:
        """The group of every operation that has no choice."""
        return tuple(groups[0] if len(groups) == 1 else NOWHERE for groups in self.fitting)

    def next_homes(self, home: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Homes with one operation more: groups of one kind are taken in turn, unless pinned."""
        number = home.index(NOWHERE)
        tried: set[tuple[int, bool]] = set()
        for w in self.fitting[number]:
            group = self.target.groups[w]
            if w not in home and not self.pins:
                if (group.warps, group.loads) in tried:
                    continue  # another empty group of the kind: the same but for its name
                tried.add((group.warps, group.loads))
            yield (*home[:number], w, *home[number + 1 :])

    def enough(self, interval: int) -> bool:
        """Whether the units have the time at all."""
        return all(
            sum(
                use.cycles * use.amount
                for node in self.graph.nodes
                for use in node.uses
                if use.unit == unit.name
            )
            <= interval * unit.capacity
            for unit in self.target.units
        )

    def gaps(self, home: tuple[int, ...]) -> list[Gap]:
        """What holds whatever is chosen, for the homes that are known."""
        return self.dependences(home) + self._always

    @cached_property
    def _always(self) -> list[Gap]:
        """What holds whoever runs what: an operation and its own copies, and the length."""
        found: list[Gap] = []
        for number, node in enumerate(self.graph.nodes):
            found += self._alone(number, node)
        if self.stages:
            for first in range(len(self.graph.nodes)):
                for last, node in enumerate(self.graph.nodes):
                    found.append(Gap(last, first, max(1, node.latency), -self.stages))
        return found

    def dependences(self, home: tuple[int, ...]) -> list[Gap]:
        """The edges, with the hand-offs that are known."""
        found: list[Gap] = []
        for edge in self.graph.edges:
            before, after, apart = self.place[edge.src], self.place[edge.dst], False
            if before != after:
                apart = self._apart(home, edge)
            spill = edge.spill_cost if apart else 0
            found.append(Gap(before, after, edge.delay + spill, -edge.distance))
            value = edge.kind == "data" and self.graph.by_id[edge.src].registers > 0
            if apart and value and edge.distance and self.rules.carried_in_group:
                found.append(Gap(before, before, 1))  # never
        return found

    def _apart(self, home: tuple[int, ...], edge: Edge) -> bool:
        first, second = home[self.place[edge.src]], home[self.place[edge.dst]]
        return NOWHERE not in (first, second) and first != second

    def _alone(self, number: int, node: Node) -> list[Gap]:
        """An operation and its own next copy; how long its value may live."""
        found = [Gap(number, number, node.issue, -1)] if self.target.groups else []
        for use in node.uses:
            unit = self.target.unit(use.unit)
            if not unit.rate and unit.capacity < 2 * use.amount:
                found.append(Gap(number, number, use.cycles, -1))
        if node.registers and self.rules.unroll and self.target.groups:
            found += self.dies(number, self.rules.unroll)
        for memory, size in node.memory.items():
            if size:
                others = sum(
                    self.graph.by_id[name].memory.get(memory, 0)
                    for name in self.graph.rings
                    if name != node.id
                )
                found += self.dies(number, (self.target.memories[memory] - others) // size)
        return found

    def dies(self, number: int, turns: int, other: int | None = None) -> list[Gap]:
        """The value is dead `turns` intervals after its birth, or at the issue of another."""
        own = self.graph.nodes[number]
        return [
            Gap(self.place[e.dst], number if other is None else other, held, e.distance - turns)
            for e, held in self.readers(own)
        ]

    def readers(self, value: Node) -> list[tuple[Edge, int]]:
        """Who keeps a value alive, and for how many cycles after its own issue."""
        found: list[tuple[Edge, int]] = []
        for edge in self.graph.outgoing[value.id]:
            if edge.kind == "order":
                continue
            reader, held = self.graph.by_id[edge.dst], 0
            span = max(1, reader.latency)
            if self.rules.lifetime == "completion" and reader.in_place != value.id:
                if edge.kind == "ring":
                    held = span + edge.spill_cost
                elif value.memory and reader.asynchronous:
                    held = max((use.start + use.cycles for use in reader.uses), default=span)
                elif value.memory or reader.asynchronous:
                    held = span
            found.append((edge, held))
        return found

    def choices(self, home: tuple[int, ...], limits: Limits) -> list[Choice]:
        """Everything two operations may not do at the same time, for the homes that are known."""
        waits = [self._waits(home, node) for node in self.graph.nodes]
        carried = self._carried(home)
        found: list[Choice] = []
        for second in range(len(self.graph.nodes)):
            found += self._own_uses(second)
            for first in range(second):
                found += self._between(home, limits, waits, carried, first, second)
        return found

    def _carried(self, home: tuple[int, ...]) -> list[tuple[int, frozenset[int]]]:
        """Words alive at every moment, and the values that hold them in turn.

        Round a cycle of reads over one iteration each value lives until the next is born, in the
        same group. Cycles that share a value count once.
        """
        found: list[tuple[int, frozenset[int]]] = []
        for edge in self.graph.edges:
            if edge.kind == "data" and edge.distance == 1:
                last, first = self.place[edge.src], self.place[edge.dst]
                for values in self._ways(home, (first,), last):
                    words = min(self.words(self.graph.nodes[v]) for v in values)
                    found.append((words, frozenset(values)))
        found.sort(key=lambda item: (-item[0], len(item[1]), sorted(item[1])))
        apart: list[tuple[int, frozenset[int]]] = []
        for words, values in found:
            if words and not any(values & other for _, other in apart):
                apart.append((words, values))
        return apart

    def _ways(
        self, home: tuple[int, ...], way: tuple[int, ...], last: int
    ) -> Iterator[tuple[int, ...]]:
        """Short ways of reads within an iteration and a group that end at `last`."""
        if home[way[-1]] != home[last] or len(way) > MOST_CARRIED:
            return
        if way[-1] == last:
            yield way
            return
        for edge in self.graph.outgoing[self.graph.nodes[way[-1]].id]:
            if edge.kind == "data" and edge.distance == 0:
                yield from self._ways(home, (*way, self.place[edge.dst]), last)

    def _waits(self, home: tuple[int, ...], node: Node) -> bool:
        return any(
            edge.blocking or (edge.kind in ("data", "order") and self._apart(home, edge))
            for edge in self.graph.incoming[node.id]
        )

    def _own_uses(self, number: int) -> list[Choice]:
        """Reservations of one operation on the same unit."""
        uses = [use for use in self.graph.nodes[number].uses if self._exclusive(use.unit)]
        return [
            Choice(
                (Gap(number, number, one.cycles + one.start - other.start),),
                (Gap(number, number, other.cycles + other.start - one.start),),
            )
            for place, other in enumerate(uses)
            for one in uses[:place]
            if one.unit == other.unit and one.cycles and other.cycles
        ]

    def _exclusive(self, name: str) -> bool:
        unit = self.target.unit(name)
        return unit.capacity == 1 and not unit.rate

    def _between(
        self,
        home: tuple[int, ...],
        limits: Limits,
        waits: list[bool],
        carried: Sequence[tuple[int, frozenset[int]]],
        first: int,
        second: int,
    ) -> list[Choice]:
        a, b = self.graph.nodes[first], self.graph.nodes[second]
        found: list[Choice] = []
        after, before = 0, 0  # cycles that b must stay behind a, and a behind b
        for mine in a.uses:
            for theirs in b.uses:
                if mine.unit != theirs.unit or not self._exclusive(mine.unit):
                    continue
                if not (mine.cycles and theirs.cycles):
                    continue
                ahead = mine.start - theirs.start
                if ahead == 0:
                    after, before = max(after, mine.cycles), max(before, theirs.cycles)
                    continue
                found.append(
                    Choice(
                        (Gap(first, second, mine.cycles + ahead),),
                        (Gap(second, first, theirs.cycles - ahead),),
                    )
                )
        together = home[first] == home[second] != NOWHERE
        if together and a.issue and b.issue:
            after, before = max(after, a.issue), max(before, b.issue)
        if together and waits[second]:
            after, before = max(after, self._window(a)), max(before, 1)
        if together and waits[first]:
            after, before = max(after, 1), max(before, self._window(b))
        later = [Gap(first, second, after)] if after else []
        sooner = [Gap(second, first, before)] if before else []
        beside = 0  # words that are alive at every moment, of neither value
        if together:
            beside = sum(
                words
                for words, values in carried
                if not values & {first, second} and all(home[v] == home[first] for v in values)
            )
        if self._exclude(home, limits, a, b, together, beside):
            later += self.dies(first, 0, second)
            sooner += self.dies(second, 0, first)
        if later and sooner:
            found.append(Choice(tuple(later), tuple(sooner)))
        return found

    def _window(self, node: Node) -> int:
        short = node.asynchronous and self.rules.window == "issue"
        return max(1, node.issue if short else node.latency)

    def _exclude(
        self, home: tuple[int, ...], limits: Limits, a: Node, b: Node, together: bool, beside: int
    ) -> bool:
        """Whether both values cannot be alive at the same time, each being alive at all."""
        if not all(any(e.delay + held > 0 for e, held in self.readers(n)) for n in (a, b)):
            return False
        words = self.words(a) + self.words(b) + beside
        w = home[self.place[a.id]]
        if together and a.registers and b.registers and words > limits.words[w]:
            return True
        rings = self.graph.rings
        if a.id in rings or b.id in rings:
            return False
        return any(
            a.memory.get(memory, 0)
            and b.memory.get(memory, 0)
            and a.memory[memory] + b.memory[memory] > capacity - self._rings(memory)
            for memory, capacity in self.target.memories.items()
        )

    def _rings(self, memory: str) -> int:
        return sum(self.graph.by_id[name].memory.get(memory, 0) for name in self.graph.rings)

    def words(self, node: Node) -> int:
        """Words its value takes in each warp of its group."""
        return -(-node.registers // node.min_warps)
