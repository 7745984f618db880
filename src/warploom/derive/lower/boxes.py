"""Boxes as tile operators: what one box does to tiles, and correction entries on tiles."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from warploom import tile as tl
from warploom.derive.formula.ops import MASKED
from warploom.errors import InputError


def _divide(x: tl.Tile, y: tl.Tile) -> tl.Tile:
    """x over y."""
    return x / y


def _square(x: tl.Tile) -> tl.Tile:
    """x squared."""
    return x * x


def _gelu(x: tl.Tile) -> tl.Tile:
    """GELU, tanh form, as in `ops`."""
    inner = (x + x * x * x * 0.044715) * float(np.sqrt(2.0 / np.pi))
    return x * 0.5 * (tl.tanh(inner) + 1.0)


SIMPLE: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "maximum": tl.maximum,
    "neg": operator.neg,
    "abs": abs,
    "square": _square,
    "exp": tl.exp,
    "log": tl.log,
    "sqrt": tl.sqrt,
    "rsqrt": tl.rsqrt,
    "recip": tl.reciprocal,
    "relu": tl.relu,
    "sigmoid": tl.sigmoid,
    "silu": tl.silu,
    "gelu": _gelu,
    "tanh": tl.tanh,
    "sin": tl.sin,
    "cos": tl.cos,
}
"""Boxes with a tile operator of the same meaning."""
EMPTY = {"sum": 0.0, "mean": 0.0, "max": MASKED, "min": -MASKED, "topk": MASKED}
"""What a masked position and an untouched state hold."""


def clean(name: str) -> str:
    """A name the tile language accepts."""
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"v{text}"


def joined(monoid: str, x: tl.Tile, y: tl.Tile) -> tl.Tile:
    """Two results of one reduction into one (sums of means are scaled by the caller)."""
    if monoid == "max":
        return tl.maximum(x, y)
    return tl.minimum(x, y) if monoid == "min" else x + y


def largest(values: tl.Tile, axis: str, count: int) -> list[tl.Tile]:
    """The `count` largest along an axis, largest first: take the largest, remove it, repeat."""
    found: list[tl.Tile] = []
    for _ in range(count):
        found.append(tl.max_along(values, axis))
        where = tl.argmax_along(values, axis)
        at = tl.coordinate(axis, values.type.size(axis), 0)
        by_rows = values.type.names.index(axis) > 0
        here = where.equals(at) if by_rows else at.equals(where)
        values = tl.where(here, EMPTY["topk"], values)
    return found


def merge_largest(a: Sequence[tl.Tile], b: Sequence[tl.Tile]) -> list[tl.Tile]:
    """The largest of two descending lists: the j-th is max over p + q = j + 1 of
    min(a_p, b_q), counted from one, with a_0 = b_0 = infinity."""
    result: list[tl.Tile] = []
    for j in range(len(a)):
        best = tl.maximum(a[j], b[j])
        for p in range(1, j + 1):
            best = tl.maximum(best, tl.minimum(a[p - 1], b[j - p]))
        result.append(best)
    return result


def expression(formula: Any, values: Mapping[str, tl.Tile]) -> Any:
    """A correction entry (a sympy expression) on tiles; raises for what has no tile form."""
    if formula.is_Symbol:
        return values[str(formula)]
    if formula.is_number:
        return float(formula)
    if formula.is_Add:
        return _sum(formula, values)
    parts = [expression(part, values) for part in formula.args]
    if formula.is_Mul:
        return _folded(parts, operator.mul)
    if formula.is_Pow and formula.exp == 2:
        return parts[0] * parts[0]
    if formula.is_Pow and formula.exp == -1:
        return tl.reciprocal(parts[0])
    if str(formula.func) == "exp":
        return tl.exp(parts[0])
    raise InputError(f"a correction uses {formula.func}, which has no tile form")


def _sum(formula: Any, values: Mapping[str, tl.Tile]) -> Any:
    """A sum with the terms that have a negative factor subtracted."""
    plus = [expression(t, values) for t in formula.args if not t.could_extract_minus_sign()]
    minus = [expression(-t, values) for t in formula.args if t.could_extract_minus_sign()]
    total = _folded(plus, operator.add) if plus else -_folded(minus[:1], operator.add)
    for part in minus if plus else minus[1:]:
        total = total - part
    return total


def _folded(parts: Sequence[Any], join: Any) -> Any:
    """All parts joined, a tile first so that numbers meet a tile."""
    tiles = [part for part in parts if isinstance(part, tl.Tile)]
    numbers = [part for part in parts if not isinstance(part, tl.Tile)]
    if not tiles:
        return float(np.prod(numbers) if join is operator.mul else np.sum(numbers))
    total = tiles[0]
    for part in (*tiles[1:], *numbers):
        total = join(total, part)
    return total
