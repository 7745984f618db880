"""For which iterations of a loop a condition on positions holds everywhere, or somewhere.

A mask compares positions: `key_at < keys`, `key_at <= row_at`. Positions are int32 tiles whose
elements lie between two index expressions, so a comparison of two such tiles is one of expressions,
and where these are linear in the index of a loop it is solved for it:

    c j + d < x   holds for  j < cdiv(x - d, c)
    c j + d > x   holds for  j >= (x - d) // c + 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from warploom.tile.index import Index, as_index, binary, maximum_index, minimum_index
from warploom.tile.ir import Op, Var
from warploom.tile.trace import part_begin, part_end

Definitions = Mapping[str, Op]  # the op that writes a variable, of variables written once
STRICT = {"lt": (0, 1, 0), "le": (0, 1, 1), "gt": (1, 0, 0), "ge": (1, 0, 1)}  # (small, big, add)


@dataclass(frozen=True)
class Interval:
    """The least and the greatest element of an int32 tile."""

    low: Index
    high: Index


@dataclass(frozen=True)
class Iterations:
    """Those from the greatest of `starts` up to the least of `stops`: all bounds are necessary."""

    starts: tuple[Index, ...] = ()
    stops: tuple[Index, ...] = ()


@dataclass(frozen=True)
class Positions:
    """What a program's int32 tiles hold, as far as index expressions can say.

    `axis` names a tile axis of which only a part is asked about: the positions from
    `part_begin(axis)` up to `part_end(axis)`.
    """

    definitions: Definitions
    axis: str = ""

    def interval(self, var: Var) -> Interval | None:
        """The elements of a tile lie in it; None where that is not known."""
        op = self.definitions.get(var.name)
        if op is None:
            return None
        if op.kind == "coordinate" and op.start is not None:
            return self._coordinate(op.start, var, op.axis)
        if (
            op.kind == "fill"
            and isinstance(op.value, (int, float))
            and float(op.value).is_integer()
        ):
            return Interval(as_index(int(op.value)), as_index(int(op.value)))
        inner = [self.interval(src) for src in op.srcs]
        if len(inner) != 2 or inner[0] is None or inner[1] is None:
            return None
        left, right = inner[0], inner[1]
        if op.kind == "add":
            return Interval(plus(left.low, right.low), plus(left.high, right.high))
        if op.kind == "sub":
            return Interval(minus(left.low, right.high), minus(left.high, right.low))
        if op.kind in ("min", "max"):
            low, high = (
                binary(op.kind, *pair) for pair in ((left.low, right.low), (left.high, right.high))
            )
            return Interval(low, high)
        return None

    def _coordinate(self, start: Index, var: Var, axis: str) -> Interval:
        first = _flat(start)
        if not axis:
            return Interval(first, first)
        if axis == self.axis:
            return Interval(
                plus(first, part_begin(axis)), plus(plus(first, part_end(axis)), as_index(-1))
            )
        return Interval(first, plus(first, as_index(var.type.size(axis) - 1)))

    def everywhere(self, condition: Var, index: str) -> Iterations | None:
        """Iterations in which the condition holds for all elements, of all those whose range the
        condition limits by itself; None where that cannot be told."""
        return self._solve(condition, index, lambda small, big: (small.high, big.low))

    def somewhere(self, condition: Var, index: str) -> Iterations:
        """Iterations outside of which the condition holds for no element."""
        found = self._solve(condition, index, lambda small, big: (small.low, big.high), partly=True)
        return found or Iterations()

    def _solve(
        self,
        condition: Var,
        index: str,
        choose: Callable[[Interval, Interval], tuple[Index, Index]],
        partly: bool = False,
    ) -> Iterations | None:
        op = self.definitions.get(condition.name)
        if op is None:
            return None
        if op.kind == "and":
            parts = [self._solve(src, index, choose, partly) for src in op.srcs]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts) and not partly:
                return None
            starts = tuple(bound for part in known for bound in part.starts)
            return Iterations(starts, tuple(bound for part in known for bound in part.stops))
        if op.kind not in STRICT:
            return None
        at_small, at_big, more = STRICT[op.kind]
        small, big = (self.interval(op.srcs[at]) for at in (at_small, at_big))
        if small is None or big is None:
            return None
        least, most = choose(small, big)
        return _below(least, plus(most, as_index(more)), index)


def _below(small: Index, big: Index, index: str) -> Iterations | None:
    """The iterations in which `small < big`, where that is a bound on the index of a loop."""
    if small.op == "max" or big.op == "min":
        halves = small.args if small.op == "max" else big.args
        parts = [
            _below(h, big, index) if small.op == "max" else _below(small, h, index) for h in halves
        ]
        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        starts = tuple(bound for part in known for bound in part.starts)
        return Iterations(starts, tuple(bound for part in known for bound in part.stops))
    left, right = linear(small, index), linear(big, index)
    if left is None or right is None:
        return None
    (a, x), (b, y) = left, right
    if a > 0 and b == 0:
        return Iterations(stops=(_rounded_up(minus(y, x), a),))
    if b > 0 and a == 0:
        return Iterations(starts=(_rounded_down(plus(minus(x, y), as_index(b)), b),))
    return None


def _rounded_up(value: Index, by: int) -> Index:
    """`cdiv(value, by)`, 0 where the value is negative."""
    if _constant(value)[1] < 0:
        return _rounded_down(plus(value, as_index(by - 1)), by)
    return ((maximum_index(value, 0) if value.signed else value) + (by - 1)) // by


def _rounded_down(value: Index, by: int) -> Index:
    """`value // by`, 0 where the value is negative."""
    return (maximum_index(value, 0) if value.signed else value) // by


def linear(expression: Index, name: str) -> tuple[int, Index] | None:
    """`(c, rest)` with `expression = c * symbol + rest`; None where it is not linear in it."""
    if name not in expression.symbols():
        return 0, expression
    if expression.op == "symbol":
        return 1, as_index(0)
    if expression.op not in ("+", "-", "*"):
        return None
    left, right = expression.args
    if expression.op == "*":
        factor, other = (left, right) if left.op == "const" else (right, left)
        inner = linear(other, name)
        if factor.op != "const" or inner is None:
            return None
        return inner[0] * factor.value, inner[1] * factor.value
    parts = linear(left, name), linear(right, name)
    if parts[0] is None or parts[1] is None:
        return None
    if expression.op == "-":
        return parts[0][0] - parts[1][0], minus(parts[0][1], parts[1][1])
    return parts[0][0] + parts[1][0], plus(parts[0][1], parts[1][1])


def plus(left: Index, right: Index) -> Index:
    """The sum, with one constant at its end; those of the minimum or maximum of two go inside."""
    for one, other in ((left, right), (right, left)):
        if one.op in ("min", "max") and other.op == "const":
            return binary(one.op, *(plus(arg, other) for arg in one.args))
    (a, m), (b, n) = _constant(left), _constant(right)
    whole = m + n
    if a is None or b is None:
        rest = a if b is None else b
        return as_index(whole) if rest is None else _shifted(rest, whole)
    return _shifted(a + b, whole)


def minus(left: Index, right: Index) -> Index:
    """The difference, with one constant at its end."""
    (a, m), (b, n) = _constant(left), _constant(right)
    if b is None:
        return plus(left, as_index(-n))
    if a == b:
        return as_index(m - n)
    if a is not None and a.op == "+" and b in a.args:
        return _shifted(a.args[1] if a.args[0] == b else a.args[0], m - n)
    return _shifted((as_index(0) if a is None else a) - b, m - n)


def _flat(expression: Index) -> Index:
    """`(x + y) - z` of `x + (y - z)`: sums are compared and written from the left."""
    if expression.op == "+" and expression.args[1].op == "-":
        y, z = expression.args[1].args
        return _flat(expression.args[0] + y) - z
    return expression


def _constant(expression: Index) -> tuple[Index | None, int]:
    if expression.op == "const":
        return None, expression.value
    if expression.op in ("+", "-") and expression.args[1].op == "const":
        rest, number = _constant(expression.args[0])
        sign = 1 if expression.op == "+" else -1
        return rest, number + sign * expression.args[1].value
    return expression, 0


def _shifted(expression: Index, by: int) -> Index:
    return expression - (-by) if by < 0 else expression + by


def least(bounds: tuple[Index, ...], other: Index) -> Index:
    """The smallest of some index expressions, shorter ones first; a loop up to it is as long."""
    result = other
    for bound in sorted(bounds, key=lambda one: len(str(one))):
        if _unguarded(bound) != other:
            result = minimum_index(result, bound)
    return result


def greatest(bounds: tuple[Index, ...], other: Index) -> Index:
    """The largest of some index expressions."""
    result = other
    for bound in bounds:
        if result == as_index(0) and not bound.signed:
            result = bound
        elif bound != result:
            result = maximum_index(result, bound)
    return result


def _unguarded(bound: Index) -> Index:
    """The expression without `max(x, 0)`: a loop up to a negative x is empty either way."""
    if bound.op == "max" and bound.args[1] == as_index(0):
        return bound.args[0]
    if not bound.args:
        return bound
    return binary(bound.op, *(_unguarded(arg) for arg in bound.args))
