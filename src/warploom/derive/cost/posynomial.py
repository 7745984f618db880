"""Posynomials: sums of positive coefficients times products of powers.

Memory and transfer of a fused kernel are posynomials in the tile sizes, which is what makes their
minimum a geometric program. Arithmetic here is a dictionary
from exponents to coefficient: sympy is only used to print or to prove.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.errors import InputError

Power = int | Fraction  # whole ones as int, whose arithmetic takes a tenth of the time
Exponents = tuple[tuple[str, Power], ...]


@dataclass(frozen=True)
class Monomial:
    """`coefficient * prod(variable ** power)` with a positive coefficient."""

    coefficient: float
    powers: Exponents

    def power(self, variable: str) -> Power:
        """The exponent of a variable, 0 when absent."""
        return dict(self.powers).get(variable, 0)

    def variables(self) -> frozenset[str]:
        """The variables with a non-zero exponent."""
        return frozenset(name for name, _ in self.powers)

    def value(self, values: Mapping[str, float]) -> float:
        """The number at a point; raises `KeyError` for a variable without a value."""
        return self.coefficient * math.prod(
            float(values[name]) ** float(power) for name, power in self.powers
        )


@dataclass(frozen=True)
class Posynomial:
    """A sum of monomials, at most one for each exponent vector. Immutable and hashable."""

    terms: tuple[Monomial, ...]

    @classmethod
    def build(cls, terms: Iterable[tuple[Exponents, float]]) -> Posynomial:
        """Collect like terms; raises `InputError` for a coefficient that is not positive."""
        collected: dict[Exponents, float] = {}
        for powers, coefficient in terms:
            collected[powers] = collected.get(powers, 0.0) + coefficient
        for powers, coefficient in collected.items():
            if not coefficient > 0:
                raise InputError(
                    f"posynomial term {dict(powers)} has coefficient {coefficient}: must be > 0"
                )
        return cls(tuple(Monomial(collected[key], key) for key in sorted(collected)))

    def __add__(self, other: Posynomial) -> Posynomial:
        """The sum, like terms collected."""
        return Posynomial.build(
            (term.powers, term.coefficient) for term in (*self.terms, *other.terms)
        )

    def __mul__(self, other: Posynomial) -> Posynomial:
        """The product, expanded."""
        return Posynomial.build(
            (_join(left.powers, right.powers), left.coefficient * right.coefficient)
            for left in self.terms
            for right in other.terms
        )

    def scaled(self, factor: float) -> Posynomial:
        """The same posynomial times a positive number."""
        return Posynomial.build((term.powers, term.coefficient * factor) for term in self.terms)

    def variables(self) -> frozenset[str]:
        """Every variable that occurs."""
        return frozenset(name for term in self.terms for name in term.variables())

    def value(self, values: Mapping[str, float]) -> float:
        """The number at a point."""
        return math.fsum(term.value(values) for term in self.terms)

    def grid(self, values: Mapping[str, Any]) -> Any:
        """The value on broadcastable numbers and numpy arrays of points (float64)."""
        total: Any = 0.0
        for term in self.terms:
            part: Any = term.coefficient
            for name, power in term.powers:
                # Numbers stay Python's, which are faster than arrays without a dimension.
                if power == 1:
                    part = part * values[name]
                elif power == -1:
                    part = part * (1.0 / values[name])
                else:
                    part = part * values[name] ** float(power)
            total = total + part
        return total

    def substitute(self, values: Mapping[str, float | Posynomial]) -> Posynomial:
        """Replace variables by numbers or by single-term posynomials; the rest stays symbolic."""
        total = ZERO
        for term in self.terms:
            part = constant(term.coefficient)
            for name, power in term.powers:
                given = values.get(name)
                if given is None:
                    part = part * variable(name, power)
                elif isinstance(given, Posynomial):
                    part = part * given.raised(power)
                else:
                    part = part * constant(float(given) ** float(power))
            total = total + part
        return total

    def raised(self, power: Power) -> Posynomial:
        """A power: any for one term, a natural number for several."""
        exponent = Fraction(power)
        if len(self.terms) == 1:
            term = self.terms[0]
            powers = tuple(
                (name, _plain(value * exponent)) for name, value in term.powers if exponent
            )
            return Posynomial.build([(powers, term.coefficient ** float(exponent))])
        if exponent.denominator != 1 or exponent < 0:
            raise InputError(f"cannot raise a sum to the power {exponent}: use a natural number")
        result = constant(1.0)
        for _ in range(int(exponent)):
            result = result * self
        return result

    def symbolic(self) -> Any:
        """The same expression in sympy, every symbol positive."""
        sp = sympy()
        total = sp.Integer(0)
        for term in self.terms:
            part = sp.nsimplify(term.coefficient, rational=True)
            for name, power in term.powers:
                exponent = sp.Rational(power.numerator, power.denominator)
                part = part * sp.Symbol(name, positive=True) ** exponent
            total = total + part
        return total

    def __str__(self) -> str:
        """Readable: `2 q d + 2 q x d / g_q`."""
        return " + ".join(_show(term) for term in self.terms) or "0"


ZERO = Posynomial(())


def constant(value: float) -> Posynomial:
    """A number as a posynomial; zero is the empty sum."""
    return Posynomial.build([((), float(value))]) if value else ZERO


def variable(name: str, power: Power = 1) -> Posynomial:
    """One variable to a power."""
    return Posynomial.build([(((name, _plain(power)),) if power else (), 1.0)])


def product(factors: Iterable[Posynomial]) -> Posynomial:
    """The product of all factors, 1 when there are none."""
    result = constant(1.0)
    for factor in factors:
        result = result * factor
    return result


def total(parts: Iterable[Posynomial]) -> Posynomial:
    """The sum of all parts, 0 when there are none."""
    result = ZERO
    for part in parts:
        result = result + part
    return result


def _join(left: Exponents, right: Exponents) -> Exponents:
    """Add two exponent vectors, dropping what cancels."""
    powers = dict(left)
    for name, power in right:
        powers[name] = _plain(powers.get(name, 0) + power)
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _plain(power: Power) -> Power:
    return power.numerator if power.denominator == 1 else power


def _show(term: Monomial) -> str:
    """One term as text: coefficient, numerator, then the denominator."""
    above = [_power(name, power) for name, power in term.powers if power > 0]
    below = [_power(name, -power) for name, power in term.powers if power < 0]
    number = f"{term.coefficient:.6g}"
    if above and term.coefficient == 1:
        number = ""
    head = " ".join(([number] if number else []) + above)
    if not below:
        return head
    foot = " ".join(below)
    return f"{head} / ({foot})" if len(below) > 1 else f"{head} / {foot}"


def _power(name: str, power: Power) -> str:
    """A variable and its exponent as text."""
    return name if power == 1 else f"{name}^{power}"
