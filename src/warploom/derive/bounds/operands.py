"""What a bound may assume of a contraction: its frame, its operands, where its result goes.

A bound counts the products S = Σ_l A_il B_lj one by one where the elements of S have to exist. They
need not where what is summed over them is a polynomial in S: Σ_j p(q_i·k_j) v_j is a contraction of
finitely many features of q_i with features of (k_j, v_j), whatever the lengths. For a continuous g
and width d >= 2 the converse holds: if g(q·k) = Σ_{r<R} φ_r(q) ψ_r(k) on an open set, then g is a
polynomial there. (q = (a, 1), k = (1, b) make g(a + b) of finite rank, so g is a sum of polynomials
times exponentials (Levi-Civita's equation) and entire; q = (a, 0), k = (b, 0) make Σ c_n aⁿ bⁿ of
finite rank, so finitely many c_n are not zero.) For d = 1 also powers and logarithms separate.

So the question is about the composed map from S to what is summed, everything else held: |s|² and
log(exp(s)) are polynomials though their boxes are none. A product is counted only if *both* hold:

* by its boxes the composition, as a function of a free real s, is no polynomial: by its growth at
  one end of the line, or because it is one polynomial at one end and another at the other
  (`germs`; a sufficient condition: what is not known counts as a polynomial);
* run on numbers at small lengths, with the statistics (maxima, sums) as they really come out, it
  is fitted by no polynomial of a degree up to `FITTED`: relu(s - max s) is zero whatever relu is.

Likewise a result that goes to an output, or into a maximum, has to change it, and an operand made
from an external array has to be a matrix of full rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import prod
from random import Random
from typing import Any

import numpy as np

from warploom.derive.bounds.germs import Known, image, polynomial
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs, shrunk_sizes
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.lemmas.cascade import ancestors

FITTED, POINTS, SMALL = 12, 64, 8
"""Degree of the polynomials that are tried, points they are fitted to, other axes at most."""
SPREADS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 16384.0)
"""How far apart the points lie: one spread that shows no polynomial is enough."""
RESIDUAL = 1e-7
"""Relative: float64 leaves 1e-15 of a polynomial, 1e-4 and more of exp."""
EQUAL = 1e-9
"""Relative: a change of an output below this is rounding."""


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


@cache
def is_opaque(diagram: Diagram, node: Node) -> bool:
    """Whether a product's elements have to exist: wherever they are summed (or scanned, or
    reindexed), it is a function of them that is established to be no polynomial; where their
    maximum is taken or they are an output, one that is no constant. And no array behind them is
    without effect on the outputs."""
    width = prod(diagram.size[axis] for axis in node.over)
    if width < 2 or ancestors(diagram)[node.name] & unused(diagram):
        return False
    maps = maps_of(diagram, node)
    ends = {user: diagram.node[user] for name in maps for user in diagram.consumers[name]}
    boxes = [box for box in ends.values() if box.kind not in ("map", "mask")]
    out = [name for name in maps if name in diagram.outputs]
    return (
        bool(boxes or out)
        and all(changes(diagram, node, name) for name in out)
        and all(_counts(diagram, node, maps, box) for box in boxes)
    )


def maps_of(diagram: Diagram, node: Node) -> tuple[str, ...]:
    """A result and all maps of its elements."""
    found = {node.name: None}
    for box in diagram.nodes:
        if box.kind in ("map", "mask") and set(box.inputs) & set(found):
            found[box.name] = None
    return tuple(found)


def _counts(diagram: Diagram, node: Node, maps: Sequence[str], box: Node) -> bool:
    """Whether a box that reads maps of a product's elements, and is none, needs them."""
    names = tuple(name for name in box.inputs if name in maps)
    if box.op in ("max", "min", "topk"):
        return changes(diagram, node, names[0])
    return no_polynomial(diagram, node, names, box.over)


def no_polynomial(diagram: Diagram, node: Node, names: Sequence[str], over: Sequence[str]) -> bool:
    """Whether the product of some values, maps of a contraction's elements, is established to be no
    polynomial in them along the axes `over`."""
    axes = [axis for axis in over if axis in node.axes]
    if not axes or not _leaves_polynomials(diagram, node.name, names):
        return False
    axis = max(axes, key=lambda one: diagram.size[one])
    if diagram.size[axis] < 2:
        return False
    return any(_misfit(*curve) > RESIDUAL for curve in _curves(diagram, node, names, axis))


