"""Lower bounds from the products of a diagram taken together; with them attention's law is tight.

Fast memory holds M values; a schedule is any order of loads, stores and multiply-adds. *Items* are
the elements of external arrays (or of elementwise images of them), of each intermediate between two
products (a score or what became of it: one item a pair), and of each output's running sum.

**products**: W multiply-adds of several contractions, each evaluated once, each result element one
running sum. Cut the run so that every piece brings T new items within reach (a load, or a sum's
birth). At most M + T items are in reach of a piece. If the contractions fit one three-dimensional
index space (`embeds`), a piece completes at most ((M + T)/3)^(3/2) of them (Loomis & Whitney, and
the means inequality), so T·(W/((M + T)/3)^(3/2) - 1) items are brought; T = 2M gives 2W/√M - 2M.
Births of outputs are paid back by their stores, those of the B intermediates are taken off:

    H >= 2W/√M - B - 2M.            matmul: 2mnk/√M - 2M.   attention: 4qxd/√M - qx - 2M.

The argument is that of Smith et al. 1702.02017 for one matmul; that products on both sides of a
nonlinear function share the scores, and pay for them once, is ours.

**attention** (S = A·B with summed width d, an opaque function g, O = g(S)·V with e columns): a
pair's g(S_ij) is in reach of a piece if it is an item, or if S_ij was summed up within the piece
from whole rows: a items of A and b of B give at most ab/d² such pairs. With c pairs as items, v
items of V and o of O, a + b + v + o + c <= R = M + T, the piece completes at most

    √((ab/d² + c)·v·o)  <=  max( R²/(16d), (R/3)^(3/2) )

products g(S_ij) V_jm: for given v and o the best split between a = b and c is at an end, as the sum
is convex in it. (Where V is B itself, v = b is not counted twice: R²/(8d).) So H >= T(qxe/F - 1)
for every T; T = M gives 4qxde/M - M for M >= 4.74 d². S may be recomputed; each output is one
running sum a part, and parts meet through stores.

FlashAttention's law is 2qd + 4qxd²/M. So for M >= 4.74 d² no schedule beats its leading term; at
M = 4d² the first bound meets it (4d²/M - (4d/√M - 1) = (2d/√M - 1)²); below about 0.69 d² the
unfused 4qxd/√M + qx is within 2qx of the first bound. Each structure where it is chosen.
Neither bound speaks of fast matrix multiplication, approximation, or reassociation, which is why
what is summed over an intermediate has to be established to be no polynomial in it (`operands`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from warploom.derive.bounds.operands import frames, is_general, is_opaque, own_output, terms
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.lemmas.cascade import ancestors

MOST_PRODUCTS = 6
"""Contractions whose subsets are all tried."""


@dataclass(frozen=True)
class Product:
    """A contraction as a box in index space: three groups of axes, three classes of items.

    `rows`, `columns`, `summed`: its axes without batch axes. `first`, `second`, `result`: the class
    each element of the operands and of the result is an item of. `work`: multiply-adds needed.
    """

    name: str
    rows: frozenset[str]
    columns: frozenset[str]
    summed: frozenset[str]
    first: str
    second: str
    result: str
    work: float

    @property
    def classes(self) -> tuple[str, str, str]:
        """By the group each lacks: columns, rows, summed."""
        return self.first, self.second, self.result


def tensors(diagram: Diagram) -> tuple[Product, ...]:
    """The contractions the argument may count: two operands, each an external array's image (of
    full rank) or an intermediate's; results that are outputs or pass an opaque function."""
    found: list[Product] = []
    for node in diagram.nodes:
        groups = frames(diagram, node) if node.kind == "contract" else None
        if groups is None or not (own_output(diagram, node) or is_opaque(diagram, node)):
            continue
        known = {product.name for product in found}
        classes = [item_class(diagram, name, known) for name in node.inputs]
        if "" in classes or classes[0] == classes[1]:
            continue
        given = [i for i, name in zip(node.inputs, classes, strict=True) if name in diagram.array]
        if not all(is_general(diagram, node, operand) for operand in given):
            continue
        rows, columns, _ = groups
        found.append(
            Product(
                node.name,
                rows,
                columns,
                frozenset(node.over),
                classes[0],
                classes[1],
                node.name,
                needed(diagram, node) * math.prod(float(diagram.size[a]) for a in node.over),
            )
        )
    return tuple(found)


def item_class(diagram: Diagram, value: str, known: set[str]) -> str:
    """What an operand's elements are items of: an external array or a counted contraction, reached
    through maps that keep all axes; "" when there is no such thing."""
    if value in diagram.array or value in known:
        return value
    node = diagram.node[value]
    if node.kind not in ("map", "mask"):
        return ""
    wide = [s for s in node.inputs if set(diagram.axes_of(s)) == set(node.axes)]
    classes = [item_class(diagram, source, known) for source in wide]
    return next((c for c in classes if c), "")


def mergeable(diagram: Diagram) -> tuple[frozenset[str], ...]:
    """Sets of contractions that are added up: a schedule may keep them as one running sum."""
    found: list[frozenset[str]] = []
    for node in diagram.nodes:
        if node.op in ("add", "sub"):
            added = frozenset[str]().union(*(terms(diagram, value) for value in node.inputs))
            found += [added] if len(added) > 1 else []
    return tuple(found)


