"""Cascades: reductions along one axis whose body reads the result of an earlier one.

Softmax-contraction is a cascade of three: a maximum, a sum that reads the maximum, a contraction
that reads both. This module finds the cascade of an axis and writes each dependent reduction as a
scalar formula F(r, leaves): `r` the earlier results, `leaves` what the stream delivers. Whether it
can be streamed is then a question about F alone (`discover.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.formula.ops import op


@dataclass(frozen=True)
class Refusal:
    """Why a move is illegal: the box, the axis, the rule, and what would make it legal."""

    rule: str
    box: str
    axis: str
    reason: str
    nearest: str

    def __str__(self) -> str:
        """One line."""
        where = f"{self.rule} refused at box {self.box!r}, axis {self.axis!r}"
        return f"{where}: {self.reason}; {self.nearest}"


@dataclass(frozen=True)
class Scalar:
    """One dependent reduction as a scalar formula.

    `formula` is a sympy expression in `bases` (earlier reductions of the same axis), `leaves`
    (values that carry the axis) and `parameters` (values that do not); each maps a symbol name to
    the box or array it stands for.
    """

    node: Node
    formula: Any
    bases: Mapping[str, str]
    leaves: Mapping[str, str]
    parameters: Mapping[str, str]
    carriers: Mapping[str, str]
    """Base to a leaf that it is a reduction of, where the formula has one."""


def closes(node: Node, axis: str) -> bool:
    """Whether a box is a reduction that removes the axis."""
    return node.kind in ("reduce", "contract") and axis in node.over


def reductions(body: Diagram, axis: str) -> tuple[Node, ...]:
    """The boxes that remove the axis, in topological order."""
    return tuple(node for node in body.nodes if closes(node, axis))


def ancestors(body: Diagram) -> dict[str, frozenset[str]]:
    """Value name to everything it is computed from, itself excluded."""
    above: dict[str, frozenset[str]] = {name: frozenset() for name in body.array}
    for node in body.nodes:
        above[node.name] = frozenset(node.inputs).union(*(above[name] for name in node.inputs))
    return above


def dependent(body: Diagram, axis: str) -> tuple[Node, ...]:
    """Reductions of the axis that read the result of another reduction of it."""
    above = ancestors(body)
    closing = {node.name for node in reductions(body, axis)}
    return tuple(node for node in reductions(body, axis) if above[node.name] & closing)


def scalar_form(body: Diagram, node: Node, axis: str) -> Scalar | Refusal:
    """The dependent reduction `node` along `axis` as a formula, or why it has none."""
    sp = sympy()
    closing = {item.name for item in reductions(body, axis)}
    above = ancestors(body)
    bases: dict[str, str] = {}
    leaves: dict[str, str] = {}
    parameters: dict[str, str] = {}

    def walk(name: str) -> Any:
        if name in closing:
            bases[symbol_name(name)] = name
            return symbol(name)
        if not above[name] & closing:
            box = body.node.get(name)
            follows = box is not None and box.attr("power") is not None
            if box is not None and box.kind == "const" and not follows:
                return sp.Rational(Fraction(str(box.attr("value"))))
            kind = leaves if axis in body.axes_of(name) else parameters
            kind[symbol_name(name)] = name
            return symbol(name)
        box = body.node[name]
        formula = op(box.op).formula
        if box.kind != "map" or formula is None:
            return Refusal(
                "G2 stream",
                box.name,
                axis,
                f"{box.op} mixes values that depend on a whole reduction of {axis!r}",
                f"compute {box.name!r} in a later kernel",
            )
        parts = [walk(source) for source in box.inputs]
        for part in parts:
            if isinstance(part, Refusal):
                return part
        return formula(*parts)

    parts = [walk(source) for source in node.inputs]
    for part in parts:
        if isinstance(part, Refusal):
            return part
    for base in bases.values():
        if extra := sorted(set(body.axes_of(base)) - set(node.axes)):
            return Refusal(
                "G2 stream",
                node.name,
                axis,
                f"its correction would depend on axis {extra[0]!r}, which it removes",
                f"keep {extra[0]!r} on {node.name!r} or compute {base!r} in an earlier kernel",
            )
    carriers = {
        name: leaf
        for name, value in bases.items()
        for leaf, read in leaves.items()
        if read in above[value]
    }
    return Scalar(node, sp.Mul(*parts), bases, leaves, parameters, carriers)


def symbol_name(value: str) -> str:
    """A sympy-safe name for a box or array."""
    return "v_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in value)


def symbol(value: str) -> Any:
    """The real sympy symbol of a box or array."""
    return sympy().Symbol(symbol_name(value), real=True)


def renamed(base: str, when: str) -> Any:
    """The symbol of a base before (`old`) or after (`new`) a slice."""
    return sympy().Symbol(f"{when}_{symbol_name(base)}", real=True)
