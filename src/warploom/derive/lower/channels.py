"""A chunk of a recurrence under gates of its own for every channel of the keys: GLA (2312.06635).

With a_m the running sums of the gates' logarithms g, row m sees row n by
sum_d q_md k_nd exp(a_md - a_nd), which is a matmul of q exp(a - a_ref) and k exp(a_ref - a) for a
row `ref` between the two: both exponents are at most 0, as g is. So rows of the later half of a
block see those of its earlier half, in blocks of 64 and of 32 rows. Within 16 rows ref is the
eighth, and exponents may be above 0: g counts as -10.25 at least there, which leaves 4e-5 of what
was before, less than bf16 resolves.

The sums are matmuls as well, of 0 and 1 with g: exact products, added up in fp32.
"""

from __future__ import annotations

from warploom.derive.lower.chunks import LOG2E
from warploom.tile import (
    BF16,
    FP32,
    INT32,
    DType,
    Tile,
    coordinate,
    exp2,
    full,
    maximum,
    where,
    zeros,
)

MIDDLE = 8  # rows of half a block that is taken whole
LEAST = -10.25  # g whose sums over MIDDLE rows have exponentials in fp32


class Channels:
    """What chunks of `rows` share, and the step of one. The state is [e, d]; rows of a chunk are
    along `now`, and along `past` as keys of scores; `own` is what sums run along (`names`, in this
    order). `decaying`: no gate is above 1."""

    def __init__(
        self,
        rows: int,
        e: tuple[str, int],
        names: tuple[str, str, str] = ("m", "n", "w"),
        decaying: bool = True,
        dtype: DType = BF16,
    ) -> None:
        now, past, own = names
        self.rows, self.e, self.now, self.past, self.own = rows, e[0], now, past, own
        self.decaying, self.dtype = decaying, dtype
        whole = 2 * MIDDLE
        while whole < rows:
            whole *= 2
        self.halves = [whole >> i for i in range(1, (whole // MIDDLE).bit_length() - 1)]
        w, r = coordinate(own, rows), coordinate(now, rows)
        upto = where(w <= r, 1.0, 0.0)
        self.later = (1.0 - upto).cast(self.dtype)
        self.between = {half: self.relative(w, r, half) for half in self.halves}
        self.inner = self.relative(coordinate(now, rows), coordinate(own, rows), MIDDLE)
        self.ones = full(1.0, self.dtype, **{e[0]: e[1], own: rows})
        self.each = full(1.0, self.dtype, **{now: rows, own: rows}) if e[1] != rows else None

    def step(self, state: Tile, q: Tile, k: Tile, v: Tile, g: Tile) -> Tile:
        """The result [e, now] of a chunk from q, k: [now, d], v: [now, e] and g: [own, d];
        the state is moved on."""
        operand, seen = self.scores(q, k, g)
        whole, rest = self.ones @ g, self.later @ g
        total = whole.rename(self.e, self.now) if self.each is None else self.each @ g
        sums = total - rest
        operand.assign((q.cast(FP32) * exp2(sums * LOG2E)).cast(self.dtype))
        out = state.cast(self.dtype) @ operand
        out += v.rename(self.now, self.past) @ seen
        operand.assign((k.cast(FP32) * exp2(rest * LOG2E)).cast(self.dtype))
        state *= exp2(whole * LOG2E)
        state += v @ operand
        return out

    def scores(self, q: Tile, k: Tile, g: Tile) -> tuple[Tile, Tile]:
        """How much of row n is in row m, [n, m], behind an operand [m, d]: all operands of a chunk
        lie in one place, one after the other."""
        now, past = self.now, self.past
        m, n = coordinate(now, self.rows), coordinate(past, self.rows)
        found = zeros(self.dtype, **{past: self.rows, now: self.rows})
        operand: Tile | None = None
        for half in self.halves:
            sums = self.between[half] @ g
            if self.decaying:
                weights = exp2(-abs(sums) * LOG2E)
            else:
                rows = coordinate(now, self.rows).cast(FP32)
                later = rows >= first_row(rows, half) + float(half)
                weights = exp2(sums * where(later, LOG2E, -LOG2E))
            # Both products are of narrow elements: one instruction for two, one more rounding.
            narrow = weights.cast(self.dtype)
            weighed = q * narrow
            if operand is None:
                operand = weighed
            else:
                operand.assign(weighed)
            part = (k * narrow).rename(now, past) @ operand
            found.assign(where(blocks_past_now(n, m, half), part.cast(self.dtype), found))
        gates = maximum(g, LEAST).rename(self.own, now)
        if operand is None:
            operand = gates
        else:
            operand.assign(gates)
        sums = (self.inner @ operand).rename(self.own, now) * LOG2E
        operand.assign((q.cast(FP32) * exp2(sums)).cast(self.dtype))
        part = (k.cast(FP32) * exp2(-sums)).cast(self.dtype).rename(now, past) @ operand
        return operand, where(blocks_past_now(n, m, 0), part.cast(self.dtype), found)

    def relative(self, w: Tile, r: Tile, half: int) -> Tile:
        """[w, r]: times g, summed over w, the sums of row r less those of the last row of the first
        half of its block."""
        last = (first_row(r.cast(FP32), half) + (half - 1.0)).cast(INT32)
        return (where(w <= r, 1.0, 0.0) - where(w <= last, 1.0, 0.0)).cast(self.dtype)


def blocks_past_now(n: Tile, m: Tile, half: int) -> Tile:
    """Where row m sees row n, [n, m], in blocks of twice `half` rows, from the later half the
    earlier one; 0: in the blocks that are taken whole.

    Of the numbers of blocks a thread has few, and most of them are known to the compiler.
    """
    if not half:
        return (n <= m) & (n // (2 * MIDDLE)).equals(m // (2 * MIDDLE))
    block = n // half
    return where((block // 2 * 2).equals(block), block + 1, -1).equals(m // half)


def blocks_now_past(m: Tile, n: Tile, half: int) -> Tile:
    """The same as [m, n]."""
    if not half:
        return (m >= n) & (m // (2 * MIDDLE)).equals(n // (2 * MIDDLE))
    block = m // half
    return where((block // 2 * 2).differs(block), block - 1, -1).equals(n // half)


def first_row(row: Tile, half: int) -> Tile:
    """Of the block of twice `half` rows that a row is in."""
    return (row * (0.5 / half)).cast(INT32).cast(FP32) * (2.0 * half)
