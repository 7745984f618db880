"""Gradients under decays of its own for every channel of the keys (GLA), by two kernels.

With w what a row of q and one of k are weighed by in a block of rows (`derive.lower.channels`),
P = (k w)(q w)^T and dP = v dO^T there, both masked,

    dk = sum of w (dP (q w)),  dq = sum of w (dP^T (k w))

over the same blocks as the scores, and what states have in them as under scalar decays. One block
of threads has no room for both, nor has it to: `ChannelKeys` goes through the chunks from the last
to the first with the gradient of the state, and leaves <S, R> of the state before each chunk in
`starts`; `ChannelQueries` knows the states and makes dq, and dg of everything.
"""

from __future__ import annotations

from warploom.derive.lower.channels import (
    LEAST,
    MIDDLE,
    Channels,
    blocks_now_past,
    blocks_past_now,
)
from warploom.derive.lower.chunks import LOG2E
from warploom.kernels.recurrent.backward_task import COLUMNS, BackwardTask
from warploom.kernels.recurrent.task import CHUNK, rows
from warploom.tile import (
    BF16,
    FP32,
    Index,
    Tile,
    coordinate,
    exp2,
    load,
    loop,
    maximum,
    store,
    sum_along,
    where,
    zeros,
)


class ChannelKeys(BackwardTask):
    """Traces a task of the kernel for k, v and states. Rows of q are m, of k and v n, of gates j;
    i are the rows of q as columns of scores."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", COLUMNS), ("i", "n", "j"))
        self.grad = self.last("dfinal", self.depth)  # R, [e, d]
        last = self.chunks - 1
        for i in loop(self.chunks):
            self.chunk(last - i)
        self.first(self.depth, self.grad)

    def chunk(self, c: Index) -> None:
        """The gradients of chunk c; R moves on to the state before it."""
        q, k, v = self.keys("q", c, "m"), self.keys("k", c, "n"), self.value(c, "n")
        g = load(self.arrays["g"], self.batch, rows(c, "j"), self.head, self.depth)
        do, state = self.result(c).rename("m", "i"), self.before(c, self.depth)
        channels, after = self.channels, self.grad.cast(BF16)
        change = ((v @ do) * self.scale).cast(BF16)
        scores, dk = zeros(BF16, n=CHUNK, i=CHUNK), zeros(n=CHUNK, d=CHUNK)
        weighed = zeros(BF16, i=CHUNK, d=CHUNK)
        n, i = coordinate("n", CHUNK), coordinate("i", CHUNK)

        def block(own: Tile, past: Tile, half: int) -> None:
            weighed.assign(by(q, own.rename("i", "m"), half).rename("m", "i"))
            past = past.rename("i", "n")
            part = (by(k, past, half) @ weighed) * self.scale
            scores.assign(where(blocks_past_now(n, i, half), part.cast(BF16), scores))
            dk.assign(dk + (where(blocks_past_now(n, i, half), change, 0.0) @ weighed) * past)

        for half in channels.halves:
            weights = exp2(-abs(channels.between[half] @ g) * LOG2E)
            block(weights, weights, half)
        weighed.assign(maximum(g, LEAST).rename("j", "i"))
        sums = (channels.inner @ weighed).rename("j", "i") * LOG2E
        block(exp2(sums), exp2(-sums), 0)
        whole, rest = sum_along(g.cast(FP32), "j"), channels.later @ g
        ahead = exp2(rest.rename("i", "n") * LOG2E)
        dk += (v @ after) * ahead
        dv = (k.cast(FP32) * ahead).cast(BF16) @ after
        dv += scores @ do
        before = exp2((whole - rest.rename("i", "m")) * LOG2E) * self.scale
        weighed.assign((q.cast(FP32) * before).cast(BF16).rename("m", "i"))
        self.grad *= exp2(whole * LOG2E)
        self.grad += do @ weighed
        # Read twice, so that it comes through a slot.
        one, other = (state.cast(FP32) * (self.grad * 0.5) for _ in range(2))
        both = sum_along(one + other, "e")
        store(self.arrays["starts"], self.batch, c, self.slot, self.depth, tile=both)
        self.give("dk", c, "n", self.depth, dk)
        self.give("dv", c, "n", self.values, dv)


class ChannelQueries(BackwardTask):
    """Traces a task of the kernel for q and gates. Rows of q and k are m, and i as operands: all
    of these lie in one place, one after the other."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", COLUMNS), ("j", "n", "i"))
        w, r = coordinate("i", CHUNK), coordinate("j", CHUNK)
        self.upto = where(w <= r, 1.0, 0.0).cast(BF16)
        self.inner = self.channels.relative(w, r, MIDDLE)
        for c in loop(self.chunks):
            self.chunk(c)

    def chunk(self, c: Index) -> None:
        """The gradients of chunk c."""
        q, k, v = self.keys("q", c, "m"), self.keys("k", c, "m"), self.value(c, "i")
        g = load(self.arrays["g"], self.batch, rows(c, "i"), self.head, self.depth)
        dk = load(self.arrays["dk"], self.batch, rows(c, "m"), self.slot, self.depth)
        do, channels = self.result(c), self.channels
        change = ((do @ v) * self.scale).cast(BF16)
        dq, operand = do @ self.before(c, self.depth), zeros(BF16, i=CHUNK, d=CHUNK)
        dq *= exp2((self.upto @ g).rename("j", "m") * LOG2E) * self.scale
        m, i = coordinate("m", CHUNK), coordinate("i", CHUNK)

        def block(own: Tile, past: Tile, half: int) -> None:
            operand.assign(by(k, past, half).rename("m", "i"))
            masked = where(blocks_now_past(m, i, half), change, 0.0)
            dq.assign(dq + (masked @ operand) * own)

        for half in channels.halves:
            weights = exp2(-abs(channels.between[half] @ g) * LOG2E).rename("j", "m")
            block(weights, weights, half)
        operand.assign(maximum(g, LEAST))
        sums = (self.inner @ operand).rename("j", "m") * LOG2E
        block(exp2(sums), exp2(-sums), 0)

        def own() -> Tile:
            return q.cast(FP32) * dq - k.cast(FP32) * dk.cast(FP32)

        operand.assign(own().cast(BF16).rename("m", "i"))
        earlier = (self.upto @ operand).rename("j", "m")
        start = load(self.arrays["starts"], self.batch, c, self.slot, self.depth)
        self.give("dg", c, "m", self.depth, own() - earlier + start)
        self.give("dq", c, "m", self.depth, dq)


def by(x: Tile, weights: Tile, half: int) -> Tile:
    """Rows of q or k times their weights in a block: where none is above 1 as products of narrow
    elements, two an instruction, with one more rounding."""
    return x * weights.cast(BF16) if half else (x.cast(FP32) * weights).cast(BF16)
