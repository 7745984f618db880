"""What a bound may assume of a contraction: its frame, its operands, where its result goes."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.diagram.graph import Diagram, Node


def frames(
    diagram: Diagram, node: Node
) -> tuple[frozenset[str], frozenset[str], frozenset[str]] | None:
    """(axes of the first operand only, of the second only, of both) of a two-operand product."""
    if len(node.inputs) != 2:
        return None
    a, b = (frozenset(diagram.axes_of(name)) - set(node.over) for name in node.inputs)
    summed = set(node.over)
    full = all(summed <= set(diagram.axes_of(name)) for name in node.inputs)
    if not full or not a - b or not b - a:
        return None
    return a - b, b - a, a & b


POLYNOMIAL = frozenset({"add", "sub", "mul", "neg", "square"})
"""Maps through which a sum of products reassociates."""


def is_opaque(diagram: Diagram, node: Node) -> bool:
    """Whether every path from a product to a sum over its columns passes a function that is no
    polynomial, so that the product's elements have to exist. A maximum counts: it is one. A
    mask and a division of the product are linear in it."""
    stack, seen = [node.name], set[str]()
    while stack:
        name = stack.pop()
        for user in diagram.consumers[name]:
            box = diagram.node[user]
            linear = box.op in POLYNOMIAL or box.kind == "mask"
            linear = linear or (box.op == "div" and box.inputs[0] == name)
            if linear and set(node.axes) <= set(box.axes):
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
            elif box.kind == "contract" or box.op in ("sum", "mean"):
                return False
    return True


def is_image(diagram: Diagram, value: str, axes: Sequence[str]) -> bool:
    """Whether distinct elements of a value come from distinct elements of one external array:
    it is that array, or maps of it with arrays of no more axes."""
    if value in diagram.array:
        return set(diagram.axes_of(value)) == set(axes)
    node = diagram.node[value]
    if node.kind != "map":
        return False
    return any(is_image(diagram, source, axes) for source in node.inputs)


def is_external(diagram: Diagram, node: Node) -> bool:
    """Whether each element of a contraction is needed, through maps, for its own output element."""
    if node.name in diagram.outputs:
        return True
    for user in diagram.consumers[node.name]:
        box = diagram.node[user]
        if box.kind == "map" and set(box.axes) == set(node.axes) and is_external(diagram, box):
            return True
    return False
