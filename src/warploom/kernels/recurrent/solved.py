"""Delta rules in two kernels: `solve`, what every chunk needs of itself, and `chunks`.

The first one makes the scores and the solution of each chunk's triangular system, `scores` and
`solved`: [batch, chunks, heads, 64, 64] in bf16. They need no state, so its tasks are a few chunks
each, in any order. The second one goes through the chunks of a head: three products from one state
to the next.

That is the way of KDA (arXiv 2510.26692), the delta rule under decays of every channel: its system,
L_rn = beta_r sum_d k_rd k_nd exp(a_rd - a_nd), comes from the same blocks of rows as the scores do
(`derive.lower.channels`), and one block of threads has no room for all (3.2 kB of spills). And it
is the way of keys above 64.

Arrays are those of a `RecurrentConfig` with `in_two`; both take the scalar `scale`, above 0, which
multiplies q k^T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.lower.channels import LEAST, Channels, blocks_now_past
from warploom.derive.lower.chunks import LOG2E
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.delta import DeltaTask, Gates
from warploom.kernels.recurrent.program import arrays_of
from warploom.kernels.recurrent.task import CHUNK, Task, rows

SQUARES = {name: t.array(t.BF16, "batch chunks heads r n") for name in ("scores", "solved")}
FEW = "spills", "stack"  # `solve` under decays of channels spills 168 B
AT_ONCE = 4  # chunks of a task of `solve`; with 8 it took 4 to 6 % longer
COLUMNS = 64  # of a state, of a task of `chunks`


def solve(config: RecurrentConfig) -> t.Program:
    """The program of what chunks need of themselves."""
    every = arrays_of(config, "batch rows")
    arrays = {name: every[name] for name in ("q", "k", "g", "beta") if name in every} | SQUARES
    task = _SolveChannels if config.decay == "channel" else _Solve

    def body(**given: t.Array) -> None:
        task(config, given).run()

    return t.trace(body, arrays, name="recurrent_solve")


def chunks(config: RecurrentConfig) -> t.Program:
    """The program that goes through the chunks."""
    arrays = arrays_of(config, "batch rows") | SQUARES
    del arrays["beta"]
    task = _ChannelChunks if config.decay == "channel" else _Chunks

    def body(**given: t.Array) -> None:
        task(config, given).run()

    return t.trace(body, arrays, name="recurrent_chunks")


def kernels(config: RecurrentConfig, alone: bool = False) -> Iterator[tuple[t.Program, Policy]]:
    """Both programs in order, with what they get: two blocks on an SM, each with a head; of
    `solve` three with one slot each, where registers allow it (9 to 16 % less time). `alone`: the
    tasks of `chunks` are so few that one is all that an SM has (`few_tasks`)."""
    deep = config.decay == "channel"
    plan = LaunchPlan(split="r", resident=2 if deep else 3, store_panels=1, keep_masks=not deep)
    yield solve(config), Policy("multistage" if deep else "unpipelined", plan)
    plan = LaunchPlan(split="e", resident=1 if alone and not deep else 2, store_panels=1)
    if deep:
        yield chunks(config), Policy("multistage", plan)
    elif alone:
        yield chunks(config), Policy("multistage", plan, registers=(24, 240))
    else:
        # Beside two slots of what comes first there is room for one of what is needed last.
        one = {"q": 1, "scores": 1} if config.depth > CHUNK else {}
        yield chunks(config), Policy("lcsf-early", plan, depth=2, slots=one)


def few_tasks(config: RecurrentConfig, batch: int, heads: int, sms: int) -> bool:
    """Whether every task of `chunks` has an SM of its own: then a block with two slots of
    everything takes 5 % less time than one that leaves room for another, which takes 8 to 12 %
    less time where there are more."""
    wide = config.decay != "channel" and config.depth > CHUNK
    return wide and batch * heads * math.ceil(config.value_dim / COLUMNS) <= sms


class _Solve(DeltaTask):
    """Traces a task of `solve`: some chunks of a head."""

    def third(self) -> tuple[str, t.Index]:
        """Tasks are told apart by their chunks."""
        return "parts", t.cdiv(self.chunks, AT_ONCE)

    def run(self) -> None:
        """All of it."""
        first = self.column * AT_ONCE
        gates = Gates(self, "r", self.names, first)
        for n in t.loop(AT_ONCE):
            c = first + n
            k, q = self.keys("k", c, "n"), self.keys("q", c, "m")
            low, scores = k.rename("n", "r") @ k, q.rename("m", "r") @ k
            gates.load(c)
            beta, (sums, _) = gates.vector("beta"), self.sums(gates)
            low, seen = self.weighed(low, scores, beta, sums)
            self.leave("scores", c, seen)
            inverse = t.lower_inverse(low)
            self.leave("solved", c, (inverse * beta.rename("t", "n")).cast(t.BF16))
            gates.turn()

    def leave(self, name: str, c: t.Index, square: t.Tile) -> None:
        """Store a square of chunk c."""
        axes = (t.span(0, CHUNK, axis) for axis in square.type.names)
        t.store(self.arrays[name], self.batch, c, self.head, *axes, tile=square)


class _SolveChannels(_Solve):
    """The same under decays of channels. Rows are m as they are loaded, i as all operands of a
    chunk, which lie in one place, n as the earlier and r as the later ones of two."""

    def run(self) -> None:
        """All of it."""
        self.channels = Channels(CHUNK, ("e", CHUNK), ("i", "n", "w"))
        operand = t.zeros(t.BF16, i=CHUNK, d=CHUNK)
        for at in t.loop(AT_ONCE):
            c = self.column * AT_ONCE + at
            g = t.load(self.arrays["g"], self.batch, rows(c, "w"), self.head, self.depth)
            q, k = self.keys("q", c, "m"), self.keys("k", c, "m")
            beta = self.gates("beta", c, "r").cast(t.FP32).rename("r", "t")
            scores, low = self.products((q, k), k, g, operand)
            scores = (scores.cast(t.FP32) * self.scale).cast(t.BF16).rename("i", "n")
            self.leave("scores", c, scores)
            r, n = t.coordinate("r", CHUNK), t.coordinate("n", CHUNK)
            below = low.cast(t.FP32).rename("i", "n") * beta.rename("t", "r")
            inverse = t.lower_inverse(t.where(r > n, below, 0.0))
            self.leave("solved", c, (inverse * beta.rename("t", "n")).cast(t.BF16))

    def products(
        self, of: tuple[t.Tile, ...], k: t.Tile, g: t.Tile, operand: t.Tile
    ) -> list[t.Tile]:
        """How much of key i is in row r of each tile, [r, i] in bf16; 0 for later keys."""
        found = [t.zeros(t.BF16, r=CHUNK, i=CHUNK) for _ in of]
        r, i = t.coordinate("r", CHUNK), t.coordinate("i", CHUNK)

        def block(logarithms: t.Tile, half: int) -> None:
            past = t.exp2(logarithms if half else -logarithms)
            operand.assign((k.cast(t.FP32) * past).cast(t.BF16).rename("m", "i"))
            own = past if half else t.exp2(logarithms)
            for one, sums in zip(of, found, strict=True):
                part = (one.cast(t.FP32) * own).cast(t.BF16).rename("m", "r") @ operand
                sums.assign(t.where(blocks_now_past(r, i, half), part.cast(t.BF16), sums))

        for half in self.channels.halves:
            block(-abs(self.channels.between[half] @ g).rename("i", "m") * LOG2E, half)
        operand.assign(t.maximum(g, LEAST).rename("w", "i"))
        block((self.channels.inner @ operand).rename("w", "m") * LOG2E, 0)
        return found


class _Chunks(DeltaTask):
    """Traces a task of `chunks`: a head's rows, for 64 columns of its state."""

    @property
    def columns(self) -> int:
        """Of the state, of a task."""
        return COLUMNS

    def run(self) -> None:
        """All of it."""
        gates = Gates(self, "r", tuple(name for name in self.names if name != "beta"))
        state = self.state()
        for i in t.loop(self.chunks):
            k, q, v = self.keys("k", i, "n"), self.keys("q", i, "m"), self.value(i, "n")
            solved, seen = square(self, "solved", i, "r", "n"), square(self, "scores", i, "m", "n")
            old = state.cast(t.BF16) @ k
            gates.load(i)
            decays = self.sums(gates)
            found = self.added(state, old, (q, v), solved, decays[0])
            out = self.advance(i, state, found, (k, seen), decays)
            self.put(i, out)
            gates.turn()
        self.end(state)


