"""A chunk of a recurrence on tiles: what its rows weigh each other by, and the state moved on.

Everything is transposed: the state, [e, d], is then the first operand of its product with q, so it
stays in registers, and groups that share out its rows need nothing of one another. What the rows of
a chunk weigh each other by is 2 to the power of a difference of running sums of logarithms to base
2, taken before the exponential: no weight overflows that is no number above fp32 itself, and gates
up to 1 have no exponent above 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.tile import BF16, FP32, DType, Tile, cumsum, exp2, maximum, sum_along

LOG2E = math.log2(math.e)
NOTHING = -150.0  # 2 to its power is 0 in fp32


@dataclass(frozen=True)
class Weights:
    """What the rows of a chunk are weighed by, as vectors along an axis of their own: a thread
    then has few of them, and no warp waits for another one.

    Row m weighs row n by 2 ** (own_m + other_n), times factor_n and sign_m where there are such,
    and what was before the chunk by `before`; in the state after the chunk row n has the weight
    `ahead`, the state before it the weight `whole`.
    """

    own: Tile
    other: Tile
    before: Tile
    whole: Tile
    ahead: Tile
    factor: Tile | None = None
    sign: Tile | None = None
    axis: str = "t"
    now: str = "m"
    past: str = "n"

    def between(self) -> Tile:
        """By what row m weighs row n, as a tile [n, m]."""
        rows = self.other.rename(self.axis, self.past)
        weight = exp2(rows + self.own.rename(self.axis, self.now))
        for vector, axis in ((self.factor, self.past), (self.sign, self.now)):
            weight = weight if vector is None else weight * vector.rename(self.axis, axis)
        return weight

    def assign(self, new: Weights) -> None:
        """Take the values of other weights."""
        for name in ("own", "other", "before", "whole", "ahead"):
            getattr(self, name).assign(getattr(new, name))

    def added(self, value: Tile, dtype: DType = BF16) -> Tile:
        """The rows [n, e] of v as the state after the chunk has them, [e, n]."""
        return (value.T.cast(FP32) * self.ahead.rename(self.axis, self.past)).cast(dtype)


def summed(vector: Tile, axis: str = "t") -> tuple[Tile, Tile]:
    """Running sums of logarithms to base 2, and their total, made beside one another.

    Nothing counts as less than NOTHING, so that sums keep ten bits behind the point and the weight
    of the last row, 2 to the power of the total less the last sum, is 1 to bf16.
    """
    vector = maximum(vector, NOTHING)
    return cumsum(vector, axis), sum_along(vector, axis)