def changes(diagram: Diagram, node: Node, name: str) -> bool:
    """Whether a value, a map of a contraction's elements, is established to change with them."""
    germs = [_germ(diagram, node.name, name, end) for end in (1, -1)]
    if not node.axes or not any(germ is not None and not germ.constant for germ in germs):
        return False
    axis = max(node.axes, key=lambda one: diagram.size[one])
    curves = _curves(diagram, node, (name,), axis)
    return any(np.ptp(values) > RESIDUAL * np.max(np.abs(values)) for _, values in curves)


def _leaves_polynomials(diagram: Diagram, source: str, names: Sequence[str]) -> bool:
    """Whether a product of values as a function of a free real number, one element of `source`, is
    no polynomial by its growth at the ends of the line."""
    ends: list[tuple[Fraction, ...]] = []
    for end in (1, -1):
        germ: Known = polynomial(1)
        for name in names:
            germ = image("mul", (germ, _germ(diagram, source, name, end)))
        if germ is None:
            continue
        if germ.kind != "polynomial":
            return True
        ends.append(tuple(c * end**k for k, c in enumerate(germ.coefficients)))
    return len(ends) == 2 and ends[0] != ends[1]


def _germ(diagram: Diagram, source: str, value: str, end: int) -> Known:
    """A value as a function of an element of `source` near end · infinity; what is no map of it,
    statistics of it included, is some number."""
    above = ancestors(diagram)
    known: dict[str, Known] = {source: polynomial(0, end)}

    def walk(name: str) -> Known:
        if name not in known:
            known[name] = found(name)
        return known[name]

    def found(name: str) -> Known:
        node = diagram.node.get(name)
        if node is None or source not in above[name] or node.kind not in ("map", "mask"):
            return _some_number(diagram, name)
        if node.kind == "mask":
            return walk(node.inputs[0])
        if node.op == "mul" and node.inputs[0] == node.inputs[1]:
            return image("square", (walk(node.inputs[0]),))
        return image(node.op, [walk(one) for one in node.inputs])

    return walk(value)


def _some_number(diagram: Diagram, name: str) -> Known:
    """What stands for a value that is held: a constant's own, else a random one."""
    node = diagram.node.get(name)
    if node is not None and node.kind == "const":
        return polynomial(Fraction(float(node.attr("value"))))
    return polynomial(Fraction(Random(name).randint(331, 3310), 997))


def _curves(
    diagram: Diagram, node: Node, names: Sequence[str], axis: str
) -> Iterator[tuple[Any, Any]]:
    """(elements of a product along an axis, the values of a product of maps of them) from runs at
    small lengths, for every spread at which all are finite.

    Along the axis only the arrays behind the product change, on a straight line.
    """
    small = _part(diagram, (node.name, *names))
    if any(axis in _reindexed(one) for one in small.nodes):
        return
    sizes = shrunk_sizes(diagram, SMALL) | {axis: POINTS}
    small = small.resized({name: sizes[name] for name in small.size})
    above = ancestors(diagram)[node.name]
    for spread in SPREADS:
        rng = np.random.default_rng(7)
        arrays: dict[str, Any] = {}
        for array in small.inputs:
            held = [1 if one == axis else small.size[one] for one in array.axes]
            value = rng.standard_normal(held)
            if axis in array.axes and array.name in above:
                steps = [POINTS if one == axis else 1 for one in array.axes]
                along = np.linspace(-spread, spread, POINTS).reshape(steps)
                value = value + along * rng.standard_normal(held)
            full = [small.size[one] for one in array.axes]
            arrays[array.name] = np.broadcast_to(value, full)
        with np.errstate(all="ignore"):
            got = evaluate(small, arrays)
            points, *values = (_last(small, got[name], name, axis) for name in (node.name, *names))
            curve = np.prod(values, axis=0)
        finite = np.isfinite(points) & np.isfinite(curve)
        if finite.sum() > 2 * FITTED and np.ptp(points[finite]) > 0:
            yield points[finite], curve[finite]


def _reindexed(node: Node) -> frozenset[str]:
    """Axes of a box whose length is not free: those of a view, the one a top-k makes."""
    if node.kind == "view":
        return frozenset(name for _, terms in node.attr("map") for name, _ in terms)
    return frozenset({str(node.attr("axis"))}) if node.op == "topk" else frozenset()


def _part(diagram: Diagram, names: Sequence[str]) -> Diagram:
    """What some values are computed from, without windows: a diagram that returns them."""
    above = ancestors(diagram)
    kept = set(names).union(*(above[name] for name in names))
    nodes = tuple(_unbounded(node) for node in diagram.nodes if node.name in kept)
    inputs = tuple(array for array in diagram.inputs if array.name in kept)
    return replace(diagram, inputs=inputs, nodes=nodes, outputs=tuple(dict.fromkeys(names)))