class _ChannelChunks(Task):
    """The same under decays of channels; rows as in `_SolveChannels`."""

    def run(self) -> None:
        """All of it."""
        state, operand = self.state(), t.zeros(t.BF16, i=CHUNK, d=CHUNK)
        w, i = t.coordinate("w", CHUNK), t.coordinate("i", CHUNK)
        later = t.where(i < w, 1.0, 0.0).cast(t.BF16)
        ones = t.full(1.0, t.BF16, i=CHUNK, w=CHUNK)
        for c in t.loop(self.chunks):
            g = t.load(self.arrays["g"], self.batch, rows(c, "w"), self.head, self.depth)
            q, k, v = self.keys("q", c, "m"), self.keys("k", c, "m"), self.value(c, "n")
            scores, solved = (
                square(self, x, c, a, "n") for x, a in (("scores", "i"), ("solved", "r"))
            )
            # Sums are made twice, where they are used: nothing of them lives in between.
            sums = ones @ g
            sums -= later @ g
            before = t.exp2(sums * LOG2E).rename("i", "m")
            operand.assign((k.cast(t.FP32) * before).cast(t.BF16).rename("m", "i"))
            old = -(state.cast(t.BF16) @ operand)
            operand.assign((q.cast(t.FP32) * (before * self.scale)).cast(t.BF16).rename("m", "i"))
            out = state.cast(t.BF16) @ operand
            new = v @ solved
            new += old.cast(t.BF16).rename("i", "n") @ solved
            fresh = new.cast(t.BF16)
            out += fresh.rename("r", "n") @ scores
            self.put(c, out, "i")
            ahead = t.exp2((later @ g) * LOG2E).rename("i", "m")
            operand.assign((k.cast(t.FP32) * ahead).cast(t.BF16).rename("m", "i"))
            state *= t.exp2((ones @ g).rename("i", "e") * LOG2E)
            state += fresh.rename("r", "i") @ operand
        self.end(state)


def square(task: Task, name: str, c: t.Index, first: str, second: str) -> t.Tile:
    """What `solve` left of chunk c, [first, second]."""
    place = task.batch, c, task.head, t.span(0, CHUNK, first), t.span(0, CHUNK, second)
    return t.load(task.arrays[name], *place)
