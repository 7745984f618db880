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

from warploom import tile as t
from warploom.derive.lower.channels import LEAST, MIDDLE, Channels, blocks_now_past, blocks_past_now
from warploom.derive.lower.chunks import LOG2E
from warploom.kernels.recurrent.backward_task import COLUMNS, BackwardTask
from warploom.kernels.recurrent.task import CHUNK, rows


class ChannelKeys(BackwardTask):
    """Traces a task of the kernel for k, v and states. Rows of q are m, of k and v n, of gates j;
    i are the rows of q as columns of scores."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", COLUMNS), ("i", "n", "j"))
        self.grad = self.last("dfinal", self.depth)  # R, [e, d]
        last = self.chunks - 1
        for i in t.loop(self.chunks):
            self.chunk(last - i)
        self.first(self.depth, self.grad)

    def chunk(self, c: t.Index) -> None:
        """The gradients of chunk c; R moves on to the state before it."""
        q, k, v = self.keys("q", c, "m"), self.keys("k", c, "n"), self.value(c, "n")
        g = t.load(self.arrays["g"], self.batch, rows(c, "j"), self.head, self.depth)
        do, state = self.result(c).rename("m", "i"), self.before(c, self.depth)
        channels, after = self.channels, self.grad.cast(t.BF16)
        change = ((v @ do) * self.scale).cast(t.BF16)
        scores, dk = t.zeros(t.BF16, n=CHUNK, i=CHUNK), t.zeros(n=CHUNK, d=CHUNK)
        weighed = t.zeros(t.BF16, i=CHUNK, d=CHUNK)
        n, i = t.coordinate("n", CHUNK), t.coordinate("i", CHUNK)

        def block(own: t.Tile, past: t.Tile, half: int) -> None:
            weighed.assign(by(q, own.rename("i", "m"), half).rename("m", "i"))
            past = past.rename("i", "n")
            part = (by(k, past, half) @ weighed) * self.scale
            scores.assign(t.where(blocks_past_now(n, i, half), part.cast(t.BF16), scores))
            dk.assign(dk + (t.where(blocks_past_now(n, i, half), change, 0.0) @ weighed) * past)

        for half in channels.halves:
            weights = t.exp2(-abs(channels.between[half] @ g) * LOG2E)
            block(weights, weights, half)
        weighed.assign(t.maximum(g, LEAST).rename("j", "i"))
        sums = (channels.inner @ weighed).rename("j", "i") * LOG2E
        block(t.exp2(sums), t.exp2(-sums), 0)
        whole, rest = t.sum_along(g.cast(t.FP32), "j"), channels.later @ g
        ahead = t.exp2(rest.rename("i", "n") * LOG2E)
        dk += (v @ after) * ahead
        dv = (k.cast(t.FP32) * ahead).cast(t.BF16) @ after
        dv += scores @ do
        before = t.exp2((whole - rest.rename("i", "m")) * LOG2E) * self.scale
        weighed.assign((q.cast(t.FP32) * before).cast(t.BF16).rename("m", "i"))
        self.grad *= t.exp2(whole * LOG2E)
        self.grad += do @ weighed
        # Read twice, so that it comes through a slot.
        one, other = (state.cast(t.FP32) * (self.grad * 0.5) for _ in range(2))
        both = t.sum_along(one + other, "e")
        t.store(self.arrays["starts"], self.batch, c, self.slot, self.depth, tile=both)
        self.give("dk", c, "n", self.depth, dk)
        self.give("dv", c, "n", self.values, dv)


class ChannelQueries(BackwardTask):
    """Traces a task of the kernel for q and gates. Rows of q and k are m, and i as operands: all
    of these lie in one place, one after the other."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", COLUMNS), ("j", "n", "i"))
        w, r = t.coordinate("i", CHUNK), t.coordinate("j", CHUNK)
        self.upto = t.where(w <= r, 1.0, 0.0).cast(t.BF16)
        self.inner = self.channels.relative(w, r, MIDDLE)
        for c in t.loop(self.chunks):
            self.chunk(c)

    def chunk(self, c: t.Index) -> None:
        """The gradients of chunk c."""
        q, k, v = self.keys("q", c, "m"), self.keys("k", c, "m"), self.value(c, "i")
        g = t.load(self.arrays["g"], self.batch, rows(c, "i"), self.head, self.depth)
        dk = t.load(self.arrays["dk"], self.batch, rows(c, "m"), self.slot, self.depth)
        do, channels = self.result(c), self.channels
        change = ((do @ v) * self.scale).cast(t.BF16)
        dq, operand = do @ self.before(c, self.depth), t.zeros(t.BF16, i=CHUNK, d=CHUNK)
        dq *= t.exp2((self.upto @ g).rename("j", "m") * LOG2E) * self.scale
        m, i = t.coordinate("m", CHUNK), t.coordinate("i", CHUNK)

        def block(own: t.Tile, past: t.Tile, half: int) -> None:
            operand.assign(by(k, past, half).rename("m", "i"))
            masked = t.where(blocks_now_past(m, i, half), change, 0.0)
            dq.assign(dq + (masked @ operand) * own)

        for half in channels.halves:
            weights = t.exp2(-abs(channels.between[half] @ g) * LOG2E).rename("j", "m")
            block(weights, weights, half)
        operand.assign(t.maximum(g, LEAST))
        sums = (self.inner @ operand).rename("j", "m") * LOG2E
        block(t.exp2(sums), t.exp2(-sums), 0)

        def own() -> t.Tile:
            return q.cast(t.FP32) * dq - k.cast(t.FP32) * dk.cast(t.FP32)

        operand.assign(own().cast(t.BF16).rename("m", "i"))
        earlier = (self.upto @ operand).rename("j", "m")
        start = t.load(self.arrays["starts"], self.batch, c, self.slot, self.depth)
        self.give("dg", c, "m", self.depth, own() - earlier + start)
        self.give("dq", c, "m", self.depth, dq)


def by(x: t.Tile, weights: t.Tile, half: int) -> t.Tile:
    """Rows of q or k times their weights in a block: where none is above 1 as products of narrow
    elements, two an instruction, with one more rounding."""
    return x * weights.cast(t.BF16) if half else (x.cast(t.FP32) * weights).cast(t.BF16)