def needed(diagram: Diagram, node: Node) -> float:
    """Result elements that must exist: all, or those a mask below lets through."""
    above = ancestors(diagram)
    share = 1.0
    for mask in diagram.nodes:
        if mask.kind != "mask":
            continue
        row, column = str(mask.attr("row")), str(mask.attr("column"))
        axes = set(node.axes) | set(node.over)
        if {row, column} <= axes and (
            node.name in above[mask.name] or mask.name in above[node.name]
        ):
            share = min(share, visible(diagram, mask) / diagram.size[row] / diagram.size[column])
    return share * math.prod(float(diagram.size[a]) for a in node.axes)


def visible(diagram: Diagram, mask: Node) -> float:
    """(row, column) pairs a causal or window mask lets through, ends aligned."""
    q, x = diagram.size[str(mask.attr("row"))], diagram.size[str(mask.attr("column"))]
    ends = np.arange(q) + x - q + 1
    window = int(mask.attr("window"))
    seen = np.minimum(ends, window) if window else ends
    return float(np.clip(seen, 0, x).sum())


def embeds(chosen: Sequence[Product]) -> bool:
    """Whether contractions fit one index space: each gets its three groups as coordinates so that a
    class they share lies on the same two, and no two share all three (then a point would count
    twice). Two contractions that share one class can always be told apart along the third."""
    for first, second in itertools.combinations(chosen, 2):
        if len(set(first.classes) & set(second.classes)) > 1:
            return False
    return any(_consistent(chosen, turns) for turns in _turnings(len(chosen)))


def _turnings(count: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Which coordinate each contraction's (columns, rows, summed) is; the first one's is fixed."""
    every = tuple(itertools.permutations(range(3)))
    for rest in itertools.product(every, repeat=count - 1):
        yield ((0, 1, 2), *rest)  # type: ignore[misc]


def _consistent(chosen: Sequence[Product], turns: Sequence[tuple[int, int, int]]) -> bool:
    """Whether every shared class lacks the same coordinate wherever it occurs, and the coordinates
    joined by shared classes leave every pair of contractions apart somewhere."""
    lacks: dict[str, int] = {}
    for product, turn in zip(chosen, turns, strict=True):
        for place, name in enumerate(product.classes):
            if lacks.setdefault(name, turn[place]) != turn[place]:
                return False
    joined = {(i, c): (i, c) for i in range(len(chosen)) for c in range(3)}

    def root(key: tuple[int, int]) -> tuple[int, int]:
        while joined[key] != key:
            key = joined[key]
        return key

    for (i, first), (j, second) in itertools.combinations(enumerate(chosen), 2):
        for name in set(first.classes) & set(second.classes):
            for c in range(3):
                if c != lacks[name]:
                    joined[root((i, c))] = root((j, c))
    return not any(
        all(root((i, c)) == root((j, c)) for c in range(3))
        for i, j in itertools.combinations(range(len(chosen)), 2)
    )


def products_value(diagram: Diagram, capacity: float) -> tuple[float, tuple[str, ...]]:
    """(the best of 2W/√M - B - 2M over sets of contractions, that set)."""
    every = tensors(diagram)[:MOST_PRODUCTS]
    added = mergeable(diagram)
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for count in range(1, len(every) + 1):
        for chosen in itertools.combinations(every, count):
            names = tuple(product.name for product in chosen)
            if any(len(group & set(names)) > 1 for group in added) or not embeds(chosen):
                continue
            work = sum(product.work for product in chosen)
            value = 2 * work / math.sqrt(capacity) - _born(diagram, chosen) - 2 * capacity
            if value > best[0]:
                best = value, names
    return best


def _born(diagram: Diagram, chosen: Sequence[Product]) -> float:
    """Births not paid back by a store: of every intermediate the products touch (whether or not the
    product that makes it is counted), and beyond the first sum of an output."""
    born = 0.0
    stored: set[str] = set()
    for name in dict.fromkeys(c for product in chosen for c in product.classes):
        node = diagram.node.get(name)
        if node is None:
            continue
        output = own_output(diagram, node)
        born += 0.0 if output and output not in stored else needed(diagram, node)
        stored.add(output)
    return born


def sandwich_value(diagram: Diagram, capacity: float) -> tuple[float, tuple[str, ...]]:
    """(the best T·(W/F - 1) over pairs S = A·B, O = g(S)·V, that pair)."""
    every = tensors(diagram)
    by_name = {product.name: product for product in every}
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for second in every:
        for place in (0, 1):
            inner = by_name.get((second.first, second.second)[place])
            if inner is None or second.summed not in (inner.rows, inner.columns):
                continue
            value_class = (second.second, second.first)[place]
            shared = value_class in (inner.first, inner.second)
            width = math.prod(float(diagram.size[a]) for a in inner.summed)
            value = _best_piece(second.work, capacity, width, 8.0 if shared else 16.0)
            if value > best[0]:
                best = value, (inner.name, second.name)
    return best


def piece(reach: float, width: float, constant: float = 16.0) -> float:
    """F(R): the most products g(S_ij) V_jm that R items allow."""
    return max(reach * reach / (constant * width), (reach / 3) ** 1.5)


def _best_piece(work: float, capacity: float, width: float, constant: float) -> float:
    """max over T of T·(W/F(M + T) - 1)."""
    turns = capacity * np.geomspace(0.05, 50, 300)
    return max(float(t) * (work / piece(capacity + float(t), width, constant) - 1) for t in turns)
