"""The pattern of an online softmax in a loop: weights under a running maximum, and sums of them.

    highest = max(base, max_along(scores) * scale - lift)
    under   = where(highest == -inf, 0, highest)          where a block may have no score
    rescale = exp2(base - under)
    weights = exp2(scores * scale - under)
    total   = total * rescale + sum_along(weights)
    base    = highest
    acc     = acc * rescale + cast(weights) @ values      any number of these

`scale` is a number or a tile without axes, `lift` a number; either may be missing. `exp` may stand
for exp2, and scores may be scaled before the maximum is taken: `in_powers_of_two` gives the form
above. It is found by what is computed from what, not by names or order. Source: Milakov and
Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from warploom.tile.ir import Loop, Op, Program, Var


@dataclass(frozen=True)
class OnlineSoftmax:
    """The ops of the pattern in one loop.

    `packed` makes the tile of weights in the element type of the matmuls; `scale` is what
    multiplies scores in the exponent; `axis` is the axis of the scores that is summed; `exponent`
    is the function, exp2 or exp; `own` has all ops of the pattern, in program order: nothing else
    reads what they make on the way.
    """

    loop: Loop
    scores: Var
    base: Var
    total: Var
    sums: tuple[Var, ...]
    highest: Op
    under: Op | None
    packed: Op
    scale: Var | float | None
    lift: float
    axis: str
    exponent: str
    own: tuple[Op, ...]

    @property
    def ordered(self) -> bool:
        """Whether weights are packed in the order of quads."""
        return any(op.kind == "quad_order" for op in self.own)

    @property
    def masked(self) -> bool:
        """Whether a block may have no score for a row."""
        return self.under is not None


class _Body:
    """The ops of a loop body by what they write."""

    def __init__(self, program: Program, loop: Loop) -> None:
        self.ops = [item for item in loop.body if isinstance(item, Op)]
        self.every = every = list(program.ops())
        self.constants: dict[str, float] = {
            op.dst.name: float(op.value)
            for op in every
            if op.kind == "fill" and op.dst is not None and op.value is not None
        }
        for op in every:
            if op.kind != "fill" and op.dst is not None:
                self.constants.pop(op.dst.name, None)

    def writers(self, var: Var) -> list[Op]:
        return [op for op in self.ops if op.dst == var]

    def readers(self, var: Var, kind: str) -> list[Op]:
        return [op for op in self.ops if op.kind == kind and var in op.srcs]

    def writer(self, var: Var, kind: str) -> Op | None:
        """The one op that writes a variable, if it is of that kind."""
        found = self.writers(var)
        return found[0] if len(found) == 1 and found[0].kind == kind else None

    def power(self, op: Op) -> Op | None:
        """The one op that takes a power of what another op gives."""
        found = [o for o in self.ops if o.kind in ("exp2", "exp") and op.dst in o.srcs]
        return found[0] if len(found) == 1 else None

    def casts(self, var: Var) -> list[Op]:
        """The ops that cast a tile, as it is or in the order of quads."""
        ordered = [op.dst for op in self.readers(var, "quad_order") if op.dst is not None]
        return [op for one in (var, *ordered) for op in self.readers(one, "cast")]

    def scaled(self, var: Var) -> tuple[Var, Var | None]:
        """(x, scale) of `x * scale`."""
        op = self.writer(var, "mul")
        if op is None or op.srcs[1].type.axes:
            return var, None
        return op.srcs[0], op.srcs[1]

    def same(self, one: Var | None, other: Var | None) -> bool:
        """Whether two scales are one number."""
        if one is None or other is None or one == other:
            return one == other
        value = self.constants.get(one.name)
        return value is not None and value == self.constants.get(other.name)


def find(program: Program) -> Sequence[OnlineSoftmax]:
    """Every online softmax in the loops of a program."""
    found: list[OnlineSoftmax] = []
    for loop in program.loops():
        body = _Body(program, loop)
        for op in body.ops:
            if op.kind == "max" and len(op.srcs) == 2:
                match = _match(body, loop, op)
                if match is not None:
                    found.append(match)
    return found


def _match(body: _Body, loop: Loop, highest: Op) -> OnlineSoftmax | None:
    base, block = highest.srcs
    lift = 0.0
    less = body.writer(block, "sub")
    if less is not None and less.srcs[1].name in body.constants:
        block, lift = less.srcs[0], body.constants[less.srcs[1].name]
    row, scale = body.scaled(block)
    largest = body.writer(row, "reduce_max")
    moved = [op for op in body.writers(base) if op.kind == "copy" and op.srcs == (highest.dst,)]
    if highest.dst is None or largest is None or not len(moved) == len(body.writers(base)) == 1:
        return None
    under = _under(body, highest.dst)
    below = highest.dst if under is None or under.dst is None else under.dst
    weights = _weights(body, largest.srcs[0], scale, below)
    rescale = _power(body, base, below)
    if weights is None or rescale is None or weights.kind != rescale.kind:
        return None
    assert weights.dst is not None and rescale.dst is not None
    casts = body.casts(weights.dst)
    totals = [a for part in body.readers(weights.dst, "reduce_sum") for a in _sums(body, part)]
    if len(casts) != 1 or len(totals) != 1 or totals[0].dst is None:
        return None
    scaled = [op for op in body.readers(rescale.dst, "mul") if op.srcs[1] == rescale.dst]
    of_sums = [op for op in scaled if op.srcs[0] in (op.dst, totals[0].dst)]
    ends = (highest, *moved, *casts, totals[0], *of_sums)
    number = None if scale is None else body.constants.get(scale.name, scale)
    given = {base, largest.srcs[0], *(op.srcs[0] for op in of_sums)}
    given |= {number} if isinstance(number, Var) else set()
    own = _made_for(body, ends, given)
    if len(of_sums) != len(scaled) or not _closed(body, own, ends):
        return None
    return OnlineSoftmax(
        loop,
        largest.srcs[0],
        base,
        totals[0].dst,
        tuple(op.srcs[0] for op in of_sums),
        highest,
        under,
        casts[0],
        number,
        lift,
        largest.axis,
        weights.kind,
        own,
    )


def _made_for(body: _Body, ends: Sequence[Op], given: set[Var]) -> tuple[Op, ...]:
    """The ops that compute what `ends` do from what is given, in program order."""
    found: dict[int, Op] = {}
    open_ = list(ends)
    while open_:
        op = open_.pop()
        if op.id in found:
            continue
        found[op.id] = op
        for src in op.srcs:
            if src not in given:
                open_ += [other for other in body.writers(src) if other.id < op.id]
    return tuple(found[number] for number in sorted(found))


def _closed(body: _Body, own: Sequence[Op], ends: Sequence[Op]) -> bool:
    """Whether nothing else reads what ops of the pattern make on the way to its ends."""
    mine = {op.id for op in own}
    results = {op.dst for op in ends if op.kind in ("copy", "cast", "add") or op.dst in op.srcs}
    inner = {op.dst for op in own} - results
    return all(op.id in mine for op in body.every for src in op.srcs if src in inner)


def _under(body: _Body, highest: Var) -> Op | None:
    """`where(highest == -inf, 0, highest)`."""
    for op in body.readers(highest, "where"):
        test = body.writer(op.srcs[0], "eq")
        number = body.constants.get(op.srcs[1].name)
        if test is None or (number, op.srcs[2], test.srcs[0]) != (0.0, highest, highest):
            continue
        if body.constants.get(test.srcs[1].name) == -math.inf:
            return op
    return None


def _power(body: _Body, left: Var, right: Var) -> Op | None:
    """`exp2(left - right)`."""
    for less in body.ops:
        if less.kind == "sub" and less.srcs == (left, right):
            return body.power(less)
    return None


def _weights(body: _Body, scores: Var, scale: Var | None, under: Var) -> Op | None:
    """`exp2(scores * scale - under)`."""
    for less in body.ops:
        if less.kind != "sub" or less.srcs[1] != under or less.dst is None:
            continue
        of, by = body.scaled(less.srcs[0])
        if of == scores and body.same(by, scale):
            return body.power(less)
    return None


def _sums(body: _Body, part: Op) -> list[Op]:
    """`total = total * rescale + part`."""
    assert part.dst is not None
    found: list[Op] = []
    for op in body.readers(part.dst, "add"):
        old = body.writer(op.srcs[0], "mul")
        if op.srcs[1] == part.dst and old is not None and op.dst is not None and op.dst in old.srcs:
            found.append(op)
    return found
