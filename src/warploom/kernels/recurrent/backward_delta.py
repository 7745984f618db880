"""Gradients of the delta rule, by two kernels.

A chunk's rows add u = T beta x to the state, x = v - exp(a) k S and T = (1 + L)^-1, which the
forward pass keeps beside the states (`kernels.recurrent.delta`). With R the gradient of the state
after the chunk and P, b as under scalar decays,

    du = P^T dO + exp(total - a) k R,  dv = dx = beta T^T du
    R <- exp(total) R + (b q)^T dO - (exp(a) k)^T dx

which `DeltaValues` does from the last chunk to the first, leaving every R. The rest needs no order:
a k is written, like the k of linear attention with u as its values, and it is read,

    dk (read) = -exp(a) dx S^T + M k,  dk (written) += M^T k,  M_rn = -(dx_r u_n) exp(a_r - a_n)

for n < r; dbeta = dx u / beta^2 of a row, and dg is made of q dq + k dk (read) - k dk (written).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from warploom import tile as t
from warploom.derive.lower.chunks import LOG2E, summed
from warploom.kernels.recurrent.backward_task import BackwardTask
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK, rows

LEAST_BETA = 2.0**-60  # of a beta that is divided by


class _Delta(BackwardTask, ABC):
    """What both kernels have of a chunk's gates."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        super().__init__(config, arrays)
        self.decays = config.decay == "token"

    def through(self, first: t.Index | int, way: int) -> None:
        """All chunks from this one on, to the next or the previous one. Gates are loaded two chunks
        ahead, behind the last matmul of a chunk, as fences for the tensor core wait for loads."""
        self.now, later = (self.given(first + way * n) for n in (0, 1))
        for i in t.loop(self.chunks):
            c = first + way * i
            self.chunk(c)
            for name, after in self.given(c + 2 * way).items():
                self.now[name].assign(later[name])
                later[name].assign(after)

    def given(self, c: t.Index | int) -> dict[str, t.Tile]:
        """The numbers of chunk c, which may be none of the head's."""
        names = ("beta", "g") if self.decays else ("beta",)
        return {name: self.gates(name, c, "n") for name in names}

    @abstractmethod
    def chunk(self, c: t.Index) -> None:
        """What is done of chunk c."""

    def vector(self, name: str) -> t.Tile:
        """The gate of every row of this chunk, [t]."""
        return self.now[name].cast(t.FP32).rename("n", "t")

    def sums(self) -> tuple[t.Tile, t.Tile] | None:
        """Running sums of logarithms to base 2, and their total."""
        return summed(self.vector("g") * LOG2E) if self.decays else None

    def between(self, sums: tuple[t.Tile, t.Tile] | None, later: str, strictly: bool) -> t.Tile:
        """By what row `later` weighs row n, [n, later]; 0 for later ones, and with `strictly` for
        itself."""
        n, m = t.coordinate("n", CHUNK), t.coordinate(later, CHUNK)
        weight: t.Tile | float = 1.0
        if sums is not None:
            weight = t.exp2(-sums[0].rename("t", "n") + sums[0].rename("t", later))
        return t.where(n < m if strictly else n <= m, weight, 0.0)

    def asked(self, do: t.Tile, sums: tuple[t.Tile, t.Tile] | None) -> t.Tile:
        """The rows [m, e] of do as the state before the chunk has their weight. Rounded once, for R
        and for dq: what gates sum up is a difference of the two."""
        before = t.exp2(sums[0]).rename("t", "m") if sums is not None else 1.0
        return (do.cast(t.FP32) * (before * self.scale)).cast(t.BF16)

    def erased(self, dx: t.Tile, sums: tuple[t.Tile, t.Tile] | None, axis: str = "n") -> t.Tile:
        """The same of the rows of dx, along `axis`, which are erased from the state."""
        before = -t.exp2(sums[0]).rename("t", axis) if sums is not None else -1.0
        return (dx.cast(t.FP32) * before).cast(t.BF16)


