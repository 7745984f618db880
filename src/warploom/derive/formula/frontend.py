"""The formula front end: Python operators and einsum on arrays with named axes.

    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x d")
    attention = build("attention", softmax(q @ k.T * scale) @ v, sizes={"q": 4096, ...})

Axes meet by name, so broadcasting needs no rank rules and a transpose costs nothing. An expression
is immutable and hashed by structure: writing the same thing twice makes one box. Two wires of one
name that never meet (the d of Q·K and the d of V above) become two axes, `d` and `d2`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from warploom.derive.formula.graph import Array, Attr, Diagram, Node, followed
from warploom.derive.formula.ops import MASKED, op
from warploom.errors import InputError

DEFAULT_SIZE = 64


@dataclass(frozen=True, eq=False)
class Expr:
    """One value of a formula. Equality and hash are structural."""

    op: str
    inputs: tuple[Expr, ...]
    axes: tuple[str, ...]
    over: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    label: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> str:
        """Structural hash of the whole expression; the order of an array's axes is no structure."""
        if self.op == "reorder":
            return self.inputs[0].digest
        parts = [self.op, *self.axes, "|", *self.over, "|", repr(self.attrs)]
        parts += [value.digest for value in self.inputs]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Equal structure."""
        return isinstance(other, Expr) and self.digest == other.digest

    def __hash__(self) -> int:
        """Consistent with structural equality."""
        return hash(self.digest)

    def named(self, label: str) -> Expr:
        """The same value with a name for drawings and messages."""
        return Expr(self.op, self.inputs, self.axes, self.over, self.attrs, label)

    @property
    def T(self) -> Expr:  # noqa: N802
        """The last two axes swapped (a change of names' order only)."""
        if len(self.axes) < 2:
            raise InputError(f"cannot transpose axes {self.axes}: needs at least two")
        *rest, a, b = self.axes
        return self.ordered(*rest, b, a)

    def ordered(self, *axes: str) -> Expr:
        """The same value with its axes in another order."""
        if sorted(axes) != sorted(self.axes):
            raise InputError(f"cannot order axes {self.axes} as {axes}: not the same axes")
        if self.op in ("input", "reorder"):
            return Expr("reorder", (self,), tuple(axes), label=self.label)
        return Expr(self.op, self.inputs, tuple(axes), self.over, self.attrs, self.label)

    def __add__(self, other: Expr | float) -> Expr:
        """Elementwise sum."""
        return apply("add", self, other)

    def __sub__(self, other: Expr | float) -> Expr:
        """Elementwise difference."""
        return apply("sub", self, other)

    def __mul__(self, other: Expr | float) -> Expr:
        """Elementwise product."""
        return apply("mul", self, other)

    def __truediv__(self, other: Expr | float) -> Expr:
        """Elementwise quotient."""
        return apply("div", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        """Elementwise negation."""
        return apply("neg", self)

    def __matmul__(self, other: Expr) -> Expr:
        """Contract my last axis with the other's second-last (or only) axis; batch axes by name."""
        if not self.axes or not other.axes:
            raise InputError(f"@ needs axes on both sides, got {self.axes} and {other.axes}")
        inner = [*other.axes][-2:][0]
        mine = [*self.axes][-1]
        if mine != inner:
            raise InputError(
                f"@ would contract axis {mine!r} of {self.axes} with {inner!r} of {other.axes}: "
                f"they must be one axis; transpose one side or rename {inner!r} to {mine!r}"
            )
        out = (*(a for a in self.axes if a != mine), *(a for a in other.axes if a not in self.axes))
        return contract(self, other, out=out)


def tensor(name: str, axes: str | Sequence[str], dtype: str = "") -> Expr:
    """An external array with named axes, outermost first."""
    names = tuple(axes.split()) if isinstance(axes, str) else tuple(axes)
    if len(set(names)) != len(names):
        raise InputError(f"array {name!r} repeats an axis in {names}: name each axis once")
    return Expr("input", (), names, (), (("name", name), ("dtype", dtype)), name)


def const(value: float) -> Expr:
    """A number, woven over whatever it meets."""
    return Expr("const", (), (), (), (("value", float(value)),), f"{value:g}")


def power_of_size(axis: str, power: float) -> Expr:
    """The length of an axis to a power, woven over whatever it meets; it follows the axis when a
    diagram is resized."""
    label = f"1/√{axis}" if power == -0.5 else f"{axis}^{power:g}"
    return Expr("const", (), (), (), (("axis", axis), ("power", power)), label)


def apply(name: str, *values: Expr | float) -> Expr:
    """A map box: woven over the union of its inputs' axes, in order of first appearance."""
    spec = op(name)
    args = tuple(value if isinstance(value, Expr) else const(value) for value in values)
    if spec.kind != "map" or spec.arity != len(args):
        raise InputError(f"{name!r} is a {spec.kind} of {spec.arity} inputs, got {len(args)}")
    widest = max(args, key=lambda value: len(value.axes))
    axes = tuple(dict.fromkeys((*widest.axes, *(a for value in args for a in value.axes))))
    return Expr(name, args, axes)


def reduce(name: str, value: Expr, axis: str | Sequence[str]) -> Expr:
    """A reduction over named axes; raises `InputError` when the value lacks one."""
    over = (axis,) if isinstance(axis, str) else tuple(axis)
    if missing := [a for a in over if a not in value.axes]:
        raise InputError(f"{name} over axis {missing[0]!r}, but the value has axes {value.axes}")
    return Expr(name, (value,), tuple(a for a in value.axes if a not in over), over)


def contract(*values: Expr, out: Sequence[str]) -> Expr:
    """Einstein sum of a product: every axis missing from `out` is summed."""
    carried = tuple(dict.fromkeys(a for value in values for a in value.axes))
    if extra := [a for a in out if a not in carried]:
        raise InputError(f"einsum output axis {extra[0]!r} is on no input; inputs have {carried}")
    over = tuple(a for a in carried if a not in out)
    if not over and len(values) == 2:
        return Expr("mul", tuple(values), tuple(out))
    return Expr("contract", tuple(values), tuple(out), over)


def einsum(pattern: str, *values: Expr) -> Expr:
    """`einsum("q d, x d -> q x", a, b)`: axis names separated by spaces, renaming on the way in."""
    left, arrow, right = pattern.partition("->")
    parts = [tuple(part.split()) for part in left.split(",")]
    if not arrow or len(parts) != len(values):
        raise InputError(
            f"einsum pattern {pattern!r} needs '->' and {len(values)} inputs separated by commas"
        )
    for part, value in zip(parts, values, strict=True):
        if part != value.axes:
            raise InputError(
                f"einsum pattern gives axes {part} to a value with axes {value.axes}: write them so"
            )
    return contract(*values, out=tuple(right.split()))


def view(value: Expr, source: str, **strides: int) -> Expr:
    """Affine reindexing: read axis `source` at Σ stride·position of the new axes (convolution)."""
    terms = tuple(strides.items())
    position = value.axes.index(source) if source in value.axes else -1
    if position < 0:
        raise InputError(f"view of axis {source!r}, but the value has axes {value.axes}")
    axes = (*value.axes[:position], *strides, *value.axes[position + 1 :])
    mapping = tuple((a, terms if a == source else ((a, 1),)) for a in value.axes)
    return Expr("view", (value,), axes, (), (("map", mapping),))


def causal(value: Expr, row: str, column: str, window: int = 0, fill: float = MASKED) -> Expr:
    """Keep column ≤ row (ends aligned), and with `window` only the last `window` columns."""
    if row not in value.axes or column not in value.axes:
        raise InputError(f"mask over {row!r}, {column!r}, but the value has axes {value.axes}")
    attrs = (("row", row), ("column", column), ("window", window), ("fill", fill))
    return Expr("mask", (value,), value.axes, (), attrs)


def softmax(value: Expr, axis: str | None = None) -> Expr:
    """Exponentials over their sum along `axis` (default: the last), shifted by the maximum."""
    along = axis or value.axes[-1]
    top = reduce("max", value, along).named("m")
    weight = apply("exp", (value - top).named("t")).named("e")
    return (weight / reduce("sum", weight, along).named("z")).named("p")


def logsumexp(value: Expr, axis: str | None = None) -> Expr:
    """log Σ exp along `axis`, shifted by the maximum."""
    along = axis or value.axes[-1]
    top = reduce("max", value, along).named("m")
    weight = apply("exp", (value - top).named("t")).named("e")
    return apply("log", reduce("sum", weight, along).named("z")) + top


def rms_norm(
    value: Expr, gain: Expr | None = None, axis: str | None = None, eps: float = 1e-6
) -> Expr:
    """x / sqrt(mean x² + eps), times a gain."""
    along = axis or value.axes[-1]
    power = reduce("mean", apply("square", value), along).named("ms")
    scaled = value * apply("rsqrt", power + eps).named("r")
    return scaled * gain if gain is not None else scaled


def layer_norm(
    value: Expr,
    gain: Expr | None = None,
    bias: Expr | None = None,
    axis: str | None = None,
    eps: float = 1e-6,
) -> Expr:
    """(x - mean) / sqrt(mean (x - mean)² + eps), times a gain, plus a bias."""
    along = axis or value.axes[-1]
    centred = (value - reduce("mean", value, along).named("mu")).named("c")
    spread = reduce("mean", apply("square", centred), along).named("var")
    scaled = centred * apply("rsqrt", spread + eps).named("r")
    scaled = scaled * gain if gain is not None else scaled
    return scaled + bias if bias is not None else scaled


def build(
    name: str, outputs: Expr | Mapping[str, Expr], sizes: Mapping[str, int] | None = None
) -> Diagram:
    """The diagram of a formula. `sizes` gives axis lengths (default 64 each).

    Raises `InputError` for a size that names no axis.
    """
    given = dict(sizes or {})
    results = {"out": outputs} if isinstance(outputs, Expr) else dict(outputs)
    order: dict[Expr, str] = {}
    wanted: dict[Expr, str] = {}
    for key, value in results.items():
        wanted.setdefault(value, key)
    taken = set(results)
    for value in results.values():
        _visit(value, order, wanted, taken)
    return _split_axes(name, order, {key: order[value] for key, value in results.items()}, given)


def as_diagram(found: Diagram | Expr, text: str) -> Diagram:
    """A formula that FILE.py:OBJECT names, called after the object.

    Raises `InputError` for an array alone, of which nothing is computed.
    """
    if isinstance(found, Expr) and found.op == "input":
        raise InputError(f"{text} is an array, expected a formula of arrays")
    return build(text.rpartition(":")[2], found) if isinstance(found, Expr) else found


def _visit(
    value: Expr, order: dict[Expr, str], wanted: Mapping[Expr, str], taken: set[str]
) -> None:
    """Name every box once, inputs first."""
    if value in order:
        return
    if value.op == "reorder":
        _visit(value.inputs[0], order, wanted, taken)
        return
    for source in value.inputs:
        _visit(source, order, wanted, taken)
    base = wanted.get(value) or value.label or value.op
    if value.op == "input":
        base = str(dict(value.attrs)["name"])
    label, count = base, 2
    while label in order.values() or (label in taken and value not in wanted):
        label, count = f"{base}{count}", count + 1
    order[value] = label


def _split_axes(
    name: str, order: Mapping[Expr, str], outputs: Mapping[str, str], given: Mapping[str, int]
) -> Diagram:
    """Rename wires of one name that never meet, then assemble the diagram."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for value, label in order.items():
        for source in value.inputs:
            linked: Any = dict(value.attrs).get("map") or ()
            renamed = {str(s) for s, terms in linked if [t[0] for t in terms] != [s]}
            for axis in source.axes:
                if axis not in renamed:
                    parent[root((order[source], axis))] = root((label, axis))
    names: dict[tuple[str, str], str] = {}
    used: dict[str, int] = {}
    for value, label in order.items():
        for axis in (*value.axes, *value.over):
            key = root((label, axis))
            if key not in names:
                used[axis] = used.get(axis, 0) + 1
                names[key] = axis if used[axis] == 1 else f"{axis}{used[axis]}"

    def rename(label: str, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[root((label, axis))] for axis in axes)

    arrays: list[Array] = []
    nodes: list[Node] = []
    for value, label in order.items():
        axes, over = rename(label, value.axes), rename(label, value.over)
        attrs = dict(value.attrs)
        if value.op == "input":
            arrays.append(Array(label, axes, str(attrs["dtype"])))
            continue
        for key in {"row", "column", "time", "axis"} & set(attrs):
            attrs[key] = names.get(root((label, str(attrs[key]))), str(attrs[key]))
        if "map" in attrs:
            source = order[value.inputs[0]]
            attrs["map"] = _renamed_map(attrs["map"], source, label, rename)
        inputs = tuple(order[source] for source in value.inputs)
        nodes.append(Node(label, value.op, inputs, axes, over, tuple(attrs.items())))
    sizes = {
        axis: given.get(axis, given.get(axis.rstrip("23456789"), DEFAULT_SIZE))
        for axis in names.values()
    }
    if unknown := sorted(set(given) - set(sizes)):
        raise InputError(f"{name}: size given for {unknown[0]!r}; its axes are {sorted(sizes)}")
    _check_powers(name, nodes, used)
    results = tuple(outputs.values())
    return Diagram(name, tuple(arrays), followed(nodes, sizes), results, tuple(sizes.items()))


def _check_powers(name: str, nodes: Sequence[Node], used: Mapping[str, int]) -> None:
    """Refuse a power of the length of an axis of which there is none, or more than one."""
    for axis in (str(node.attr("axis")) for node in nodes if node.attr("power") is not None):
        if used.get(axis) != 1:
            raise InputError(
                f"{name}: a power of the length of {axis!r}, of which there are "
                f"{used.get(axis, 0)}: expected one axis of that name among {sorted(used)}"
            )


def _renamed_map(mapping: Any, source: str, label: str, rename: Any) -> tuple[Any, ...]:
    """A view's reindexing under the final axis names."""
    return tuple(
        (
            rename(source, [axis])[0],
            tuple((rename(label, [out])[0], stride) for out, stride in terms),
        )
        for axis, terms in mapping
    )
