"""Sums of exponentials below the largest value of their row, in one exchange instead of two.

    top = max_along(x, n); weights = exp2(x * c - top * c); total = sum_along(weights, n)

Where more than one warp has a row, a warp takes the exponentials below its own largest value, and
the warps exchange both, the largest value and the sum: each part of a sum counts exp2 of what its
warp is below the row's. What reads the weights later multiplies them by numbers of their row; it
multiplies by a warp's share too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from warploom.codegen.simt.forms import ROW, SCALAR, TILE, Layout
from warploom.codegen.simt.schedule import WARP
from warploom.tile import FP32, Loop, Op, Program, Var

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Weighted:
    """`total` = the sum of exp2 of (x - `top`) * `scale` along the columns of a row."""

    top: Var
    total: Var
    scale: float


@dataclass(frozen=True)
class WeightedSums:
    """The sums of a program that take one exchange.

    sums      by the sum's op
    tops      ops that give a warp its own largest value, which the sum makes the row's
    products  by op, of weights and a number a row, the operand that is multiplied by the share
    """

    sums: Mapping[int, Weighted] = field(default_factory=dict[int, Weighted])
    tops: frozenset[int] = frozenset()
    products: Mapping[int, tuple[int, Weighted]] = field(
        default_factory=dict[int, tuple[int, Weighted]]
    )


def weighted_sums(program: Program, layout: Layout, forms: Mapping[str, str]) -> WeightedSums:
    """The sums of a program that take one exchange where two were needed."""
    if layout.lanes <= WARP:
        return WeightedSums()
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    readers = Counter(src.name for op in program.ops() for src in op.srcs)
    sums: dict[int, Weighted] = {}
    tops = set[int]()
    products: dict[int, tuple[int, Weighted]] = {}
    for body in _bodies(program.body):
        made = {op.dst.name: op for op in body if op.dst is not None and writers[op.dst.name] == 1}
        for op in body:
            found = _weighted(op, made, readers, forms)
            if found is None:
                continue
            one, top, chain = found
            later = _later(body, op, one, top, chain, readers, forms)
            if later is not None:
                sums[op.id] = one
                tops.add(top.id)
                products |= {number: (operand, one) for number, operand in later.items()}
    return WeightedSums(sums, frozenset(tops), products)


def _bodies(body: tuple[Op | Loop, ...]) -> Iterator[list[Op]]:
    """The ops of every body, without those of loops in it."""
    yield [item for item in body if isinstance(item, Op)]
    for item in body:
        if isinstance(item, Loop):
            yield from _bodies(item.body)


def _weighted(
    op: Op, made: Mapping[str, Op], readers: Mapping[str, int], forms: Mapping[str, str]
) -> tuple[Weighted, Op, frozenset[int]] | None:
    """A sum of weights, the op of its largest value, and the ops between that read this value."""
    if op.kind != "reduce_sum" or op.dst is None or op.dst.type.dtype is not FP32:
        return None
    if forms[op.srcs[0].name] != TILE or op.axis != op.srcs[0].type.names[1]:
        return None
    weights = made.get(op.srcs[0].name)
    if weights is None or weights.kind not in ("exp", "exp2"):
        return None
    below = made.get(weights.srcs[0].name)
    if below is None or below.kind != "sub" or readers[weights.srcs[0].name] != 1:
        return None
    left, right = below.srcs
    x, scale = _scaled(left, made)
    top, top_scale = _scaled(right, made)
    largest = made.get(top.name)
    if largest is None or largest.kind != "reduce_max" or scale != top_scale or scale <= 0:
        return None
    if largest.srcs[0] != x or largest.axis != op.axis or forms[top.name] != ROW:
        return None
    if right != top and readers[right.name] != 1:
        return None
    assert largest.dst is not None and weights.dst is not None
    kinds = (x.type.dtype, top.type.dtype, weights.dst.type.dtype)
    if any(kind is not FP32 for kind in kinds):
        return None
    chain = frozenset(one.id for one in (below, made.get(right.name)) if one is not None)
    factor = scale * (LOG2E if weights.kind == "exp" else 1.0)
    return Weighted(largest.dst, op.dst, factor), largest, chain


def _scaled(var: Var, made: Mapping[str, Op]) -> tuple[Var, float]:
    """A variable as another one times a constant."""
    op = made.get(var.name)
    if op is None or op.kind != "mul":
        return var, 1.0
    for one, other in (op.srcs, reversed(op.srcs)):
        constant = made.get(other.name)
        if constant is not None and constant.kind == "fill" and constant.value is not None:
            return one, float(constant.value)
    return var, 1.0


def _later(
    body: list[Op],
    total: Op,
    one: Weighted,
    top: Op,
    chain: frozenset[int],
    readers: Mapping[str, int],
    forms: Mapping[str, str],
) -> dict[int, int] | None:
    """The products of weights and numbers of a row behind the sum, by the operand of the latter;
    None where something else reads the weights, or the largest value before it is the row's."""
    before, after = body[: (at := body.index(total))], body[at + 1 :]
    if top not in before or any(
        one.top in op.srcs and op.id not in chain for op in before[before.index(top) + 1 :]
    ):
        return None
    weights = total.srcs[0]
    products: dict[int, int] = {}
    for op in after:
        if weights not in op.srcs:
            continue
        other = 1 - op.srcs.index(weights)
        if op.kind != "mul" or forms[op.srcs[other].name] not in (ROW, SCALAR):
            return None
        products[op.id] = other
    everywhere = 1 + len(products) == readers[weights.name]
    here = sum(src == one.top for op in body for src in op.srcs) == readers[one.top.name]
    return products if everywhere and here else None
