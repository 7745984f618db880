"""The constraint model, part 2: warp groups, hand-offs, blocking waits, registers.

One Boolean per operation and group on offer; whether two operations share a group is a literal
channelled to those. Names in capitals are the paper's (arXiv 2512.18134).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from warploom.schedule.model.graph import Edge, Graph, Node
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.target import REGISTER_FLOOR, REGISTER_STEP, WARP, WARP_GROUP
from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.encoding_exclusive import add_exclusive
from warploom.schedule.solve.encoding_lives import add_lifetimes, least_life, most_intervals
from warploom.schedule.solve.solver import BoolVar, Linear, only_if


def add_groups(it: Encoding, pins: Mapping[str, str]) -> None:
    """Everything that depends on which warp group runs what; `pins` fixes some."""
    _add_membership(it, interchangeable=not pins)
    for w, group in enumerate(it.target.groups):
        for node in it.graph.nodes:
            if pins.get(node.id) == group.name:
                it.model.add(it.member[node.id, w] == 1)
    if "handoffs" not in it.without:
        _add_handoffs(it)
    if "carried" not in it.without and it.rules.carried_in_group:
        for edge in it.graph.edges:
            if carries_registers(it.graph, edge) and edge.distance:
                it.model.add(same_group(it, edge.src, edge.dst) == 1)
    if "issue" not in it.without:
        _add_issue(it)
    if "waits" not in it.without:
        _add_waits(it)
    add_lifetimes(it)
    if "registers" not in it.without:
        _add_registers(it)
        add_exclusive(it, pins)


def carries_registers(graph: Graph, edge: Edge) -> bool:
    """Whether the edge hands over a value that lives in registers."""
    return edge.kind == "data" and graph.by_id[edge.src].registers > 0


def needs_wait_across(edge: Edge) -> bool:
    """Whether an edge makes its consumer wait at a barrier only once it crosses groups."""
    return edge.kind in ("data", "order") and not edge.blocking and edge.src != edge.dst


def window(rules: Rules, node: Node) -> int:
    """Cycles after its issue in which the node keeps its group from a blocking wait."""
    if rules.window == "literal" or not node.asynchronous:
        return node.span
    return max(1, node.issue)


def _add_membership(it: Encoding, *, interchangeable: bool) -> None:
    """WARP-UNIQ and VAR-LAT; equal groups are filled in the order of first use."""
    graph, target, model = it.graph, it.target, it.model
    for node in graph.nodes:
        fitting = [w for w, group in enumerate(target.groups) if target.fits(graph, node.id, group)]
        for w in range(len(target.groups)):
            fixed = None if w in fitting and len(fitting) > 1 else int(w in fitting)
            name = f"group[{node.id}]={target.groups[w].name}"
            literal = model.new_bool_var(name)
            if fixed is not None:
                model.add(literal == fixed)
            it.member[node.id, w] = literal
        model.add_exactly_one(it.member[node.id, w] for w in fitting)
    for w, group in enumerate(target.groups):
        used = model.new_bool_var(f"used[{group.name}]")
        model.add_max_equality(used, [it.member[node.id, w] for node in graph.nodes])
        it.used.append(used)
    if not interchangeable:
        return
    kinds = {(group.warps, group.loads) for group in target.groups}
    for kind in kinds:
        alike = [w for w, g in enumerate(target.groups) if (g.warps, g.loads) == kind]
        for before, after in pairwise(alike):
            for position, node in enumerate(graph.nodes):
                earlier = [it.member[other.id, before] for other in graph.nodes[:position]]
                model.add_bool_or([it.member[node.id, after].negated(), *earlier])


def same_group(it: Encoding, first: str, second: str) -> BoolVar:
    """The literal "both operations are in one group"."""
    key = (min(first, second), max(first, second))
    if key in it.same:
        return it.same[key]
    literal = it.model.new_bool_var(f"same[{key[0]},{key[1]}]")
    it.same[key] = literal
    for w in range(len(it.target.groups)):
        a, b = it.member[key[0], w], it.member[key[1], w]
        only_if(it.model.add_implication(a, b), literal)
        only_if(it.model.add_implication(b, a), literal)
        it.model.add_bool_or([a.negated(), b.negated(), literal])
    return literal


def _add_handoffs(it: Encoding) -> None:
    """SPILL: an edge between groups takes spill_cost longer."""
    for edge in it.graph.edges:
        if not edge.spill_cost or edge.src == edge.dst:
            continue
        only_if(
            it.model.add(
                it.time[edge.dst] + edge.distance * it.interval
                >= it.time[edge.src] + edge.delay + edge.spill_cost
            ),
            same_group(it, edge.src, edge.dst).negated(),
        )


def _add_issue(it: Encoding) -> None:
    """A group's instruction stream is one unit of its own: issue times do not overlap in it."""
    issuing = [node for node in it.graph.nodes if node.issue]
    for w, group in enumerate(it.target.groups):
        copies = [
            it.model.new_optional_fixed_size_interval_var(
                start, node.issue, it.member[node.id, w], f"{group.name}[{node.id}]"
            )
            for node in issuing
            for start in (it.phase[node.id], it.again[node.id])
        ]
        if copies:
            it.model.add_no_overlap(copies)


