"""Index expressions: the integers of a tile program that are not known while tracing.

Sizes of arrays, positions in the grid and loop counters are symbols; offsets and trip counts are
expressions over them. All of them are non-negative except where a subtraction says otherwise;
`//`, `%` and `cdiv` round down as Python's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from warploom.errors import InputError
from warploom.tile.blame import refuse, shown


@dataclass(frozen=True)
class Index:
    """A symbol (`op` "symbol"), a constant ("const") or an operation on two expressions.

    `value` of a symbol is -1 where it may be negative (what a task reads from an array).
    """

    op: str
    name: str = ""
    value: int = 0
    args: tuple[Index, ...] = ()

    def __add__(self, other: IndexLike) -> Index:
        return binary("+", self, other)

    def __radd__(self, other: IndexLike) -> Index:
        return binary("+", other, self)

    def __sub__(self, other: IndexLike) -> Index:
        return binary("-", self, other)

    def __rsub__(self, other: IndexLike) -> Index:
        return binary("-", other, self)

    def __mul__(self, other: IndexLike) -> Index:
        return binary("*", self, other)

    def __rmul__(self, other: IndexLike) -> Index:
        return binary("*", other, self)

    def __floordiv__(self, other: IndexLike) -> Index:
        return binary("//", self, other)

    def __mod__(self, other: IndexLike) -> Index:
        return binary("%", self, other)

    def __neg__(self) -> Index:
        return binary("-", 0, self)

    def __pow__(self, power: object) -> Index:
        raise refuse(f"({self}) ** {power}: indices have no powers; multiply")

    def __bool__(self) -> bool:
        raise self._unknown("cannot decide an if")

    def __lt__(self, other: object) -> bool:
        raise self._unknown("cannot be compared")

    __le__ = __gt__ = __ge__ = __lt__

    def __truediv__(self, other: object) -> Index:
        raise refuse(f"{self} / {other}: indices are whole numbers; use // or cdiv")

    def __index__(self) -> int:
        raise refuse(
            f"the value of {self} is not known while tracing, so Python cannot count with it; "
            "a loop over it is `for i in loop(n)`"
        )

    def _unknown(self, what: str) -> InputError:
        return refuse(
            f"the value of {self} is not known while tracing, so it {what}; "
            "use where(...) on tiles, or a Python number for a static choice"
        )

    def __str__(self) -> str:
        if self.op == "symbol":
            return self.name
        if self.op == "const":
            return str(self.value)
        left, right = (str(arg) for arg in self.args)
        if self.op in ("min", "max"):
            return f"{self.op}({left}, {right})"
        return f"({left} {self.op} {right})"

    def to_json(self) -> Any:
        """A number, a name or `[op, left, right]`."""
        if self.op == "symbol":
            return self.name
        if self.op == "const":
            return self.value
        return [self.op, *(arg.to_json() for arg in self.args)]

    @classmethod
    def from_json(cls, data: Any) -> Index:
        """An expression back from JSON; raises `InputError` for anything else."""
        if isinstance(data, str):
            return symbol(data)
        if isinstance(data, int):
            return const(data)
        items = cast("list[Any]", data) if isinstance(data, list) else []
        if len(items) != 3 or items[0] not in FOLD:
            raise InputError(f"index expression {data!r}: expected [op, left, right]")
        return cls(items[0], args=(cls.from_json(items[1]), cls.from_json(items[2])))

    def symbols(self) -> frozenset[str]:
        """The names this expression depends on."""
        if self.op == "symbol":
            return frozenset((self.name,))
        return frozenset[str]().union(*(arg.symbols() for arg in self.args))

    @property
    def signed(self) -> bool:
        """Whether it may be negative, as far as its form shows."""
        if self.op in ("const", "symbol"):
            return self.value < 0
        left, right = (arg.signed for arg in self.args)
        if self.op == "max":
            return left and right
        return self.op == "-" or right or (left and self.op != "%")

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The number, given every symbol's value."""
        if self.op == "const":
            return self.value
        if self.op == "symbol":
            if self.name not in values:
                raise InputError(f"index symbol {self.name!r} has no value here")
            return values[self.name]
        left, right = (arg.evaluate(values) for arg in self.args)
        return FOLD[self.op](left, right)


IndexLike = Index | int

FOLD: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}

# (operation, side, constant) that leaves the other operand unchanged
NEUTRAL = {("+", 0, 0), ("+", 1, 0), ("-", 1, 0), ("*", 0, 1), ("*", 1, 1), ("//", 1, 1)}


def symbol(name: str, signed: bool = False) -> Index:
    """A named unknown; `signed`: it may be negative."""
    return Index("symbol", name=name, value=-int(signed))


def const(value: int) -> Index:
    """A known number."""
    return Index("const", value=value)


def as_index(value: IndexLike) -> Index:
    """`value` as an expression; raises `InputError` for what is no whole number."""
    if isinstance(value, Index):
        return value
    number: Any = value
    if isinstance(number, tuple):
        told = "expected one place; of a single axis: (i,) = grid(...)"
        raise refuse(f"index {shown(value)}: {told}")
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise refuse(f"index {shown(number)}: expected a whole number, a size or a position")
    return const(int(number))


def binary(op: str, left: IndexLike, right: IndexLike) -> Index:
    """`left op right`, folded when both are constants or one is neutral."""
    a, b = as_index(left), as_index(right)
    if op in ("//", "%") and b == const(0):
        raise refuse(f"index expression {a} {op} 0 divides by zero")
    if a.op == "const" and b.op == "const":
        return const(FOLD[op](a.value, b.value))
    if b.op == "const" and (op, 1, b.value) in NEUTRAL:
        return a
    if a.op == "const" and (op, 0, a.value) in NEUTRAL:
        return b
    return Index(op, args=(a, b))


def cdiv(left: IndexLike, right: int) -> Index:
    """`left / right` rounded up, for a positive constant `right`."""
    divisor = as_index(right)
    if divisor.op != "const" or divisor.value <= 0:
        raise refuse(f"cdiv by {right}: the divisor must be a positive number")
    return (as_index(left) + (right - 1)) // right


def minimum_index(left: IndexLike, right: IndexLike) -> Index:
    """The smaller of two index expressions."""
    return binary("min", left, right)


def maximum_index(left: IndexLike, right: IndexLike) -> Index:
    """The larger of two index expressions."""
    return binary("max", left, right)


def substituted(expression: Index, values: Mapping[str, Index]) -> Index:
    """The expression with symbols replaced by others, or by expressions."""
    if expression.op == "symbol":
        return values.get(expression.name, expression)
    if expression.op == "const":
        return expression
    left, right = (substituted(arg, values) for arg in expression.args)
    return binary(expression.op, left, right)


def multiple_of(value: Index) -> int:
    """A number that divides the expression whatever its symbols are; 0 for the constant 0."""
    if value.op == "const":
        return abs(value.value)
    if value.op == "symbol":
        return 1
    left, right = (multiple_of(arg) for arg in value.args)
    if value.op == "*":
        return left * right
    if value.op in ("+", "-", "min", "max"):
        return math.gcd(left, right)
    return 1
