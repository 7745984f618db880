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


def _silu(x: Any) -> Any:
    """x times its logistic function."""
    return x * _sigmoid(x)


def _relu(x: Any) -> Any:
    """The positive part."""
    return np.maximum(x, 0.0)


def _rsqrt(x: Any) -> Any:
    """1 / sqrt(x) on arrays."""
    return 1 / np.sqrt(x)


def _rsqrt_formula(x: Any) -> Any:
    """x to the power minus one half, exactly."""
    return x ** (-_half())


def _square(x: Any) -> Any:
    """x squared."""
    return x**2


def _divided(x: Any, y: Any) -> Any:
    """x over y."""
    return x / y


def _recip(x: Any) -> Any:
    """1 / x."""
    return 1 / x


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


MAPS: tuple[Op, ...] = (
    Op("add", "map", 2, "fp", 1, np.add, operator.add, "+"),
    Op("sub", "map", 2, "fp", 1, np.subtract, operator.sub, "−"),
    Op("mul", "map", 2, "fp", 1, np.multiply, operator.mul, "×"),
    Op("div", "map", 2, "fp", 1, np.divide, _divided, "÷"),
    Op("maximum", "map", 2, "fp", 1, np.maximum, _opaque("maximum"), "max"),
    Op("neg", "map", 1, "fp", 1, np.negative, operator.neg, "−"),
    Op("exp", "map", 1, "special", 1, np.exp, _sp("exp"), "exp"),
    Op("log", "map", 1, "special", 1, np.log, _sp("log"), "log"),
    Op("sqrt", "map", 1, "special", 1, np.sqrt, _sp("sqrt"), "√"),
    Op("rsqrt", "map", 1, "special", 1, _rsqrt, _rsqrt_formula, "1/√"),
    Op("square", "map", 1, "fp", 1, np.square, _square, "x²"),
    Op("recip", "map", 1, "special", 1, np.reciprocal, _recip, "1/x"),
    Op("abs", "map", 1, "fp", 1, np.abs, _opaque("abs"), "|x|"),
    Op("relu", "map", 1, "fp", 1, _relu, _opaque("relu"), "relu"),
    Op("sigmoid", "map", 1, "special", 2, _sigmoid, _opaque("sigmoid"), "σ"),
    Op("silu", "map", 1, "special", 3, _silu, _opaque("silu"), "silu"),
    Op("gelu", "map", 1, "special", 6, _gelu, _opaque("gelu"), "gelu"),
    Op("tanh", "map", 1, "special", 1, np.tanh, _opaque("tanh"), "tanh"),
    Op("sin", "map", 1, "special", 1, np.sin, _sp("sin"), "sin"),
    Op("cos", "map", 1, "special", 1, np.cos, _sp("cos"), "cos"),
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


def _half() -> Any:
    """One half as an exact sympy number."""
    return _sp("Rational")(1, 2)


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