class DeltaValues(_Delta):
    """Traces a task of the kernel for v and states."""

    def run(self) -> None:
        """All of it."""
        self.grad = self.last("dfinal", self.depth)  # R, [e, d]
        self.through(self.chunks - 1, -1)
        self.first(self.depth, self.grad)

    def chunk(self, c: t.Index) -> None:
        """dv of chunk c; R moves on to the state before it."""
        q, k, do = self.keys("q", c, "m"), self.keys("k", c, "n"), self.result(c)
        square = t.span(0, CHUNK, "r"), t.span(0, CHUNK, "n")
        inverse = t.load(self.arrays["inverse"], self.batch, c, self.slot, *square)
        state = self.before(c, self.depth)
        sums, beta = self.sums(), self.vector("beta")
        after = self.grad.cast(t.BF16)
        kept = self.batch, c, self.head, self.values, self.depth
        t.store(self.arrays["after"], *kept, tile=after)
        seen = ((k @ q) * self.between(sums, "m", False) * self.scale).cast(t.BF16)
        du = k @ after
        if sums is not None:
            du *= t.exp2(sums[1] - sums[0]).rename("t", "n")
        du += seen @ do
        dx = inverse @ du.cast(t.BF16).rename("n", "r")
        dx *= beta.rename("t", "n")
        self.give("dv", c, "n", self.values, dx)
        if sums is not None:
            self.grad *= t.exp2(sums[1])
        self.grad += self.asked(do, sums).T @ q
        self.grad += self.erased(dx.cast(t.BF16), sums) @ k
        if self.decays:
            # Read twice, so that it comes through a slot.
            one, other = (state.cast(t.FP32) * (self.grad * 0.5) for _ in range(2))
            both = t.sum_along(t.sum_along(one + other, "d"), "e")
            t.store(self.arrays["starts"], self.batch, c, self.slot, tile=both)


class DeltaRest(_Delta):
    """Traces a task of the kernel for q, k and gates."""

    def run(self) -> None:
        """All of it."""
        self.through(0, 1)

    def given(self, c: t.Index | int) -> dict[str, t.Tile]:
        """With <S, R> of the state before it."""
        if not self.decays:
            return super().given(c)
        own = t.minimum_index(c, self.chunks - 1)
        return super().given(c) | {
            "start": t.load(self.arrays["starts"], self.batch, own, self.slot)
        }

    def chunk(self, c: t.Index) -> None:
        """The gradients of chunk c."""
        q, k, do = self.keys("q", c, "m"), self.keys("k", c, "n"), self.result(c)
        dx, fresh = (
            t.load(self.arrays[name], self.batch, rows(c, axis), self.head, self.values)
            for name, axis in (("dv", "r"), ("fresh", "n"))
        )
        state = self.before(c, self.depth)
        kept = self.batch, c, self.head, self.values, self.depth
        after, sums = t.load(self.arrays["after"], *kept), self.sums()
        change = ((fresh @ do) * self.between(sums, "m", False) * self.scale).cast(t.BF16)
        both = fresh @ dx  # [n, r]
        same = t.coordinate("n", CHUNK).equals(t.coordinate("r", CHUNK))
        of_row = t.sum_along(t.where(same, both, 0.0), "r").rename("n", "t")
        solved = (-both * self.between(sums, "r", True)).cast(t.BF16)
        dq = self.asked(do, sums) @ state
        dq += change @ k
        self.give("dq", c, "m", self.depth, dq)
        written = fresh @ after
        if sums is not None:
            written *= t.exp2(sums[1] - sums[0]).rename("t", "n")
        written += change @ q
        written += solved @ k.rename("n", "r")
        read = self.erased(dx, sums, "r") @ state
        read += solved @ k
        read = read.rename("r", "n")
        self.give("dk", c, "n", self.depth, written + read)
        beta = t.maximum(self.vector("beta"), LEAST_BETA)
        self.give_row("dbeta", c, of_row / beta / beta)
        if self.decays:
            own = t.sum_along(q.cast(t.FP32) * dq, "d").rename("m", "t")
            own += t.sum_along(k.cast(t.FP32) * (read - written), "d").rename("n", "t")
            self.give_row("dg", c, self.now["start"] + (own - t.cumsum(own, "t")))
