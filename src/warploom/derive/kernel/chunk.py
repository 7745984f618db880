"""The exchange lemma: a contraction of a scanned state becomes a chunked causal contraction.

*requires* o = Σ_d q_td S_tde with S_t = g_t S_{t-1} + k_td v_te w_t, where g (nothing, a number, or
one a row, a channel d or both) does not depend on e. *before*: the state holds d·e numbers for
every step. *after*: one box `scan_contract` that keeps a d·e state and works on chunks with matrix
products: the pair (decay, state) of a chunk composes as that of a step does, and rows of one chunk
see each other through a product of gates. *keeps* the output. This is the chunked form of linear
attention, retention, state-space models and gated linear attention; without it the tensor cores
have nothing to multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from warploom.derive.formula.graph import Diagram, Node


def exchange(diagram: Diagram) -> Diagram:
    """Apply the lemma wherever its pattern stands; the diagram unchanged when it stands nowhere."""
    nodes: list[Node] = []
    for node in diagram.nodes:
        nodes += _matched(diagram, node) or [node]
    rewritten = replace(diagram, nodes=tuple(nodes))
    return _without_dead(rewritten)


def _matched(diagram: Diagram, node: Node) -> list[Node]:
    """The chunked box for a contraction over a scanned outer product, behind boxes that it needs;
    nothing where the lemma does not apply."""
    if node.kind != "contract" or len(node.inputs) != 2:
        return []
    scans = [i for i in node.inputs if i in diagram.node and diagram.node[i].kind == "scan"]
    if len(scans) != 1:
        return []
    scan = diagram.node[scans[0]]
    query = next(i for i in node.inputs if i != scans[0])
    if diagram.consumers[scan.name] != (node.name,):
        return []
    (time,) = scan.over
    summed, gate = set(node.over), scan.inputs[:-1]
    if time in summed or time not in diagram.axes_of(query):
        return []
    keys: list[str] = []
    values: list[str] = []
    weights: list[str] = []
    shared = set(diagram.axes_of(query)) - summed
    own = set(scan.axes) - summed - shared
    for factor in _factors(diagram, scan.inputs[-1]):
        axes = set(diagram.axes_of(factor))
        if axes & summed and axes & own:
            return []
        (keys if axes & summed else values if axes & own else weights).append(factor)
    if not keys or not values or any(set(diagram.axes_of(name)) & own for name in gate):
        return []
    if any(set(diagram.axes_of(name)) & summed for name in gate):
        if not all(has_logarithm(diagram, name) for name in gate):
            return []
        keys, weights = keys + weights, []
    made: list[Node] = []
    key, value = (_multiplied(diagram, names, node.name, made) for names in (keys, values))
    axes = {name: diagram.axes_of(name) for name in (*keys, *values)}
    axes |= {one.name: one.axes for one in made}
    if any(time not in axes[name] for name in (key, value)):
        return []
    attrs = (("time", time), ("gated", len(gate)))
    inputs = (query, key, value, *gate, *weights)
    return [*made, replace(node, op="scan_contract", inputs=inputs, attrs=attrs)]


def has_logarithm(diagram: Diagram, gate: str) -> bool:
    """Whether a gate is above 0 by its formula: an exponential, a logistic function, one less
    that, or a product of such."""
    node = diagram.node.get(gate)
    return (node is not None and node.op == "exp") or _logistic(diagram, gate, has_logarithm)


def at_most_one(diagram: Diagram, gate: str) -> bool:
    """Whether it is not above 1 either, by its formula."""
    return _logistic(diagram, gate, at_most_one)


def _logistic(diagram: Diagram, gate: str, factor: Callable[[Diagram, str], bool]) -> bool:
    """A logistic function, one less that, or a product of what `factor` holds of."""
    node = diagram.node.get(gate)
    if node is not None and node.op == "mul":
        return all(factor(diagram, name) for name in node.inputs)
    inner = diagram.node.get(rest_of_one(diagram, node)) if node is not None else None
    return "sigmoid" in {one.op for one in (node, inner) if one is not None}


def rest_of_one(diagram: Diagram, node: Node) -> str:
    """x where a box is 1 - x, else ""."""

    def number(name: str, value: float) -> bool:
        return name in diagram.node and diagram.node[name].attr("value") == value

    if node.op == "sub" and number(node.inputs[0], 1.0):
        return node.inputs[1]
    if node.op == "add" and number(node.inputs[0], 1.0):
        other = diagram.node.get(node.inputs[1])
        if other is not None and other.op == "mul" and number(other.inputs[1], -1.0):
            return other.inputs[0]
    return ""


def of_channels(diagram: Diagram, node: Node) -> bool:
    """Whether a chunked contraction has a gate of its own for every channel of the keys."""
    return bool(node.attr("gated")) and bool({*node.over} & {*diagram.axes_of(node.inputs[3])})


def _factors(diagram: Diagram, name: str) -> list[str]:
    """The factors of a product, from left to right."""
    node = diagram.node.get(name)
    if node is None or node.over or node.op not in ("mul", "contract"):
        return [name]
    return [factor for source in node.inputs for factor in _factors(diagram, source)]


def _multiplied(diagram: Diagram, names: Sequence[str], near: str, made: list[Node]) -> str:
    """One value that is the product of several, made by further boxes."""
    result, axes = names[0], diagram.axes_of(names[0])
    for name in names[1:]:
        axes = tuple(dict.fromkeys((*axes, *diagram.axes_of(name))))
        made.append(Node(f"{near} {result}·{name}", "mul", (result, name), axes))
        result = made[-1].name
    return result


def _without_dead(diagram: Diagram) -> Diagram:
    """Drop boxes nothing reads."""
    needed = set(diagram.outputs)
    kept: list[Node] = []
    for node in reversed(diagram.nodes):
        if node.name in needed:
            needed |= set(node.inputs)
            kept.append(node)
    return replace(diagram, nodes=tuple(reversed(kept)))
