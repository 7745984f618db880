"""The Diagram: arrays with named axes joined by boxes, in normal form (a dag, not a drawing).

A box acts on its own axes (`over`) and is weaved over every other axis of its output; an input
that lacks such an axis is broadcast along it, which is the only source of re-reading.
Python and einsum formulas (`frontend.py`) end here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from warploom.derive.formula.ops import op
from warploom.errors import InputError

SCHEMA = "warploom.derive/1"
Attr = str | int | float | tuple[Any, ...]


@dataclass(frozen=True)
class Array:
    """An external array: its name, its named axes in order, and its element type."""

    name: str
    axes: tuple[str, ...]
    dtype: str = ""
    """Empty: whatever `--dtype` says."""


@dataclass(frozen=True)
class Node:
    """One box occurrence. `axes` are those of its output, `over` those it removes or runs along."""

    name: str
    op: str
    inputs: tuple[str, ...]
    axes: tuple[str, ...]
    over: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()

    def attr(self, key: str, default: Any = None) -> Any:
        """One attribute, or the default."""
        return dict(self.attrs).get(key, default)

    @property
    def kind(self) -> str:
        """The kind of its operator: map, reduce, contract, scan, ..."""
        return op(self.op).kind

    @property
    def factors(self) -> tuple[str, ...]:
        """The operands of its matrix products: those of a chunked contraction without its gate and
        its weights of rows."""
        return self.inputs[:3] if self.kind == "scan_contract" else self.inputs

    def __str__(self) -> str:
        """`o[q,d] = contract(p, v) over x`."""
        over = f" over {','.join(self.over)}" if self.over else ""
        return f"{self.name}[{','.join(self.axes)}] = {self.op}({', '.join(self.inputs)}){over}"


@dataclass(frozen=True)
class Diagram:
    """A whole algorithm: external arrays in, boxes in topological order, names of the results.

    `sizes` gives every axis its default length; a derivation may override it.
    """

    name: str
    inputs: tuple[Array, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Check names, order, axes and sizes; raises `InputError` naming box and axis."""
        known: dict[str, tuple[str, ...]] = {}
        for array in self.inputs:
            if array.name in known:
                raise InputError(f"{self.name}: array {array.name!r} is declared twice")
            known[array.name] = array.axes
        for node in self.nodes:
            _check_node(self.name, node, known)
            known[node.name] = node.axes
        for output in self.outputs:
            if output not in known:
                raise InputError(f"{self.name}: output {output!r} is no array; have {list(known)}")
        for axis, size in self.sizes:
            if size < 1:
                raise InputError(f"{self.name}: axis {axis!r} has size {size}: must be at least 1")
        have = {axis for axis, _ in self.sizes}
        if missing := sorted({a for axes in known.values() for a in axes} - have):
            raise InputError(f"{self.name}: axis {missing[0]!r} has no size; sized: {sorted(have)}")

    @cached_property
    def size(self) -> dict[str, int]:
        """Axis name to length."""
        return dict(self.sizes)

    @cached_property
    def node(self) -> dict[str, Node]:
        """Box name to box."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def array(self) -> dict[str, Array]:
        """External array name to array."""
        return {array.name: array for array in self.inputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Value name to the boxes that read it."""
        users: dict[str, list[str]] = {name: [] for name in (*self.array, *self.node)}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                users[source].append(node.name)
        return {name: tuple(boxes) for name, boxes in users.items()}

    def axes_of(self, value: str) -> tuple[str, ...]:
        """The axes of an external array or of a box's output."""
        if value in self.node:
            return self.node[value].axes
        if value in self.array:
            return self.array[value].axes
        raise InputError(f"{self.name}: no value {value!r}; have {[*self.array, *self.node]}")

    def elements(self, value: str) -> int:
        """How many numbers a value holds."""
        count = 1
        for axis in self.axes_of(value):
            count *= self.size[axis]
        return count

    def resized(self, sizes: Mapping[str, int]) -> Diagram:
        """The same diagram with other axis lengths; raises `InputError` for an unknown axis."""
        if unknown := sorted(set(sizes) - set(self.size)):
            known = ", ".join(sorted(self.size))
            raise InputError(f"{self.name}: no axis {unknown[0]!r} to set; its axes are {known}")
        merged = {**self.size, **sizes}
        return replace(self, sizes=tuple(merged.items()), nodes=followed(self.nodes, merged))

    @cached_property
    def digest(self) -> str:
        """Structural hash: equal for equal structure, whatever the boxes are called."""
        names: dict[str, str] = {array.name: f"in:{array.name}" for array in self.inputs}
        for node in self.nodes:
            text = json.dumps(
                [node.op, [names[i] for i in node.inputs], node.axes, node.over, node.attrs]
            )
            names[node.name] = hashlib.sha256(text.encode()).hexdigest()
        parts = [[a.name, a.axes, a.dtype] for a in self.inputs]
        whole = json.dumps([parts, [names[o] for o in self.outputs], sorted(self.sizes)])
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, versioned."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "inputs": [[a.name, list(a.axes), a.dtype] for a in self.inputs],
            "nodes": [
                [n.name, n.op, list(n.inputs), list(n.axes), list(n.over), _plain(n.attrs)]
                for n in self.nodes
            ],
            "outputs": list(self.outputs),
            "sizes": dict(self.sizes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagram:
        """Back from JSON; raises `InputError` for another schema or a missing field."""
        if data.get("schema") != SCHEMA:
            raise InputError(f"diagram schema is {data.get('schema')!r}, expected {SCHEMA!r}")
        try:
            return cls(
                data["name"],
                tuple(Array(name, tuple(axes), dtype) for name, axes, dtype in data["inputs"]),
                tuple(
                    Node(name, kind, tuple(ins), tuple(axes), tuple(over), _tuples(attrs))
                    for name, kind, ins, axes, over, attrs in data["nodes"]
                ),
                tuple(data["outputs"]),
                tuple((str(axis), int(size)) for axis, size in data["sizes"].items()),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"diagram JSON is incomplete: {error!r}") from None

    def __str__(self) -> str:
        """One line an array and a box."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes)
        arrays = [f"  {a.name}[{','.join(a.axes)}]" for a in self.inputs]
        boxes = [f"  {node}" for node in self.nodes]
        return "\n".join([f"{self.name} ({sizes})", *arrays, *boxes, f"  -> {self.outputs}"])


def followed(nodes: Iterable[Node], sizes: Mapping[str, int]) -> tuple[Node, ...]:
    """The boxes, constants that stand for a power of an axis's length (attributes `axis` and
    `power`) set to what the lengths make them; an axis without a length leaves its constants."""
    return tuple(_at_length(node, sizes) for node in nodes)


def _at_length(node: Node, sizes: Mapping[str, int]) -> Node:
    """One box of `followed`."""
    axis = node.attr("axis")
    if node.kind != "const" or axis not in sizes:
        return node
    value = float(sizes[axis]) ** node.attr("power")
    return replace(node, attrs=tuple({**dict(node.attrs), "value": value}.items()))


def _check_node(diagram: str, node: Node, known: Mapping[str, tuple[str, ...]]) -> None:
    """Guard one box: its inputs exist and its axes follow from theirs."""
    spec = op(node.op)
    where = f"{diagram}: box {node.name!r} ({node.op})"
    if node.name in known:
        raise InputError(f"{where} repeats a name; rename it")
    if missing := [name for name in node.inputs if name not in known]:
        raise InputError(f"{where} reads {missing[0]!r}, which is not computed before it")
    if spec.arity not in (-1, len(node.inputs)):
        raise InputError(f"{where} takes {spec.arity} inputs, got {len(node.inputs)}")
    if len(set(node.axes)) != len(node.axes):
        raise InputError(f"{where} names an axis twice in {node.axes}; use a view for a diagonal")
    carried = {axis for name in node.inputs for axis in known[name]}
    if absent := [axis for axis in node.over if axis not in carried]:
        raise InputError(
            f"{where} works over axis {absent[0]!r}, but its inputs have {sorted(carried)}"
        )
    if spec.kind in ("const", "view") or node.op == "topk":
        return
    if extra := [axis for axis in node.axes if axis not in carried]:
        raise InputError(
            f"{where} has output axis {extra[0]!r}, but its inputs have {sorted(carried)}"
        )
    removed = set(node.over) if spec.kind in ("reduce", "contract", "scan_contract") else set[str]()
    if lost := sorted(carried - set(node.axes) - removed):
        raise InputError(f"{where} drops axis {lost[0]!r} without reducing it: add it to `over`")
    if both := sorted(removed & set(node.axes)):
        raise InputError(f"{where} both removes and keeps axis {both[0]!r}")


def _plain(attrs: Iterable[tuple[str, Attr]]) -> list[list[Any]]:
    """Attributes as JSON lists."""
    return [[key, value] for key, value in attrs]


def _tuples(value: Any) -> Any:
    """JSON lists back to nested tuples."""
    if not isinstance(value, list):
        return value
    items = cast("list[Any]", value)
    return tuple(_tuples(item) for item in items)
