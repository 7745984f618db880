"""The operators a box may hold, as one table: arity, numpy meaning, symbolic meaning, pipe, cost.

`map` boxes are weaved over every axis they meet. `reduce` and `contract` remove axes with a monoid.
`scan` keeps its axis and carries a state along it. `view` reindexes an array affinely, `mask` fills
what a condition excludes. A new operator is one row here and nothing else.

Costs: `flops` counts operations for one output element of a map; a contraction costs two for each
product; `pipe` is the functional unit that executes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np

from warploom.derive.formula.external import sympy
from warploom.errors import InputError

Kind = Literal["map", "const", "reduce", "contract", "scan", "scan_contract", "view", "mask"]
Pipe = Literal["tensor", "special", "fp", "none"]

MASKED = -1.0e30
"""What a masked score gets. Finite, so that `exp(s - max)` of a wholly masked slice is no NaN and
the correction to a later, unmasked maximum turns its weight into an exact zero."""


@dataclass(frozen=True)
class Op:
    """One operator. `apply` acts on aligned numpy arrays, `formula` on sympy expressions."""

    name: str
    kind: Kind
    arity: int
    pipe: Pipe
    flops: float
    apply: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    glyph: str = ""


def _gelu(x: Any) -> Any:
    """GELU, tanh form (Hendrycks & Gimpel 2016)."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Any) -> Any:
    """Logistic function without overflow on either side."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _divided(x: Any, y: Any) -> Any:
    """x over y."""
    return x / y


def _sp(name: str) -> Callable[..., Any]:
    """A sympy function looked up when first applied."""

    def call(*args: Any) -> Any:
        return getattr(sympy(), name)(*args)

    return call


def _opaque(name: str) -> Callable[..., Any]:
    """An uninterpreted sympy function: identities may not look inside it."""

    def call(*args: Any) -> Any:
        return _sp("Function")(name)(*args)

    return call


def _unary(
    name: str,
    pipe: Pipe,
    flops: float,
    apply: Callable[[Any], Any],
    formula: Callable[[Any], Any],
    glyph: str,
) -> Op:
    return Op(name, "map", 1, pipe, flops, apply, formula, glyph)


MAPS: tuple[Op, ...] = (
    Op("add", "map", 2, "fp", 1, np.add, operator.add, "+"),
    Op("sub", "map", 2, "fp", 1, np.subtract, operator.sub, "−"),
    Op("mul", "map", 2, "fp", 1, np.multiply, operator.mul, "×"),
    Op("div", "map", 2, "fp", 1, np.divide, _divided, "÷"),
    Op("maximum", "map", 2, "fp", 1, np.maximum, _opaque("maximum"), "max"),
    _unary("neg", "fp", 1, np.negative, operator.neg, "−"),
    _unary("exp", "special", 1, np.exp, _sp("exp"), "exp"),
    _unary("log", "special", 1, np.log, _sp("log"), "log"),
    _unary("sqrt", "special", 1, np.sqrt, _sp("sqrt"), "√"),
    _unary(
        "rsqrt",
        "special",
        1,
        lambda x: 1 / np.sqrt(x),
        lambda x: x ** -_sp("Rational")(1, 2),
        "1/√",
    ),
    _unary("square", "fp", 1, np.square, lambda x: x**2, "x²"),
    _unary("recip", "special", 1, np.reciprocal, lambda x: 1 / x, "1/x"),
    _unary("abs", "fp", 1, np.abs, _opaque("abs"), "|x|"),
    _unary("relu", "fp", 1, lambda x: np.maximum(x, 0.0), _opaque("relu"), "relu"),
    _unary("sigmoid", "special", 2, _sigmoid, _opaque("sigmoid"), "σ"),
    _unary("silu", "special", 3, lambda x: x * _sigmoid(x), _opaque("silu"), "silu"),
    _unary("gelu", "special", 6, _gelu, _opaque("gelu"), "gelu"),
    _unary("tanh", "special", 1, np.tanh, _opaque("tanh"), "tanh"),
    _unary("sin", "special", 1, np.sin, _sp("sin"), "sin"),
    _unary("cos", "special", 1, np.cos, _sp("cos"), "cos"),
)

OTHERS: tuple[Op, ...] = (
    Op("const", "const", 0, "none", 0, glyph="c"),
    Op("sum", "reduce", 1, "fp", 1, glyph="Σ"),
    Op("max", "reduce", 1, "fp", 1, glyph="max"),
    Op("min", "reduce", 1, "fp", 1, glyph="min"),
    Op("mean", "reduce", 1, "fp", 1, glyph="mean"),
    Op("topk", "reduce", 1, "fp", 1, glyph="top-k"),
    Op("contract", "contract", -1, "tensor", 2, glyph="Σ×"),
    Op("cumsum", "scan", 1, "fp", 1, glyph="Σ≤"),
    Op("affine_scan", "scan", 2, "fp", 2, glyph="a·h+b"),
    Op("scan_contract", "scan_contract", -1, "tensor", 2, glyph="q·Σ≤ k v"),
    Op("view", "view", 1, "none", 0, glyph="⧉"),
    Op("mask", "mask", 1, "fp", 1, glyph="mask"),
)

OPS: dict[str, Op] = {op.name: op for op in (*MAPS, *OTHERS)}


def op(name: str) -> Op:
    """Look an operator up; raises `InputError` listing the nearest names."""
    if name not in OPS:
        near = get_close_matches(name, OPS, n=3) or sorted(OPS)[:5]
        raise InputError(f"no operator {name!r}: nearest are {', '.join(near)}")
    return OPS[name]


@dataclass(frozen=True)
class Monoid:
    """A reduction: `reduce(array, axis)` and `combine(a, count_a, b, count_b)` of two results.

    Counts are the number of reduced elements behind each operand; only `mean` looks at them.
    """

    name: str
    identity: float
    reduce: Callable[[Any, int], Any]
    combine: Callable[[Any, float, Any, float], Any]
    distributes: tuple[str, ...]
    """Map operators that may carry a correction through the reduction: a⊗(b⊕c) = a⊗b ⊕ a⊗c."""


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid("sum", 0.0, lambda x, a: x.sum(a), lambda a, _m, b, _n: a + b, ("mul",)),
    "max": Monoid(
        "max", -np.inf, lambda x, a: x.max(a), lambda a, _m, b, _n: np.maximum(a, b), ("add",)
    ),
    "min": Monoid(
        "min", np.inf, lambda x, a: x.min(a), lambda a, _m, b, _n: np.minimum(a, b), ("add",)
    ),
    "mean": Monoid(
        "mean",
        0.0,
        lambda x, a: x.mean(a),
        lambda a, m, b, n: a + (b - a) * (n / (m + n)),
        ("mul",),
    ),
}


def top_k(x: Any, axis: int, k: int) -> Any:
    """The k largest along `axis`, largest first; the state of the top-k monoid."""
    if x.shape[axis] < k:
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, k - x.shape[axis])
        x = np.pad(x, pad, constant_values=-np.inf)
    part = -np.sort(-x, axis=axis)
    return np.take(part, np.arange(k), axis=axis)
