"""Whether a composition of maps is a polynomial: what is established by its growth at infinity.

A real function near infinity (its germ there) is a polynomial with known coefficients, or belongs
to a class of functions that are certainly none, or is not known. Rules, for germs at +infinity:

* algebraic, no polynomial: roots of polynomials that are no squares, reciprocals of polynomials
  that are no constants. Adding a polynomial or scaling keeps it so.
* transcendental (no algebraic function): exp, tanh, sigmoid, sin, cos of an algebraic function that
  is no constant (Ax-Lindemann), log of a polynomial. Algebraic functions form a field that is
  closed under roots and absolute values, so sums, products, quotients of a transcendental function
  with an algebraic one (not zero) stay transcendental, and so do its square, root and reciprocal.
* bounded, no constant: exp or tanh of such a function. A polynomial that is bounded is constant.
* other: a sum of a bounded one and a polynomial: no polynomial, nothing else is known.

Two transcendental functions may cancel (exp(s) - exp(s), tanh(s) / tanh(s), log(exp(s))): what is
made of both is not known, and what is not known is never called "no polynomial".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from warploom.derive.formula.ops import op

Kind = Literal["polynomial", "algebraic", "transcendental", "bounded", "other"]

MOST_DEGREE = 8
"""Of a polynomial that is followed: what grows faster is not known."""
CANCELLED = Fraction(1, 10**9)
"""Coefficients that cancel to less than this share may be zero: some are rounded."""


@dataclass(frozen=True)
class Germ:
    """A function near +infinity: its kind, the coefficients of a polynomial (lowest first, none for
    zero), and whether another one stays bounded there."""

    kind: Kind
    coefficients: tuple[Fraction, ...] = ()
    bounded: bool = False

    @property
    def constant(self) -> bool:
        """Whether it is a constant."""
        return self.kind == "polynomial" and len(self.coefficients) <= 1

    @property
    def value(self) -> Fraction:
        """The value of a constant."""
        return self.coefficients[0] if self.coefficients else Fraction(0)

    @property
    def sign(self) -> int:
        """The sign of a polynomial near infinity."""
        last = self.coefficients[-1] if self.coefficients else Fraction(0)
        return (last > 0) - (last < 0)


Known = Germ | None


def polynomial(*coefficients: Fraction | int) -> Germ:
    """A polynomial germ, lowest coefficient first, zeros at the top dropped."""
    kept = [Fraction(c) for c in coefficients]
    while kept and kept[-1] == 0:
        kept.pop()
    return Germ("polynomial", tuple(kept))


ALGEBRAIC, OTHER = Germ("algebraic"), Germ("other")
TRANSCENDENTAL, BOUNDED = Germ("transcendental"), Germ("bounded", bounded=True)
WAVE = Germ("transcendental", bounded=True)
"""Transcendental and bounded."""


def image(name: str, parts: Sequence[Known]) -> Known:
    """The germ of a map of germs; None where it is not known."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts) or name not in RULES:
        return None
    if all(part.constant for part in given) and name not in EXACT:
        return _number(name, given)
    found = RULES[name](*given)
    grown = found is not None and len(found.coefficients) > MOST_DEGREE + 1
    return None if grown else found


def _number(name: str, given: Sequence[Germ]) -> Known:
    """A function of constants, rounded."""
    apply = op(name).apply
    assert apply is not None
    try:
        with np.errstate(all="ignore"):
            value = float(apply(*(np.float64(part.value) for part in given)))
    except OverflowError:
        return None  # a coefficient beyond float64
    return polynomial(Fraction(value)) if math.isfinite(value) else None


def _add(a: Germ, b: Germ) -> Known:
    if a.kind != "polynomial":
        a, b = b, a
    if a.kind != "polynomial":
        alike = {a.kind, b.kind} == {"algebraic", "transcendental"}
        return TRANSCENDENTAL if alike else None
    if b.kind == "polynomial":
        return _poly_sum(a.coefficients, b.coefficients)
    if b.kind == "bounded":
        return b if a.constant else OTHER
    return b if a.constant or b.kind != "transcendental" else TRANSCENDENTAL


def _poly_sum(a: tuple[Fraction, ...], b: tuple[Fraction, ...]) -> Known:
    short, long = sorted((a, b), key=len)
    total: list[Fraction] = []
    for x, y in zip((*short, *(Fraction(0) for _ in long[len(short) :])), long, strict=True):
        if x + y and abs(x + y) < CANCELLED * max(abs(x), abs(y)):
            return None
        total.append(x + y)
    return polynomial(*total)


def _neg(a: Germ) -> Known:
    return polynomial(*(-c for c in a.coefficients)) if a.kind == "polynomial" else a


def _sub(a: Germ, b: Germ) -> Known:
    minus = _neg(b)
    return None if minus is None else _add(a, minus)


