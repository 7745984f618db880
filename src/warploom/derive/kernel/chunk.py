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
    """The chunked box for a contraction over a scanned outer product, behind boxes that it needs,
    or the sum of such boxes for a sum of products; nothing where the lemma does not apply."""
    if node.kind != "contract" or len(node.inputs) != 2:
        return []
    scans = [i for i in node.inputs if i in diagram.node and diagram.node[i].kind == "scan"]
    if len(scans) != 1 or diagram.consumers[scans[0]] != (node.name,):
        return []
    scan = diagram.node[scans[0]]
    query = next(i for i in node.inputs if i != scan.name)
    (time,) = scan.over
    if time in node.over or time not in diagram.axes_of(query):
        return []
    terms = _terms(diagram, scan.inputs[-1])
    if len(terms) == 1:
        return _chunked(diagram, node, query, scan, *terms[0])
    made: list[Node] = []
    sums: list[str] = []
    for number, term in enumerate(terms):
        part = replace(node, name=f"{node.name} {number}")
        boxes = _chunked(diagram, part, query, scan, *term)
        if not boxes:
            return []
        made += boxes
        sums.append(part.name)
        if number:
            last = number == len(terms) - 1
            total = node.name if last else f"{node.name} 0..{number}"
            made.append(Node(total, "add", (sums[-2], sums[-1]), node.axes))
            sums.append(total)
    return made


def _terms(diagram: Diagram, name: str, sign: int = 1) -> list[tuple[str, int]]:
    """The terms of a sum with their signs, from left to right."""
    node = diagram.node.get(name)
    if node is None or node.op not in ("add", "sub", "neg"):
        return [(name, sign)]
    last = sign if node.op == "add" else -sign
    first = _terms(diagram, node.inputs[0], sign) if len(node.inputs) == 2 else []
    return first + _terms(diagram, node.inputs[-1], last)


def _chunked(
    diagram: Diagram, node: Node, query: str, scan: Node, drive: str, sign: int
) -> list[Node]:
    """The chunked box of one product that a scan adds or takes away, behind boxes it needs."""
    (time,) = scan.over
    summed, gate = set(node.over), scan.inputs[:-1]
    factors = {name: set(diagram.axes_of(name)) for name in _factors(diagram, drive)}
    gates = {axis for name in gate for axis in diagram.axes_of(name)}
    own = set(scan.axes) - summed - set(diagram.axes_of(query))
    # Heads may be axes of gates and values alone; columns of the state are of values alone.
    widest = max((axes & own for axes in factors.values()), key=len)
    columns = own - gates - {a for axes in factors.values() if axes & own < widest for a in axes}
    if any(axes & summed and axes & columns for axes in factors.values()):
        return []
    keys = [name for name, axes in factors.items() if axes & summed]
    values = [name for name, axes in factors.items() if axes & columns]
    weights = [name for name in _factors(diagram, drive) if name not in {*keys, *values}]
    if not keys or not values:
        return []
    made: list[Node] = []
    if sign < 0:
        made.append(Node(f"{node.name} -1", "const", (), (), (), (("value", -1.0),)))
        weights.append(made[0].name)
    if gates & summed:
        if not all(has_logarithm(diagram, name) for name in gate):
            return []
        keys, weights = keys + weights, []
    key, value = (_multiplied(diagram, names, node.name, made) for names in (keys, values))
    axes = {one.name: set(one.axes) for one in (*diagram.nodes, *diagram.inputs, *made)}
    kept = axes[key] | axes[value]
    if time not in axes[key] & axes[value] or not gates.union(*(axes[w] for w in weights)) <= kept:
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
    known = {one.name: one.axes for one in (*diagram.nodes, *diagram.inputs, *made)}
    result, axes = names[0], known[names[0]]
    for name in names[1:]:
        axes = tuple(dict.fromkeys((*axes, *known[name])))
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