def _add_waits(it: Encoding) -> None:
    """CONCUR: when an operation waits at a barrier, nothing else executes in its group.

    Modulo II: (t_wait - t_other) mod II >= window(other), for every other operation of the group.
    """
    for node in it.graph.nodes:
        incoming = it.graph.incoming[node.id]
        if any(edge.blocking for edge in incoming):
            _add_wait(it, node, None)
            continue
        crossing = [edge for edge in incoming if needs_wait_across(edge)]
        if not crossing:
            continue
        waits = it.model.new_bool_var(f"waits[{node.id}]")
        same = [same_group(it, edge.src, edge.dst) for edge in crossing]
        it.model.add_max_equality(waits, [1 - literal for literal in same])
        _add_wait(it, node, waits)


def _add_wait(it: Encoding, node: Node, waits: BoolVar | None) -> None:
    model = it.model
    for other in it.graph.nodes:
        if other.id == node.id or not _may_share(it, node.id, other.id):
            continue
        held = window(it.rules, other)
        here = [same_group(it, node.id, other.id)] + ([waits] if waits is not None else [])
        earlier = it.phase_before(other.id, node.id)
        mine, theirs = it.phase[node.id], it.phase[other.id]
        only_if(model.add(mine >= theirs + held), *here, earlier)
        only_if(model.add(mine + 1 <= theirs), *here, earlier.negated())
        only_if(model.add(mine + it.interval >= theirs + held), *here, earlier.negated())


def _may_share(it: Encoding, first: str, second: str) -> bool:
    fits = it.target.fits
    return any(
        fits(it.graph, first, group) and fits(it.graph, second, group) for group in it.target.groups
    )


def _add_registers(it: Encoding) -> None:
    """REGLIMIT per group, and the setmaxnreg budget over all groups.

    A peak is reached when a value is born, so the limit is stated at every birth: the values
    alive at that phase in the same group, and the new one, fit.
    """
    model, target = it.model, it.target
    values = [node for node in it.graph.nodes if node.registers]
    limit = target.words_per_warp
    peak: list[Linear] = [
        model.new_int_var(0, limit, f"words[{group.name}]") for group in target.groups
    ]
    for node in values:
        most = it.rules.unroll or max(1, limit // node.words_per_warp)
        model.add(it.life[node.id] <= min(most, most_intervals(it, node)) * it.interval)
    for born in values:
        alive: list[Linear] = []
        for other in values:
            if _may_share(it, born.id, other.id):
                alive += _alive_at(it, other, born)
        held = sum(alive)
        for w, group in enumerate(target.groups):
            if target.fits(it.graph, born.id, group):
                only_if(model.add(held <= peak[w]), it.member[born.id, w])
    if target.register_pool:
        _add_register_pool(it, peak)


def _alive_at(it: Encoding, value: Node, born: Node) -> list[Linear]:
    """Words that copies of `value` hold in the group of `born` at its birth.

    Copy k is alive iff (phase[born] - phase[value]) mod II + k * II < life[value]. The one just
    born is, unless nothing reads it.
    """
    model = it.model
    most = it.rules.unroll or max(1, it.target.words_per_warp // value.words_per_warp)
    words: list[Linear] = []
    for k in range(min(most, most_intervals(it, value))):
        if value.id == born.id and k == 0 and least_life(it, born) > 0:
            words.append(born.words_per_warp)
            continue
        alive = model.new_bool_var(f"{value.id}+{k} alive at {born.id}")
        age = it.phase[born.id] - it.phase[value.id] + k * it.interval
        if value.id == born.id:
            only_if(model.add(age >= it.life[value.id]), alive.negated())
        else:
            here = same_group(it, value.id, born.id)
            earlier = it.phase_before(value.id, born.id)
            dead = [here, alive.negated()]
            only_if(model.add(age >= it.life[value.id]), *dead, earlier)
            only_if(model.add(age + it.interval >= it.life[value.id]), *dead, earlier.negated())
        words.append(value.words_per_warp * alive)
    return words


def _add_register_pool(it: Encoding, peaks: list[Linear]) -> None:
    """setmaxnreg: per-thread counts in steps of 8 whose sum the launch reservation covers."""
    model, target = it.model, it.target
    wide = [w for w, group in enumerate(target.groups) if group.warps >= WARP_GROUP]
    service = any(group.warps < WARP_GROUP for group in target.groups)
    counts: list[Linear] = []
    for w in wide:
        steps = model.new_int_var(0, target.registers_per_thread // REGISTER_STEP, f"setmaxnreg{w}")
        only_if(
            model.add(WARP * (REGISTER_STEP * steps - target.reserved_registers) >= peaks[w]),
            it.used[w],
        )
        only_if(model.add(REGISTER_STEP * steps >= REGISTER_FLOOR), it.used[w])
        counts.append(REGISTER_STEP * steps)
    launched = model.new_int_var(0, len(wide), "warp groups")
    model.add(launched == sum(it.used[w] for w in wide))
    budgets = [target.register_budget(k + service) for k in range(len(wide) + 1)]
    budget = model.new_int_var(0, max(budgets), "register budget")
    model.add_element(launched, budgets, budget)
    model.add(sum(counts) + (REGISTER_FLOOR if service else 0) <= budget)
