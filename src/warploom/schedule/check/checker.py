"""Is a schedule legal? Decided by counting cycle by cycle, knowing nothing of how it was found.

This file shares no code with the encoding: it reads the graph, the target, the rules and the
schedule, lays one steady-state interval out as II slots, and counts what each slot holds. It also
recomputes the value of every objective, so a schedule cannot claim what it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warploom.errors import CheckFailed
from warploom.schedule.model.graph import Edge, Graph, Node
from warploom.schedule.model.rules import Prices
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import GroupSpec, Target

Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Finding:
    """One broken rule: its name, the culprits and the numbers."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@dataclass(frozen=True)
class Report:
    """What the checker found and measured: peaks are per group (words a warp) and per memory."""

    findings: tuple[Finding, ...]
    register_peak: dict[str, int]
    memory_peak: dict[str, int]
    busy: dict[str, float]

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return not self.findings

    def broken(self, rule: str) -> list[str]:
        """The messages of one rule."""
        return [finding.message for finding in self.findings if finding.rule == rule]

    def raise_if_failed(self) -> None:
        """Turn the first finding into a `CheckFailed`."""
        for first in self.findings:
            rest = len(self.findings) - 1
            more = f" (and {rest} more)" if rest else ""
            raise CheckFailed(f"schedule is illegal: {first}{more}")


def check(graph: Graph, target: Target, schedule: Schedule, prices: Prices | None = None) -> Report:
    """Every rule of `model.rules`, counted; with `prices` the traffic objective too."""
    it = _Counter(graph, target, schedule)
    it.nodes_and_groups()
    if it.findings:  # nothing below makes sense for a schedule of another graph
        return Report(tuple(it.findings), {}, {}, {})
    it.length()
    it.dependences()
    busy = it.units()
    it.streams()
    it.blocking_waits()
    it.rings()
    memory = it.memories()
    registers = it.registers()
    it.objectives(prices)
    return Report(tuple(it.findings), registers, memory, busy)


