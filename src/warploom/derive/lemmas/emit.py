"""From a scalar formula back to boxes: the inverse of `cascade.scalar_form`.

Boxes that already exist are reused (same operator, same inputs), so that a rewritten reduction
shares its exponential with the sum beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.formula.ops import OPS
from warploom.errors import InputError


class Emitter:
    """Adds boxes to a diagram; `values` maps symbol names to boxes or arrays."""

    def __init__(self, body: Diagram, values: Mapping[str, str]) -> None:
        self.body = body
        self.values = dict(values)
        self.axes = {array.name: array.axes for array in body.inputs}
        self.axes |= {node.name: node.axes for node in body.nodes}
        self.nodes = {node.name: node for node in body.nodes}
        self.known = {_key(node): node.name for node in body.nodes if node.kind in ("map", "const")}

    def expression(self, expression: Any) -> str:
        """The box that computes a sympy expression; raises `InputError` for an unknown function."""
        sp = sympy()
        if expression.is_Symbol:
            return self.values[str(expression)]
        if expression.is_number:
            return self.const(float(expression))
        if expression.is_Add:
            return self._sum(expression)
        if expression.is_Mul:
            return self._product(expression)
        if expression.is_Pow and expression.base is not sp.E:
            return self._power(expression)
        name = str(expression.func)
        if name not in OPS:
            raise InputError(f"no box computes {name}(...) in {expression}; add it to ops.MAPS")
        return self.map(name, *(self.expression(part) for part in expression.args))

    def map(self, name: str, *inputs: str) -> str:
        """A map box over the union of its inputs' axes, reused when it exists."""
        widest = max(inputs, key=lambda value: len(self.axes[value]))
        order = (*self.axes[widest], *(a for value in inputs for a in self.axes[value]))
        return self.add(Node("", name, inputs, tuple(dict.fromkeys(order))), name)

    def const(self, value: float) -> str:
        """A number."""
        return self.add(Node("", "const", (), (), (), (("value", value),)), f"{value:g}")

    def product(self, factors: Iterable[Any], node: Node, label: str) -> str:
        """Σ over the node's axes of a product, as one contraction (or reduction) box."""
        operands = [self.expression(factor) for factor in factors]
        carried = {axis for operand in operands for axis in self.axes[operand]}
        kept = tuple(axis for axis in node.axes if axis in carried)
        node = replace(node, axes=kept, over=tuple(a for a in node.over if a in carried))
        if node.kind == "reduce":
            value = operands[0]
            for operand in operands[1:]:
                value = self.map("mul", value, operand)
            return self.add(replace(node, name="", inputs=(value,)), label)
        inputs = self._gather(operands, node.axes[0] if node.axes else "")
        if len(inputs) == 1:
            return self.add(Node("", "sum", inputs, node.axes, node.over), label)
        return self.add(replace(node, name="", inputs=inputs), label)

    def add(self, node: Node, label: str) -> str:
        """Append a box under a fresh name, or find its equal."""
        key = _key(node)
        if key in self.known:
            return self.known[key]
        name, count = label, 2
        while name in self.axes:
            name, count = f"{label}{count}", count + 1
        self.nodes[name] = replace(node, name=name)
        self.axes[name] = node.axes
        self.known[key] = name
        return name

    def rename(self, value: str, name: str, axes: tuple[str, ...]) -> None:
        """Give a box another name and axis order, replacing what had the name."""
        self.nodes[name] = replace(self.nodes.pop(value), name=name, axes=axes)

    def finish(self) -> Diagram:
        """The diagram with dead boxes dropped and the topological order restored."""
        order: dict[str, Node] = {}
        for output in self.body.outputs:
            _visit(output, self.nodes, order)
        return replace(self.body, nodes=tuple(order.values()))

    def _gather(self, operands: Sequence[str], row: str) -> tuple[str, ...]:
        """Multiply an operand into one that has all its axes, so a contraction has two inputs.

        Of equal hosts the one with the result's first axis is taken: a tensor core can have a
        computed first operand in registers, never a computed second one.
        """
        kept: list[str] = []
        for operand in sorted(operands, key=lambda value: -len(self.axes[value])):
            hosts = [k for k in kept if set(self.axes[operand]) <= set(self.axes[k])]
            if not hosts:
                kept.append(operand)
                continue
            host = min(
                hosts, key=lambda value: (len(self.axes[value]), row not in self.axes[value])
            )
            kept[kept.index(host)] = self.map("mul", host, operand)
        return tuple(sorted(kept, key=operands.index) if set(kept) <= set(operands) else kept)

    def _sum(self, expression: Any) -> str:
        """Positive parts added, negative parts subtracted."""
        plus = [part for part in expression.args if not part.could_extract_minus_sign()]
        minus = [-part for part in expression.args if part.could_extract_minus_sign()]
        if not plus:
            return self.map("neg", self.expression(-expression))
        value = self.expression(plus[0])
        for part in plus[1:]:
            value = self.map("add", value, self.expression(part))
        for part in minus:
            value = self.map("sub", value, self.expression(part))
        return value

    def _product(self, expression: Any) -> str:
        """Factors multiplied, factors with exponent -1 divided."""
        if expression.could_extract_minus_sign():
            return self.map("neg", self.expression(-expression))
        above = [f for f in expression.args if not (f.is_Pow and f.exp == -1)]
        below = [1 / f for f in expression.args if f.is_Pow and f.exp == -1]
        value = self.expression(above[0]) if above else self.const(1.0)
        for factor in above[1:]:
            value = self.map("mul", value, self.expression(factor))
        for factor in below:
            value = self.map("div", value, self.expression(factor))
        return value

    def _power(self, expression: Any) -> str:
        """Roots and small integer powers."""
        sp = sympy()
        named = {sp.Rational(1, 2): "sqrt", sp.Rational(-1, 2): "rsqrt", 2: "square", -1: "recip"}
        base = self.expression(expression.base)
        for power, name in named.items():
            if expression.exp == power:
                return self.map(name, base)
        if expression.exp.is_Integer and 0 < int(expression.exp) <= 8:
            value = base
            for _ in range(int(expression.exp) - 1):
                value = self.map("mul", value, base)
            return value
        raise InputError(f"no box computes the power {expression.exp} in {expression}")


def _key(node: Node) -> tuple[Any, ...]:
    """What makes two boxes the same."""
    return (node.op, node.inputs, node.axes, node.over, node.attrs)


def _visit(name: str, nodes: Mapping[str, Node], order: dict[str, Node]) -> None:
    """Depth-first topological order of what is needed."""
    if name not in nodes or name in order:
        return
    for source in nodes[name].inputs:
        _visit(source, nodes, order)
    order[name] = nodes[name]
