"""Lower bounds on the values any schedule must move, so that results are "x % of a proven bound".

All hold for one memory of M values in the red-blue pebble game (sequential, recomputation allowed
unless said), hence for our derivations, whose independent groups can be run one after another.

* compulsory: every external input that changes an output is read, every output written, once.
* matmul: 2mnk/√M - 2M for a contraction whose operands are elementwise images of external arrays
  (Smith, Lowery, Langou, van de Geijn 2019, 1702.02017).
* sandwich: S_ij = f(Σ_l A_il B_jl) followed by Σ_j g(S_ij) V_jm, f no polynomial, i.e. attention
  and two-matmul networks. Proof: cut the run into phases of T transfers. A pair (i, j) whose S_ij
  is evaluated from nothing in a phase needs a row of A (width d) and of B, and each of its products
  with V needs V's element. With a rows of A, b of B and n <= b·e elements of V in reach,
  a·d + b·d + n <= M + T and at most a·n products arise: at most e·(M+T)²/(4d(d+e)). Pairs that
  bring S_ij (or a partial sum of it) along number at most M + T, each giving at most e products.
  So a phase completes at most F(T) = e·[(M+T)²/(4d(d+e)) + M + T] of the q·x·e products, and
  H >= T·floor(q·x·e / F(T)) for every T; we take the best T. (No V: S itself counts, e = 0.)
  This sharpens Saha & Ye's Θ(N²d²/M), 2402.07443, with a constant: 2N²d²/M as d²/M -> 0.
  It speaks of schedules that evaluate each S_ij from its own products and each g(S_ij) V_jm by
  itself, in any order, with recomputation; not of fast matrix multiplication or approximation. It
  asks for a composition of maps that is no polynomial: otherwise Σ_j f(S_ij) V_jm reassociates
  (spherical attention is Q (KᵀV) over the root of qᵀ (KᵀK) q, one pass for M >= d(d + e)), and
  then it is not given. What is asked for, and how it is established: `operands`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from warploom.derive.bounds.operands import (
    frames,
    is_general,
    is_image,
    is_opaque,
    maps_of,
    own_output,
    unused,
)
from warploom.derive.bounds.product_bounds import products_value, sandwich_value
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.lemmas.cascade import ancestors
from warploom.errors import WarploomError


class BoundBroken(WarploomError):
    """A derivation claims to move less than is provably necessary: a bug in cost or bound."""

    exit_code = 1


@dataclass(frozen=True)
class Bound:
    """A proven lower bound in values: name, the box it is about, formula and source."""

    name: str
    box: str
    value: float
    statement: str


def lower_bounds(diagram: Diagram, capacity: float, recomputed: bool = False) -> tuple[Bound, ...]:
    """Every bound that applies at `capacity` values of fast memory, strongest first.

    `recomputed`: whether schedules that evaluate a product more than once are meant too.
    """
    found = [compulsory(diagram), *_piece_bounds(diagram, capacity, recomputed)]
    for node in diagram.nodes:
        if node.kind != "contract":
            continue
        if bound := matmul_bound(diagram, node, capacity):
            found.append(bound)
        if bound := sandwich_bound(diagram, node, capacity):
            found.append(bound)
    return tuple(sorted(found, key=lambda bound: -bound.value))


def _piece_bounds(diagram: Diagram, capacity: float, recomputed: bool) -> list[Bound]:
    """The bounds of `product_bounds`."""
    found: list[Bound] = []
    value, names = products_value(diagram, capacity)
    if value > 0 and not recomputed:
        text = "2W/√M - B - 2M over all products (one running sum each; extends 1702.02017)"
        found.append(Bound("products", ", ".join(names), value, text))
    value, names = sandwich_value(diagram, capacity)
    if value > 0:
        text = "T(W/max(R²/16d, (R/3)^1.5) - 1), R = M + T (one running sum an output)"
        found.append(Bound("attention", ", ".join(names), value, text))
    return found


def check(diagram: Diagram, moved: float, capacity: float, recomputed: bool = False) -> Bound:
    """The strongest bound; raises `BoundBroken` when `moved` is below it."""
    best = lower_bounds(diagram, capacity, recomputed)[0]
    if moved < best.value * (1 - 1e-9):
        raise BoundBroken(
            f"{diagram.name} claims {moved:.6g} values at M = {capacity:.0f}, below the proven "
            f"{best.name} bound {best.value:.6g} ({best.statement}): a bug in cost or bound"
        )
    return best


def compulsory(diagram: Diagram) -> Bound:
    """Inputs that change an output once, outputs once; of a view's source only the elements it
    touches."""
    moved = 0.0
    for array in diagram.inputs:
        if array.name in unused(diagram):
            continue
        count = float(diagram.elements(array.name))
        for user in diagram.consumers[array.name]:
            node = diagram.node[user]
            if node.kind == "view":
                reach = math.prod(
                    1 + sum(s * (diagram.size[a] - 1) for a, s in terms)
                    for _, terms in node.attr("map")
                )
                count = min(count, reach, diagram.elements(user))
        masked = _masked_source(diagram, array.name)
        moved += 0.0 if masked else count
    moved += sum(diagram.elements(name) for name in diagram.outputs)
    return Bound("compulsory", "", moved, "Σ inputs + Σ outputs")


def _masked_source(diagram: Diagram, array: str) -> bool:
    """Whether a mask could make part of an input unnecessary (a window shorter than the stream)."""
    above = ancestors(diagram)
    for node in diagram.nodes:
        if node.kind == "mask" and node.attr("window"):
            column, row = str(node.attr("column")), str(node.attr("row"))
            seen = diagram.size[row] + int(node.attr("window"))
            reaches = array in above[node.name] or column in diagram.axes_of(array)
            if reaches and column in diagram.axes_of(array) and seen < diagram.size[column]:
                return True
    return False


def matmul_bound(diagram: Diagram, node: Node, capacity: float) -> Bound | None:
    """2mnk/√M - 2M for a contraction of two elementwise images of external arrays that is itself,
    up to elementwise boxes, an output."""
    sides = frames(diagram, node)
    if sides is None or not own_output(diagram, node):
        return None
    if not _are_images(diagram, node):
        return None
    work = math.prod(float(diagram.size[a]) for a in (*node.axes, *node.over))
    value = 2 * work / math.sqrt(capacity) - 2 * capacity
    return Bound("matmul", node.name, value, "2mnk/√M - 2M (1702.02017)") if value > 0 else None


def sandwich_bound(diagram: Diagram, node: Node, capacity: float) -> Bound | None:
    """The phase argument of the module docstring for S = contract(A, B) that is no output."""
    sides = frames(diagram, node)
    if sides is None or own_output(diagram, node):
        return None
    if not _are_images(diagram, node):
        return None
    if _has_mask_below(diagram, node) or not is_opaque(diagram, node):
        return None
    width = math.prod(float(diagram.size[a]) for a in node.over)
    rows, columns, _ = sides
    second = _second_width(diagram, node, rows, columns)
    pairs = math.prod(float(diagram.size[a]) for a in node.axes)
    best = 0.0
    for phase in capacity * np.geomspace(0.05, 50, 200):
        reach = capacity + phase
        full = reach * reach / (4 * width * (width + second))
        best = max(best, float(phase) * math.floor(pairs / (full + reach)))
    statement = "T floor(q x / ((M+T)²/(4d(d+e)) + M + T)) (phases; sharpens 2402.07443)"
    return Bound("sandwich", node.name, best, statement) if best > 0 else None


def _are_images(diagram: Diagram, node: Node) -> bool:
    """Whether both operands are elementwise images of external arrays, and not of the same one
    (a Gram matrix needs less: an element serves as row and as column)."""
    above = ancestors(diagram)
    sources = [
        {
            a
            for a in (*above[n], n)
            if a in diagram.array and is_image(diagram, a, diagram.axes_of(n))
        }
        for n in node.inputs
    ]
    images = all(
        is_image(diagram, name, diagram.axes_of(name)) and is_general(diagram, node, name)
        for name in node.inputs
    )
    arrays = [above[n] | {n} for n in node.inputs]
    shared = {a for a in arrays[0] & arrays[1] if len(diagram.axes_of(a)) > 1}
    return images and not sources[0] & sources[1] and not shared


def _second_width(
    diagram: Diagram, node: Node, rows: frozenset[str], columns: frozenset[str]
) -> float:
    """The width e of the V operand: axes besides x of what a contraction of a map of S has as its
    other input; else 0.

    V must be another external array than B: latent attention reads one array as both.
    """
    above = ancestors(diagram)
    sources = {name for name in node.inputs for name in (above.get(name, frozenset()) | {name})}
    width = 0.0
    for later in diagram.nodes:
        if later.kind != "contract" or node.name not in above[later.name]:
            continue
        pairs = set(later.inputs) & set(maps_of(diagram, node))
        for name in later.inputs if pairs else ():
            if name in sources or node.name in above.get(name, frozenset()):
                continue
            axes = set(diagram.axes_of(name))
            if columns <= axes and columns <= set(later.over) and not rows & axes:
                mine = math.prod(
                    float(diagram.size[a]) for a in axes - set(later.over) - set(node.axes)
                )
                width = max(width, mine if name in diagram.array else 0.0)
    return width


def _has_mask_below(diagram: Diagram, node: Node) -> bool:
    """Whether a mask may make some of the products unnecessary."""
    above = ancestors(diagram)
    return any(n.kind == "mask" and node.name in above[n.name] for n in diagram.nodes)
