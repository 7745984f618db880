"""A chunk with features of second order: Based (arXiv 2402.18668), exp(s) as 1 + s + s^2 / 2.

Rows of a chunk weigh each other by that polynomial of s = scale q k^T itself. What was before them
is a state of features phi(k) v^T with phi(q) phi(k) = 1 + s + s^2 / 2. Of the products x_i x_j of
16 channels those with j - i = 0 ... 7 modulo 16 are 128 features in two parts of 64: a product of
two selections, (A x)(B_part x), and selections are matmuls of zeros and ones with x: exact, and
their results lie as the next operand wants them. What is left are the 8 products of channels 8
apart with the constant beside them, and the channels, which are an operand as they were loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom import tile as t
from warploom.kernels.recurrent.config import TAYLOR, RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK, Task, rows

PARTS = 2
HALF = TAYLOR // 2


class TaylorTask(Task):
    """Traces what one task does; rows of q are m, of k and v n, features c of channels d."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        super().__init__(config, arrays)
        self.squared = self.scale * self.scale
        c, d = t.coordinate("c", CHUNK).cast(t.FP32), t.coordinate("d", TAYLOR)
        block = (c * (1.0 / TAYLOR)).cast(t.INT32).cast(t.FP32)
        first = c - block * TAYLOR

        def at(channel: t.Tile, weight: t.Tile | float = 1.0) -> t.Tile:
            around = channel - t.where(channel >= float(TAYLOR), float(TAYLOR), 0.0)
            return t.where(around.cast(t.INT32).equals(d), weight, 0.0).cast(t.BF16)

        self.first = at(first)
        self.of_k = [at(first + block + far) for far in (0.0, HALF / 2)]
        # A square counts half: in the selection from q.
        self.of_q = [at(first + block, t.where(block < 1.0, 0.5, 1.0)), self.of_k[1]]

    def run(self) -> None:
        """All of it. Operands made of q and k have places of their own, so that one fence a chunk
        is behind all of them; eight fences took 17 % longer. A selection of channels is exact in
        bf16, and so is its product with another before it is rounded."""
        m, n, e = t.coordinate("m", CHUNK), t.coordinate("n", CHUNK), self.config.columns
        states = [t.zeros(e=e, c=CHUNK) for _ in range(PARTS)]
        linear, rest = t.zeros(e=e, d=TAYLOR), t.zeros(e=e, d=TAYLOR)
        of_q = [t.zeros(t.BF16, c=CHUNK, m=CHUNK) for _ in range(PARTS)]
        of_k = [t.zeros(t.BF16, c=CHUNK, n=CHUNK) for _ in range(PARTS)]
        for i in t.loop(self.chunks):
            q, k, v = self.keys("q", i, "m"), self.keys("k", i, "n"), self.value(i, "n")
            s, first = k @ q, self.first @ q
            seen = s * (s * (self.squared * 0.5) + self.scale) + 1.0
            seen = t.where(n <= m, seen, 0.0).cast(t.BF16)
            second = self.of_q[0] @ q
            rest_of_q = self.apart("q", i, q, "m", self.squared)
            rest_of_k = self.apart("k", i, k, "n", 1.0)
            first = (first * self.squared).cast(t.BF16)
            for part, into in enumerate(of_q):
                second = self.of_q[part] @ q if part else second
                into.assign(first * second.cast(t.BF16))
            first, second = self.first @ k, self.of_k[0] @ k
            first = first.cast(t.BF16)
            for part, into in enumerate(of_k):
                second = self.of_k[part] @ k if part else second
                into.assign(first * second.cast(t.BF16))
            out = (linear * self.scale).cast(t.BF16) @ q
            out += v @ seen
            out += rest.cast(t.BF16) @ rest_of_q
            for state, operand in zip(states, of_q, strict=True):
                out += state.cast(t.BF16) @ operand
            linear += v @ k
            rest += v @ rest_of_k
            for part, operand in enumerate(of_k):
                states[part] += v @ operand
            self.put(i, out)

    def apart(self, name: str, i: t.Index, x: t.Tile, axis: str, weight: t.Tile | float) -> t.Tile:
        """The products of channels HALF apart and then the constant, [axis, d]: behind the last
        channel there are zeros."""
        place = self.batch, rows(i, axis), self.group, t.span(HALF, TAYLOR, "d")
        other = t.load(self.arrays[name], *place)
        # Read twice, so that it comes through a slot.
        one, two = (x.cast(t.FP32) * (other.cast(t.FP32) * (weight * 0.5)) for _ in range(2))
        constant = t.where(t.coordinate("d", TAYLOR).equals(HALF), 1.0, 0.0)
        return (one + two + constant).cast(t.BF16)