class _Counter:
    """Slot counts of one steady-state interval."""

    def __init__(self, graph: Graph, target: Target, schedule: Schedule) -> None:
        self.graph, self.target, self.schedule = graph, target, schedule
        self.rules, self.interval = schedule.rules, schedule.initiation_interval
        self.time, self.group = schedule.time, schedule.group
        self.specs: dict[str, GroupSpec] = {group.name: group for group in target.groups}
        self.findings: list[Finding] = []

    def say(self, rule: str, message: str) -> None:
        self.findings.append(Finding(rule, message))

    def slots(self, start: int, cycles: int) -> Slots:
        """How many copies of [start, start + cycles) lie on each slot modulo II."""
        full, rest = divmod(max(0, cycles), self.interval)
        counts = np.full(self.interval, full, dtype=np.int64)
        first = np.arange(start, start + rest) % self.interval
        counts[first] += 1
        return counts

    def nodes_and_groups(self) -> None:
        for name in sorted(set(self.graph.by_id) ^ set(self.time)):
            where = "the schedule" if name in self.time else "the graph"
            self.say("nodes", f"only {where} has node {name}")
        for group in self.schedule.groups:
            spec = self.specs.get(group.name)
            if spec is None or spec.warps != group.warps:
                self.say("groups", f"target {self.target.name} offers no such {group}")
        if self.findings:
            return
        for node in self.graph.nodes:
            spec = self.specs[self.group[node.id]]
            if node.min_warps > spec.warps:
                self.say("warps", f"{node.id} needs {node.min_warps} warps, {spec.name} has fewer")
            if self.target.own_load_group and spec.loads != node.variable_latency:
                self.say("variable latency", f"{node.id} sits in {spec.name}")

    def length(self) -> None:
        first = min(self.time.values())
        last = max(self.time[node.id] + max(1, node.latency) for node in self.graph.nodes)
        if first < 0:
            self.say("times", f"an operation issues at {first}, before its iteration starts")
        if last - first != self.schedule.length:
            self.say("length", f"claims {self.schedule.length}, counted {last - first}")

    def crosses(self, edge: Edge) -> bool:
        return self.group[edge.src] != self.group[edge.dst]

    def dependences(self) -> None:
        for edge in self.graph.edges:
            spill = edge.spill_cost if self.crosses(edge) else 0
            gap = self.time[edge.dst] + edge.distance * self.interval - self.time[edge.src]
            if gap < edge.delay + spill:
                rule = "hand-off" if gap >= edge.delay else "dependence"
                self.say(rule, f"{edge} has {gap} cycles, needs {edge.delay} + {spill}")
            value = edge.kind == "data" and self.graph.by_id[edge.src].registers > 0
            if (
                self.rules.carried_in_group
                and value
                and edge.distance
                and spill | self.crosses(edge)
            ):
                self.say("carried", f"{edge} carries a register value to another group")

    def units(self) -> dict[str, float]:
        busy: dict[str, float] = {}
        for unit in self.target.units:
            held = np.zeros(self.interval, dtype=np.int64)
            for node in self.graph.nodes:
                for use in node.uses:
                    if use.unit == unit.name:
                        start = self.time[node.id] + use.start
                        held += use.amount * self.slots(start, use.cycles)
            total = int(held.sum())
            busy[unit.name] = total / (self.interval * unit.capacity)
            if unit.rate:
                if total > self.interval * unit.capacity:
                    self.say("unit", f"{unit.name} has {total} cycles of work an interval")
            elif held.max(initial=0) > unit.capacity:
                slot = int(held.argmax())
                who = self._users(unit.name, slot)
                self.say("unit", f"{unit.name} holds {int(held.max())} of {who} in slot {slot}")
        return busy

    def _users(self, unit: str, slot: int) -> list[str]:
        return [
            node.id
            for node in self.graph.nodes
            for use in node.uses
            if use.unit == unit and self.slots(self.time[node.id] + use.start, use.cycles)[slot]
        ]

    def streams(self) -> None:
        """A group issues one operation at a time."""
        for group in self.schedule.groups:
            held = np.zeros(self.interval, dtype=np.int64)
            for node in self._of(group.name):
                held += self.slots(self.time[node.id], node.issue)
            if held.max(initial=0) > 1:
                slot = int(held.argmax())
                who = [
                    n.id for n in self._of(group.name) if self.slots(self.time[n.id], n.issue)[slot]
                ]
                self.say("issue", f"{group.name} issues {who} at once in slot {slot}")

    def _of(self, group: str) -> list[Node]:
        return [node for node in self.graph.nodes if self.group[node.id] == group]

    def blocking_waits(self) -> None:
        """Nothing else executes in a group at the instant one of its operations waits."""
        for node in self.graph.nodes:
            if not any(self._waits(edge) for edge in self.graph.incoming[node.id]):
                continue
            slot = self.time[node.id] % self.interval
            for other in self._of(self.group[node.id]):
                if other.id == node.id:
                    continue
                short = other.asynchronous and self.rules.window == "issue"
                cycles = max(1, other.issue if short else other.latency)
                if self.slots(self.time[other.id], cycles)[slot]:
                    self.say("blocking wait", f"{node.id} waits under {other.id}")

    def _waits(self, edge: Edge) -> bool:
        return edge.blocking or (edge.kind in ("data", "order") and self.crosses(edge))

    def death(self, name: str) -> int:
        """When the value of iteration 0 dies, by the graph's readers and the lifetime rule."""
        end = self.time[name]
        source = self.graph.by_id[name]
        for edge in self.graph.outgoing[name]:
            if edge.kind == "order":
                continue
            reader = self.graph.by_id[edge.dst]
            last = self.time[edge.dst] + edge.distance * self.interval
            if self.rules.lifetime == "completion" and reader.in_place != name:
                if edge.kind == "ring":
                    last += max(1, reader.latency) + edge.spill_cost
                elif source.memory and reader.asynchronous and reader.uses:
                    last += max(use.start + use.cycles for use in reader.uses)
                elif source.memory or reader.asynchronous:
                    last += max(1, reader.latency)
            end = max(end, last)
        return end

    def rings(self) -> None:
        fillers = {edge.src for edge in self.graph.edges if edge.kind == "ring"}
        if fillers != set(self.schedule.ring_depth):
            odd = sorted(fillers ^ set(self.schedule.ring_depth))
            self.say("ring", f"rings of graph and schedule differ in {odd}")
        for name in sorted(fillers & set(self.schedule.ring_depth)):
            life = self.death(name) - self.time[name]
            depth = self.schedule.ring_depth[name]
            if life > depth * self.interval:
                self.say(
                    "ring",
                    f"{name} is filled again after {depth * self.interval} cycles, its slot is "
                    f"released after {life}",
                )

    def memories(self) -> dict[str, int]:
        """Rings for good, other values while they live, one buffer for each hand-off."""
        peaks: dict[str, int] = {}
        for memory, capacity in self.target.memories.items():
            held = np.zeros(self.interval, dtype=np.int64)
            for node in self.graph.nodes:
                size = node.memory.get(memory, 0)
                if size and node.id in self.schedule.ring_depth:
                    held += size * self.schedule.ring_depth[node.id]
                elif size:
                    held += size * self.slots(
                        self.time[node.id], self.death(node.id) - self.time[node.id]
                    )
                if memory == "smem" and self.rules.spill_memory and self._hands_over(node):
                    held += 4 * node.registers
            peaks[memory] = int(held.max(initial=0))
            if peaks[memory] > capacity:
                self.say("memory", f"{memory} peaks at {peaks[memory]} of {capacity}")
        return peaks

    def _hands_over(self, node: Node) -> bool:
        return node.registers > 0 and any(
            edge.kind == "data" and self.crosses(edge) for edge in self.graph.outgoing[node.id]
        )

    def registers(self) -> dict[str, int]:
        """Words a warp of each group holds at its peak; and the setmaxnreg counts."""
        peaks: dict[str, int] = {}
        for group in self.schedule.groups:
            held = np.zeros(self.interval, dtype=np.int64)
            for node in self._of(group.name):
                if not node.registers:
                    continue
                life = self.death(node.id) - self.time[node.id]
                words = -(-node.registers // node.min_warps)
                held += words * self.slots(self.time[node.id], life)
                if self.rules.unroll and life > self.rules.unroll * self.interval:
                    self.say("unroll", f"{node.id} lives {life} cycles in registers")
            peaks[group.name] = int(held.max(initial=0))
            threads = self.target.registers_per_thread - self.target.reserved_registers
            if peaks[group.name] > 32 * threads:
                self.say(
                    "registers",
                    f"a warp of {group.name} holds {peaks[group.name]} words of {32 * threads}",
                )
        if self.target.register_pool:
            self._register_pool(peaks)
        return peaks

    def _register_pool(self, peaks: dict[str, int]) -> None:
        """Launch reserves warp groups x 128 threads x one count, a multiple of 8 (at most 255)."""
        wide = [group for group in self.schedule.groups if group.warps >= 4]
        service = any(spec.warps < 4 for spec in self.target.groups)
        launched = len(wide) + service
        entry = min(
            self.target.registers_per_thread, self.target.register_pool // (128 * max(1, launched))
        )
        given = sum(group.registers for group in wide) + 24 * service
        if given > entry // 8 * 8 * launched:
            self.say(
                "setmaxnreg",
                f"groups ask for {given} registers a thread, {launched} warp groups were launched "
                f"with {entry // 8 * 8} each",
            )
        for group in wide:
            need = -(-peaks[group.name] // 32) + self.target.reserved_registers
            if group.registers % 8 or not 24 <= group.registers <= 255 or group.registers < need:
                self.say("setmaxnreg", f"{group.name} is given {group.registers}, needs {need}")

    def objectives(self, prices: Prices | None) -> None:
        """Recompute what the schedule claims to have optimised."""
        counted = {
            "length": self.schedule.length,
            "warps": sum(group.warps for group in self.schedule.groups if self._of(group.name)),
            "register time": sum(
                max(1, -(-n.registers // n.min_warps) // 16) * (self.death(n.id) - self.time[n.id])
                for n in self.graph.nodes
                if n.registers
            ),
        }
        held = {
            group.name: sum(
                max(1, n.issue) if n.asynchronous else max(1, n.latency)
                for n in self._of(group.name)
            )
            for group in self.schedule.groups
        }
        counted["busiest group"] = max(held.values())
        if prices is not None:
            counted["traffic"] = self._traffic(prices)
        for objective in self.schedule.objectives:
            name = objective.name
            if name in counted and counted[name] != objective.value:
                self.say("objective", f"{name} claims {objective.value}, counted {counted[name]}")
            if objective.bound > objective.value:
                self.say("objective", f"{name} has bound {objective.bound} over its value")

    def _traffic(self, prices: Prices) -> int:
        points = 0
        priced = [edge for edge in self.graph.edges if edge.kind != "alias"]
        for src, dst in {(edge.src, edge.dst) for edge in priced}:
            between = [e for e in priced if (e.src, e.dst) == (src, dst)]
            crosses = self.group[src] != self.group[dst]
            blocking = any(edge.blocking for edge in between)
            if blocking and prices.local_waits:
                points += prices.wait_per_warp * self.specs[self.group[dst]].warps
            if not crosses:
                continue
            if any(edge.kind == "data" for edge in between):
                points += self.graph.by_id[src].registers // prices.words_per_point
            points += prices.edge
            if blocking is not prices.local_waits:
                points += prices.wait_per_warp * self.graph.by_id[dst].min_warps
        for group in self.schedule.groups:
            if self._of(group.name):
                points += prices.warp * group.warps
        return points
