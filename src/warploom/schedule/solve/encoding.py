"""The constraint model, part 1: times, dependences, units. Raw cycles, no time-indexed variables.

An issue time splits into stage and phase, t = stage * II + phase with 0 <= phase < II. Everything
that repeats every II cycles is stated on phases: a reservation is laid down twice, at phase and
at phase + II, and no-overlap over both copies is exact modulo II, because a reservation is never
longer than II. What may last longer (a value in memory, a reservation on a unit of several
instances) is laid down once more for each interval that it lasts. The model is invariant under a
common shift, so the phase of one anchor operation is 0. II is a number or, to prove a bound over
many, a variable.

Sources: the constraints are the paper's (Soi et al., arXiv 2512.18134); the form is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.graph import Graph, Node
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.target import Target
from warploom.schedule.solve.solver import (
    BoolVar,
    CpModel,
    IntervalVar,
    IntVar,
    Linear,
    new_model,
    only_if,
)
from warploom.schedule.solve.subtiles import chains

FAMILIES = ("registers", "waits", "handoffs", "memory", "issue", "carried")


@dataclass
class Encoding:
    """A model under construction and the variables by which its answer is read.

    `shortest` and `longest` are the ends of the interval's range. `without` names families of
    constraints left out, for explaining an infeasible interval.
    """

    graph: Graph
    target: Target
    rules: Rules
    stages: int
    interval: int | IntVar
    shortest: int
    longest: int
    model: CpModel
    without: frozenset[str]
    anchor: str = ""
    time: dict[str, IntVar] = field(default_factory=dict[str, IntVar])
    phase: dict[str, Linear] = field(default_factory=dict[str, Linear])
    again: dict[str, Linear] = field(default_factory=dict[str, Linear])
    member: dict[tuple[str, int], BoolVar] = field(default_factory=dict[tuple[str, int], BoolVar])
    same: dict[tuple[str, str], BoolVar] = field(default_factory=dict[tuple[str, str], BoolVar])
    before: dict[tuple[str, str], BoolVar] = field(default_factory=dict[tuple[str, str], BoolVar])
    used: list[BoolVar] = field(default_factory=list[BoolVar])
    depth: dict[str, IntVar] = field(default_factory=dict[str, IntVar])
    life: dict[str, IntVar] = field(default_factory=dict[str, IntVar])
    length: IntVar | None = None

    @property
    def horizon(self) -> int:
        """No operation ends later: the allowed stages and one more for the free anchor phase."""
        return (self.stages + 1) * self.longest

    def phase_before(self, first: str, second: str) -> BoolVar:
        """The literal phase[first] <= phase[second]; equal phases count in graph order.

        One literal serves both directions of a pair, so whatever a wait or a lifetime learns
        about an order, the others know.
        """
        if self.rank[first] > self.rank[second]:
            return self.phase_before(second, first).negated()
        key = (first, second)
        if key not in self.before:
            literal = self.model.new_bool_var(f"{first} before {second}")
            self.before[key] = literal
            only_if(self.model.add(self.phase[first] <= self.phase[second]), literal)
            only_if(self.model.add(self.phase[first] >= self.phase[second] + 1), literal.negated())
        return self.before[key]

    @cached_property
    def rank(self) -> dict[str, int]:
        """Position of each node in the graph."""
        return {node.id: position for position, node in enumerate(self.graph.nodes)}

    def copy(self, name: str, k: int) -> Linear:
        """phase[name] + k * II as an affine expression, which interval constraints ask for."""
        if k == 0 or isinstance(self.interval, int):
            return self.phase[name] + k * self.interval
        if k == 1 and name in self.again:
            return self.again[name]
        # Phases end below II, so the domain must reach (k + 1) * II: a smaller one would cut off
        # intervals, which a solver that minimises over them would report as refuted.
        later = self.model.new_int_var(0, (k + 1) * self.longest, f"{name}+{k}")
        self.model.add(later == self.phase[name] + k * self.interval)
        return later


def encode_times(
    graph: Graph,
    target: Target,
    rules: Rules,
    stages: int,
    interval: int | tuple[int, int],
    without: frozenset[str] = frozenset(),
    *,
    symmetric: bool = True,
) -> Encoding:
    """Times, dependences, units and length: modulo scheduling without warp groups.

    `interval` is a number or a range to be minimised over; `stages` bounds the length,
    length <= stages * II. `symmetric` allows interchangeable sub-tiles to be ordered.
    """
    model = new_model()
    low, high = interval if isinstance(interval, tuple) else (interval, interval)
    cycles = interval if isinstance(interval, int) else model.new_int_var(low, high, "interval")
    it = Encoding(graph, target, rules, stages, cycles, low, high, model, without)
    anchor, grain = _anchor(graph, target, low if low == high else None)
    it.anchor = anchor
    for node in graph.nodes:
        _add_time(it, node, fixed=node.id == anchor, grain=grain.get(node.id, 1))
    for edge in graph.edges:
        model.add(it.time[edge.dst] + edge.distance * it.interval >= it.time[edge.src] + edge.delay)
    _add_length(it)
    _add_units(it)
    for ordered in chains(graph) if symmetric else ():
        for first, second in pairwise(ordered):
            model.add(it.time[first] <= it.time[second])
    return it


def _anchor(graph: Graph, target: Target, interval: int | None) -> tuple[str, dict[str, int]]:
    """The operation whose phase is 0, and the grain of the phases of those on its unit.

    A unit that is 100 % busy is tiled without gaps, so the phases of its users differ by sums of
    their durations: multiples of their common divisor.
    """
    bounds = lower_bounds(graph, target)
    users = [(n, use) for n in graph.nodes for use in n.uses if use.unit == bounds.unit]
    if not users:
        return graph.nodes[0].id, {}
    anchor = max(users, key=lambda user: user[1].cycles)[0].id
    simple = all(use.start == 0 for _, use in users) and len({n.id for n, _ in users}) == len(users)
    unit = target.unit(bounds.unit)
    if interval != bounds.load[bounds.unit] or unit.capacity > 1 or unit.rate or not simple:
        return anchor, {}
    grain = math.gcd(*(use.cycles for _, use in users))
    return anchor, {node.id: grain for node, use in users if use.cycles}


def _add_time(it: Encoding, node: Node, *, fixed: bool, grain: int) -> None:
    model, name = it.model, node.id
    it.time[name] = model.new_int_var(0, it.horizon, f"t[{name}]")
    stage = model.new_int_var(0, it.stages, f"stage[{name}]")
    if fixed:
        phase: Linear = model.new_int_var(0, 0, f"phase[{name}]")
    elif grain > 1:
        phase = grain * model.new_int_var(0, (it.longest - 1) // grain, f"phase[{name}]")
    else:
        phase = model.new_int_var(0, it.longest - 1, f"phase[{name}]")
    it.phase[name] = phase
    it.again[name] = it.copy(name, 1)
    if isinstance(it.interval, int):
        model.add(it.time[name] == it.interval * stage + phase)
        return
    model.add(phase <= it.interval - 1)
    choices = [model.new_bool_var(f"stage[{name}]={k}") for k in range(it.stages + 1)]
    model.add_exactly_one(choices)
    for k, chosen in enumerate(choices):
        only_if(model.add(it.time[name] == k * it.interval + phase), chosen)
        only_if(model.add(stage == k), chosen)


def _add_length(it: Encoding) -> None:
    """length = latest end - earliest issue <= stages * II."""
    model = it.model
    first = model.new_int_var(0, it.horizon, "first")
    last = model.new_int_var(0, it.horizon + max(node.span for node in it.graph.nodes), "last")
    it.length = model.new_int_var(0, it.stages * it.longest, "length")
    model.add(it.length == last - first)
    model.add(it.length <= it.stages * it.interval)
    for node in it.graph.nodes:
        model.add(first <= it.time[node.id])
        model.add(last >= it.time[node.id] + node.span)


def _add_units(it: Encoding) -> None:
    """CAPACITY: reservations of one unit do not overlap modulo II; rate units only add up."""
    model = it.model
    for unit in it.target.units:
        uses = [
            (node.id, use)
            for node in it.graph.nodes
            for use in node.uses
            if use.unit == unit.name and use.cycles
        ]
        if unit.rate or not uses:
            # The sum over one interval is the same for every schedule: a bound, not a choice.
            model.add(
                sum(use.cycles * use.amount for _, use in uses) <= it.interval * unit.capacity
            )
            continue
        copies: list[IntervalVar] = []
        demands: list[int] = []
        for name, use in uses:
            key = _offset(it, name, use.start)
            at_once = unit.capacity // use.amount
            model.add(it.interval * at_once >= use.cycles)
            # On a unit of several instances a reservation may be longer than the interval.
            for k in range(1 + min(at_once, -(-use.cycles // it.shortest))):
                label = f"{unit.name}[{name}+{use.start}]+{k}"
                copies.append(model.new_fixed_size_interval_var(it.copy(key, k), use.cycles, label))
                demands.append(use.amount)
        if unit.capacity == 1:
            model.add_no_overlap(copies)
        else:
            model.add_cumulative(copies, demands, unit.capacity)


def _offset(it: Encoding, name: str, start: int) -> str:
    """The key of the phase `start` cycles after the operation's own."""
    if start == 0:
        return name
    key = f"{name}+{start}"
    if key not in it.phase:
        wraps = start // (it.longest if isinstance(it.interval, int) else 1) + 1
        phase = it.model.new_int_var(0, it.longest - 1, f"phase[{key}]")
        turns = it.model.new_int_var(0, wraps, f"turns[{key}]")
        if isinstance(it.interval, int):
            it.model.add(phase + it.interval * turns == it.phase[name] + start)
        else:
            # Rare: a late reservation while the interval itself is being minimised.
            product = it.model.new_int_var(0, it.longest * wraps, f"wrap[{key}]")
            it.model.add_multiplication_equality(product, [it.interval, turns])
            it.model.add(phase + product == it.phase[name] + start)
            it.model.add(phase <= it.interval - 1)
        it.phase[key] = phase
        it.again[key] = it.copy(key, 1)
    return key


def times_of(it: Encoding, value: Mapping[str, int]) -> dict[str, int]:
    """Issue times shifted so that the earliest is 0 (a common shift keeps every constraint)."""
    first = min(value[name] for name in it.time)
    return {name: value[name] - first for name in it.time}