def _unbounded(node: Node) -> Node:
    """A mask without its window; the last row then sees everything."""
    if node.kind != "mask":
        return node
    return replace(node, attrs=tuple({**dict(node.attrs), "window": 0}.items()))


def _last(diagram: Diagram, value: Any, name: str, axis: str) -> Any:
    """A value along one axis, at the end of all others."""
    axes = diagram.axes_of(name)
    index = tuple(slice(None) if one == axis else -1 for one in axes)
    return np.broadcast_to(value[index], (POINTS,))


def _misfit(points: Any, values: Any) -> float:
    """The largest distance of values from the nearest polynomial in the points, relative."""
    middle, half = (points.max() + points.min()) / 2, np.ptp(points) / 2
    numpy: Any = np
    basis = numpy.polynomial.chebyshev.chebvander((points - middle) / half, FITTED)
    scaled = values / (np.max(np.abs(values)) or 1.0)
    fit = basis @ numpy.linalg.lstsq(basis, scaled, rcond=None)[0]
    return float(numpy.max(numpy.abs(fit - scaled)))


def is_image(diagram: Diagram, value: str, axes: Sequence[str]) -> bool:
    """Whether distinct elements of a value come from distinct elements of one external array:
    it is that array, or maps of it with arrays of no more axes. (Whether it is a general matrix,
    `is_general` says.)"""
    if value in diagram.array:
        return set(diagram.axes_of(value)) == set(axes)
    node = diagram.node[value]
    if node.kind != "map":
        return False
    return any(is_image(diagram, source, axes) for source in node.inputs)


@cache
def is_general(diagram: Diagram, node: Node, operand: str) -> bool:
    """Whether an operand is a matrix of full rank between its own axes and the summed ones: with
    less, its product is a smaller one. Run on random numbers at small lengths."""
    small = _part(diagram, (operand,))
    sizes = shrunk_sizes(diagram, SMALL)
    small = small.resized({name: sizes[name] for name in small.size})
    with np.errstate(all="ignore"):
        value = evaluate(small, random_inputs(small, 3))[operand]
    axes = small.axes_of(operand)
    shared = set(axes).intersection(*(diagram.axes_of(name) for name in node.inputs))
    batch = [a for a in axes if a in shared and a not in node.over]
    rows = [a for a in axes if a not in shared]
    order = [axes.index(a) for a in (*batch, *rows, *(a for a in axes if a in node.over))]
    shape = [prod(small.size[a] for a in group) for group in (batch, rows)]
    matrices = np.transpose(value, order).reshape(*shape, -1)
    if not np.isfinite(matrices).all():
        return False
    return all(np.linalg.matrix_rank(one) == min(one.shape) for one in matrices)


@cache
def unused(diagram: Diagram) -> frozenset[str]:
    """External arrays that change no output: they need not be read. Run on random numbers at small
    lengths, on positive ones where others give no number."""
    small = diagram.resized(shrunk_sizes(diagram, SMALL))
    with np.errstate(all="ignore"):
        for kind in (np.positive, np.abs):
            given, other = (
                {name: kind(value) for name, value in random_inputs(small, seed).items()}
                for seed in (1, 2)
            )
            before = evaluate(small, given)
            if all(np.isfinite(value).all() for value in before.values()):
                changed = {name: {**given, name: other[name]} for name in given}
                return frozenset(
                    name
                    for name, arrays in changed.items()
                    if compare(evaluate(small, arrays), before) < EQUAL
                )
    return frozenset()


@cache
def own_output(diagram: Diagram, node: Node) -> str:
    """The output for whose elements the elements of a contraction are needed, one each: a map of
    it, with no more axes, that changes with it; "" when there is none."""
    reached = {node.name}
    for box in diagram.nodes:
        if box.kind == "map" and set(box.axes) == set(node.axes) and reached & set(box.inputs):
            reached.add(box.name)
    found = (name for name in diagram.outputs if name in reached)
    return next((name for name in found if changes(diagram, node, name)), "")


def terms(diagram: Diagram, value: str) -> frozenset[str]:
    """Contractions that a value may be a polynomial in, by its boxes: all that it is a map of but
    those for which that is ruled out."""
    found: set[str] = set()
    for node in diagram.nodes:
        mapped = node.kind == "contract" and value in maps_of(diagram, node)
        if mapped and not no_polynomial(diagram, node, (value,), node.axes):
            found.add(node.name)
    return frozenset(found)
