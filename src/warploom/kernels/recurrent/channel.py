"""A chunk under decays of its own for every channel of the keys: GLA (arXiv 2312.06635).

With a_m the running sums of g, row m sees row n by sum_d q_md k_nd exp(a_md - a_nd), which is a
matmul of q exp(a - a_ref) and k exp(a_ref - a) for a row `ref` between the two: both exponents are
at most 0, as g is. So rows of the later half of a block see those of its earlier half, in blocks
of 64 and of 32 rows. Within 16 rows ref is the eighth, and exponents may be above 0: g counts as
-10.25 at least there, which leaves 4e-5 of what was before, less than bf16 resolves.

The sums are matmuls as well, of 0 and 1 with g: exact products, added up in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.kernels.recurrent.task import CHUNK, LOG2E, Task, rows
from warploom.tile import (
    BF16,
    FP32,
    INT32,
    Tile,
    coordinate,
    exp2,
    full,
    load,
    loop,
    maximum,
    where,
    zeros,
)

HALVES = (32, 16)  # rows of the later half of a block
MIDDLE = 8  # rows of half a block that is taken whole
NOWHERE = 2.0 * CHUNK  # a row that no chunk has
LEAST = -10.25  # g whose sums over MIDDLE rows have exponentials in fp32


class ChannelTask(Task):
    """Traces what one task does. Rows of a chunk are along m, and along n as keys of scores; w is
    what sums run along."""

    def run(self) -> None:
        """All of it."""
        state = self.state()
        w, r = coordinate("w", CHUNK), coordinate("m", CHUNK)
        upto = where(w <= r, 1.0, 0.0)
        later = (1.0 - upto).cast(BF16)
        between = {half: relative(w, r, half) for half in HALVES}
        inner = relative(coordinate("m", CHUNK), coordinate("w", CHUNK), MIDDLE)
        ones = full(1.0, BF16, e=self.config.columns, w=CHUNK)
        for i in loop(self.chunks):
            q, k, v = self.keys("q", i, "m"), self.keys("k", i, "m"), self.value(i, "m")
            where_g = self.batch, rows(i, "w"), self.head, self.depth
            g = load(self.arrays["g"], *where_g)
            operand, seen = self.scores(q, k, g, between, inner)
            whole, rest = ones @ g, later @ g
            sums = whole.rename("e", "m") - rest
            operand.assign((q.cast(FP32) * exp2(sums * LOG2E)).cast(BF16))
            out = state.cast(BF16) @ operand
            out += v.rename("m", "n") @ seen
            operand.assign((k.cast(FP32) * exp2(rest * LOG2E)).cast(BF16))
            state *= exp2(whole * LOG2E)
            state += v @ operand
            out *= self.scale
            self.put(i, out)
        self.end(state)

    def scores(
        self, q: Tile, k: Tile, g: Tile, between: Mapping[int, Tile], inner: Tile
    ) -> tuple[Tile, Tile]:
        """How much of row n is in row m, [n, m], behind an operand [m, d]: all operands of a chunk
        lie in one place, one after the other."""
        m, n = coordinate("m", CHUNK), coordinate("n", CHUNK)
        row = n.cast(FP32)
        seen = zeros(BF16, n=CHUNK, m=CHUNK)
        operand: Tile | None = None
        for half in HALVES:
            weights = exp2(-abs(between[half] @ g) * LOG2E)
            weighed = (q.cast(FP32) * weights).cast(BF16)
            if operand is None:
                operand = weighed
            else:
                operand.assign(weighed)
            part = (k.cast(FP32) * weights).cast(BF16).rename("m", "n") @ operand
            first = first_row(row, half) + float(half)
            first = where(row < first, first, NOWHERE).cast(INT32)
            seen.assign(where((first <= m) & (first + half > m), part.cast(BF16), seen))
        assert operand is not None
        operand.assign(maximum(g, LEAST).rename("w", "m"))
        sums = (inner @ operand).rename("w", "m") * LOG2E
        operand.assign((q.cast(FP32) * exp2(sums)).cast(BF16))
        part = (k.cast(FP32) * exp2(-sums)).cast(BF16).rename("m", "n") @ operand
        last = (first_row(row, MIDDLE) + 2.0 * MIDDLE).cast(INT32)
        return operand, where((n <= m) & (last > m), part.cast(BF16), seen)


def first_row(row: Tile, half: int) -> Tile:
    """Of the block of twice `half` rows that a row is in."""
    return (row * (0.5 / half)).cast(INT32).cast(FP32) * (2.0 * half)


def relative(w: Tile, r: Tile, half: int) -> Tile:
    """[w, r]: times g, summed over w, the sums of row r less those of the last row of the first
    half of its block."""
    last = (first_row(r.cast(FP32), half) + (half - 1.0)).cast(INT32)
    return (where(w <= r, 1.0, 0.0) - where(w <= last, 1.0, 0.0)).cast(BF16)
