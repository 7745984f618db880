"""Masks as loop bounds: skipping a masked slice is exact when it adds nothing to any reduction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.formula.ops import MASKED, MONOIDS, op
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lemmas.cascade import ancestors


def with_bounds(kernel: Kernel) -> Kernel:
    """Let masks bound stream loops where every reduction of the axis ignores masked elements."""
    bounds: list[tuple[str, str]] = []
    for axis, index in kernel.stream_index.items():
        if axis in kernel.splits:
            continue
        closing = [n for n in kernel.states if index in kernel.closed_loops(n)]
        for mask in kernel.body.nodes:
            if mask.kind != "mask" or mask.attr("column") != axis:
                continue
            rows = kernel.depth_of_axis.get(str(mask.attr("row")), 99)
            long_enough = kernel.body.size[axis] >= kernel.body.size[str(mask.attr("row"))]
            if (
                rows < index
                and long_enough
                and closing
                and all(annihilates(kernel.body, n, mask) for n in closing)
            ):
                bounds.append((axis, mask.name))
                break
    return replace(kernel, bound_by=tuple(bounds))


def annihilates(body: Diagram, reduction: Node, mask: Node) -> bool:
    """Whether a masked element contributes the reduction's identity, tested at random values."""
    if mask.name not in ancestors(body)[reduction.name]:
        return False
    rng = np.random.default_rng(5)
    monoid = MONOIDS.get(reduction.op if reduction.kind == "reduce" else "sum")
    if monoid is None or monoid.name == "mean":
        return False
    for _ in range(4):
        values: dict[str, float] = {mask.name: float(mask.attr("fill", MASKED))}
        element = float(np.prod([_probe(body, name, values, rng) for name in reduction.inputs]))
        limit = {
            "sum": abs(element) < 1e-30,
            "max": element <= MASKED / 2,
            "min": element >= -MASKED / 2,
        }
        if not limit[monoid.name]:
            return False
    return True


def _probe(body: Diagram, name: str, values: dict[str, float], rng: np.random.Generator) -> float:
    """One value at scalar random leaves, maps applied."""
    if name not in values:
        node = body.node.get(name)
        if node is not None and node.kind == "const":
            values[name] = float(node.attr("value"))
        elif node is not None and node.kind == "map":
            apply = op(node.op).apply
            assert apply is not None
            values[name] = float(apply(*(_probe(body, s, values, rng) for s in node.inputs)))
        else:
            values[name] = float(rng.uniform(0.5, 2.0))
    return values[name]
