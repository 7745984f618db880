"""The delta rule under decays of every channel, KDA (arXiv 2510.26692), in two kernels.

The system of `kernels.recurrent.delta` with what rows weigh each other by under a sum over
channels, L_rn = beta_r sum_d k_rd k_nd exp(a_rd - a_nd), comes from the same blocks of rows as
the scores do (`derive.lower.channels`). Both need no state: `solve` makes them for every chunk,
`scores` and `solved`: [batch, chunks, heads, 64, 64] in bf16; `kda` goes through the chunks. One
block of threads has no room for all (3.2 kB of spills).

Arrays are those of a `RecurrentConfig` with delta and decays of channels; both take the scalar
`scale`, above 0, which multiplies q k^T.
"""

from __future__ import annotations

from collections.abc import Iterator

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.lower.channels import LEAST, Channels
from warploom.derive.lower.chunks import LOG2E
from warploom.kernels.recurrent.channel import seen as seen_in
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.delta import DeltaTask
from warploom.kernels.recurrent.program import arrays_of
from warploom.kernels.recurrent.task import CHUNK, Task, rows
from warploom.tile import (
    BF16,
    FP32,
    Array,
    Index,
    Program,
    Tile,
    array,
    coordinate,
    exp2,
    full,
    load,
    loop,
    maximum,
    span,
    store,
    trace,
    where,
    zeros,
)

SQUARES = {name: array(BF16, "batch chunks heads r n") for name in ("scores", "solved")}
FEW = "spills", "stack"  # `solve` spills 168 B


def solve(config: RecurrentConfig) -> Program:
    """The program of what chunks need of themselves."""
    every = arrays_of(config, "batch rows")
    arrays = {name: every[name] for name in ("q", "k", "g", "beta")} | SQUARES

    def body(**given: Array) -> None:
        _Solve(config, given).run()

    return trace(body, arrays, name="recurrent_solve")


def kda(config: RecurrentConfig) -> Program:
    """The program that goes through the chunks."""
    arrays = arrays_of(config, "batch rows") | SQUARES
    del arrays["beta"]

    def body(**given: Array) -> None:
        _Chunks(config, given).run()

    return trace(body, arrays, name="recurrent_kda")


def kernels(config: RecurrentConfig) -> Iterator[tuple[Program, Policy]]:
    """Both programs in order, with what they get: two blocks on an SM, each with a head."""
    for program, split in ((solve(config), "r"), (kda(config), "e")):
        plan = LaunchPlan(split=split, resident=2, store_panels=1)
        yield program, Policy("multistage", plan)


class _Solve(DeltaTask):
    """Traces a task of `solve`. Rows are m as they are loaded, i as all operands of a chunk, which
    lie in one place, n as the earlier and r as the later ones of two."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", CHUNK), ("i", "n", "w"))
        operand = zeros(BF16, i=CHUNK, d=CHUNK)
        for c in loop(self.chunks):
            g = load(self.arrays["g"], self.batch, rows(c, "w"), self.head, self.depth)
            q, k = self.keys("q", c, "m"), self.keys("k", c, "m")
            beta = self.gates("beta", c, "r").cast(FP32).rename("r", "t")
            scores, low = self.products((q, k), k, g, operand)
            square = self.batch, c, self.head, span(0, CHUNK, "r"), span(0, CHUNK, "n")
            scores = (scores.cast(FP32) * self.scale).cast(BF16).rename("i", "n")
            store(self.arrays["scores"], *square, tile=scores)
            r, n = coordinate("r", CHUNK), coordinate("n", CHUNK)
            below = low.cast(FP32).rename("i", "n") * beta.rename("t", "r")
            inverse = self.inverse(where(r > n, below, 0.0))
            solved = (inverse * beta.rename("t", "n")).cast(BF16)
            store(self.arrays["solved"], *square, tile=solved)

    def products(self, of: tuple[Tile, ...], k: Tile, g: Tile, operand: Tile) -> list[Tile]:
        """How much of key i is in row r of each tile, [r, i] in bf16; 0 for later keys."""
        found = [zeros(BF16, r=CHUNK, i=CHUNK) for _ in of]

        def block(logarithms: Tile, half: int) -> None:
            past = exp2(logarithms if half else -logarithms)
            operand.assign((k.cast(FP32) * past).cast(BF16).rename("m", "i"))
            own = past if half else exp2(logarithms)
            for one, sums in zip(of, found, strict=True):
                part = (one.cast(FP32) * own).cast(BF16).rename("m", "r") @ operand
                sums.assign(where(seen_in("r", "i", half), part.cast(BF16), sums))

        for half in self.channels.halves:
            block(-abs(self.channels.between[half] @ g).rename("i", "m") * LOG2E, half)
        operand.assign(maximum(g, LEAST).rename("w", "i"))
        block((self.channels.inner @ operand).rename("w", "m") * LOG2E, 0)
        return found


class _Chunks(Task):
    """Traces a task of `kda`; rows as in `_Solve`."""

    def run(self) -> None:
        """All of it."""
        state, operand = self.state(), zeros(BF16, i=CHUNK, d=CHUNK)
        w, i = coordinate("w", CHUNK), coordinate("i", CHUNK)
        later = where(i < w, 1.0, 0.0).cast(BF16)
        ones = full(1.0, BF16, i=CHUNK, w=CHUNK)
        for c in loop(self.chunks):
            g = load(self.arrays["g"], self.batch, rows(c, "w"), self.head, self.depth)
            q, k, v = self.keys("q", c, "m"), self.keys("k", c, "m"), self.value(c, "n")
            scores, solved = self.square("scores", c, "i"), self.square("solved", c, "r")
            # Sums are made twice, where they are used: nothing of them lives in between.
            sums = ones @ g
            sums -= later @ g
            before = exp2(sums * LOG2E).rename("i", "m")
            operand.assign((k.cast(FP32) * before).cast(BF16).rename("m", "i"))
            old = -(state.cast(BF16) @ operand)
            operand.assign((q.cast(FP32) * (before * self.scale)).cast(BF16).rename("m", "i"))
            out = state.cast(BF16) @ operand
            new = v @ solved
            new += old.cast(BF16).rename("i", "n") @ solved
            fresh = new.cast(BF16)
            out += fresh.rename("r", "n") @ scores
            self.put(c, out, "i")
            ahead = exp2((later @ g) * LOG2E).rename("i", "m")
            operand.assign((k.cast(FP32) * ahead).cast(BF16).rename("m", "i"))
            state *= exp2((ones @ g).rename("i", "e") * LOG2E)
            state += fresh.rename("r", "i") @ operand
        self.end(state)

    def square(self, name: str, c: Index, axis: str) -> Tile:
        """What `solve` left of chunk c, [axis, n]."""
        place = self.batch, c, self.head, span(0, CHUNK, axis), span(0, CHUNK, "n")
        return load(self.arrays[name], *place)
