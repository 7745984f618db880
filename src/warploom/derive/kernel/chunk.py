"""The exchange lemma: a contraction of a running sum becomes a chunked causal contraction.

*requires* o = Σ_d q_td · cumsum_t(k_td v_te). *before*: the running sum holds d·e numbers for every
step. *after*: one box `scan_contract` that keeps a d·e state and works on chunks with two matrix
products. *keeps* the output (associativity of the sum). Linear attention's chunked form; without
it the tensor cores have nothing to multiply.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.derive.formula.graph import Diagram, Node


def exchange(diagram: Diagram) -> Diagram:
    """Apply the lemma wherever its pattern stands; the diagram unchanged when it stands nowhere."""
    nodes: list[Node] = []
    for node in diagram.nodes:
        found = _matched(diagram, node)
        nodes.append(found or node)
    rewritten = replace(diagram, nodes=tuple(nodes))
    return _without_dead(rewritten)


def _matched(diagram: Diagram, node: Node) -> Node | None:
    """The chunked box for a contraction over a running outer product, else None."""
    if node.kind != "contract" or len(node.inputs) != 2:
        return None
    scans = [i for i in node.inputs if i in diagram.node and diagram.node[i].op == "cumsum"]
    if len(scans) != 1:
        return None
    scan = diagram.node[scans[0]]
    query = next(i for i in node.inputs if i != scans[0])
    product = diagram.node.get(scan.inputs[0])
    if product is None or product.op not in ("mul", "contract") or len(product.inputs) != 2:
        return None
    if product.over or diagram.consumers[scan.name] != (node.name,):
        return None
    (time,) = scan.over
    summed = set(node.over)
    keys = [i for i in product.inputs if summed <= set(diagram.axes_of(i))]
    if len(keys) != 1 or time in summed or time not in diagram.axes_of(query):
        return None
    value = next(i for i in product.inputs if i != keys[0])
    if time not in diagram.axes_of(keys[0]) or time not in diagram.axes_of(value):
        return None
    if summed & set(diagram.axes_of(value)):
        return None
    return replace(
        node, op="scan_contract", inputs=(query, keys[0], value), attrs=(("time", time),)
    )


def _without_dead(diagram: Diagram) -> Diagram:
    """Drop boxes nothing reads."""
    needed = set(diagram.outputs)
    kept: list[Node] = []
    for node in reversed(diagram.nodes):
        if node.name in needed:
            needed |= set(node.inputs)
            kept.append(node)
    return replace(diagram, nodes=tuple(reversed(kept)))