def _mul(a: Germ, b: Germ) -> Known:
    if a.kind != "polynomial":
        a, b = b, a
    if a.kind != "polynomial":
        alike = {a.kind, b.kind} == {"algebraic", "transcendental"}
        return TRANSCENDENTAL if alike else None
    if b.kind == "polynomial":
        total = [Fraction(0)] * (len(a.coefficients) + len(b.coefficients))
        for i, x in enumerate(a.coefficients):
            for j, y in enumerate(b.coefficients):
                total[i + j] += x * y
        return polynomial(*total)
    if a.constant:
        return b if a.value else polynomial()
    return TRANSCENDENTAL if b.kind == "transcendental" else None


def _square(a: Germ) -> Known:
    if a.kind in ("transcendental", "bounded"):
        return a
    return _mul(a, a) if a.kind == "polynomial" else None


def _recip(a: Germ) -> Known:
    if a.kind == "polynomial":
        return None if not a.coefficients else ALGEBRAIC
    return TRANSCENDENTAL if a.kind == "transcendental" else None


def _div(a: Germ, b: Germ) -> Known:
    if b.constant:
        return _mul(a, polynomial(1 / b.value)) if b.value else None
    below = _recip(b)
    return None if below is None else _mul(a, below)


def _sqrt(a: Germ) -> Known:
    if a.kind == "transcendental":
        return Germ("transcendental", bounded=a.bounded)
    if a.kind != "polynomial" or a.sign <= 0:
        return None
    root = _root([c / a.coefficients[-1] for c in a.coefficients])
    if root is None:
        return ALGEBRAIC
    lead = a.coefficients[-1]
    return _mul(polynomial(Fraction(math.sqrt(lead))), root) if root.coefficients else None


def _root(monic: list[Fraction]) -> Known:
    """The root of a square of a polynomial; none for what is no square, and a germ without
    coefficients for what may be one but for rounding."""
    degree, odd = divmod(len(monic) - 1, 2)
    if odd:
        return None
    root = [Fraction(0)] * degree + [Fraction(1)]
    for k in range(degree - 1, -1, -1):
        known = sum((root[i] * root[degree + k - i] for i in range(k + 1, degree)), Fraction(0))
        root[k] = (monic[degree + k] - known) / 2
    found = polynomial(*root)
    squared = _mul(found, found)
    assert squared is not None
    gap = max(abs(x - y) for x, y in zip(squared.coefficients, monic, strict=True))
    if gap and gap < CANCELLED * max(abs(c) for c in monic):
        return polynomial()
    return None if gap else found


def _rsqrt(a: Germ) -> Known:
    root = _sqrt(a)
    if root is None or root.kind == "algebraic":
        # The reciprocal of a root that is no polynomial: a polynomial would be one over it.
        return root
    return _recip(root)


def _abs(a: Germ) -> Known:
    if a.kind == "polynomial":
        return a if a.sign >= 0 else _neg(a)
    return None if a.kind == "other" else a


def _relu(a: Germ) -> Known:
    if a.kind != "polynomial":
        return None
    return a if a.sign > 0 else polynomial()


def _maximum(a: Germ, b: Germ) -> Known:
    gap = _sub(a, b)
    if gap is None or gap.kind != "polynomial":
        return None
    return a if gap.sign >= 0 else b


def _exp(a: Germ) -> Known:
    if a.kind == "polynomial":
        return WAVE if a.sign < 0 else TRANSCENDENTAL
    return TRANSCENDENTAL if a.kind == "algebraic" else BOUNDED if a.bounded else None


def _log(a: Germ) -> Known:
    return TRANSCENDENTAL if a.kind == "polynomial" and a.sign > 0 else None


def _wave(a: Germ) -> Known:
    """tanh and sigmoid, strictly monotone: bounded, and no constant of what is none."""
    return WAVE if a.kind in ("polynomial", "algebraic") else BOUNDED if a.bounded else None


def _turn(a: Germ) -> Known:
    """sin and cos, which are constant on many values."""
    return WAVE if a.kind in ("polynomial", "algebraic") else None


def _gated(a: Germ) -> Known:
    """silu and gelu: the argument times a transcendental function of it."""
    return TRANSCENDENTAL if a.kind in ("polynomial", "algebraic") else None


RULES: dict[str, Callable[..., Known]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "maximum": _maximum,
    "neg": _neg,
    "exp": _exp,
    "log": _log,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "square": _square,
    "recip": _recip,
    "abs": _abs,
    "relu": _relu,
    "sigmoid": _wave,
    "silu": _gated,
    "gelu": _gated,
    "tanh": _wave,
    "sin": _turn,
    "cos": _turn,
}
"""What each map makes of germs that are not all constant."""
EXACT = frozenset({"add", "sub", "mul", "neg", "square", "abs", "relu", "maximum"})
"""Maps whose rule is exact on constants, too."""
