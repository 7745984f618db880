"""A chunk under the delta rule (arXiv 2406.06484, 2412.06464).

With a the running sums of g in the chunk, L = beta_r exp(a_r - a_n) k_r k_n below the diagonal and
T = (1 + L)^-1, the rows that are added to the state are

    u = T (beta (v - exp(a) k S))

and the rest is what scalar decays do. T comes from blocks of rows of the inverse (`lower_inverse`):
all numbers are parts of it, so none grows beyond them, as powers of L do; they are fp16, which has
three bits more than bf16.
"""

from __future__ import annotations

from warploom import tile as t
from warploom.derive.lower.chunks import LOG2E, summed
from warploom.kernels.recurrent.task import CHUNK, Task, rows

Sums = tuple[t.Tile, t.Tile] | tuple[None, None]  # running sums, their total; without decay none


class Gates:
    """The numbers of a chunk's rows along an axis, loaded two chunks before they are needed."""

    def __init__(
        self, task: Task, axis: str, names: tuple[str, ...], first: t.Index | int = 0
    ) -> None:
        self.task, self.axis, self.names = task, axis, names
        self.now, self.later = (self._of(first + n) for n in (0, 1))
        self.after = dict[str, t.Tile]()

    def _of(self, chunk: t.Index | int) -> dict[str, t.Tile]:
        return {name: self.task.gates(name, chunk, self.axis) for name in self.names}

    def vector(self, name: str) -> t.Tile:
        """Of the present chunk, along an axis of its own, "t"."""
        return self.now[name].cast(t.FP32).rename(self.axis, "t")

    def load(self, chunk: t.Index) -> None:
        """Those that are needed two chunks after this one."""
        self.after = self._of(chunk + 2)

    def turn(self) -> None:
        """To the next chunk."""
        for name in self.names:
            self.now[name].assign(self.later[name])
            self.later[name].assign(self.after[name])


class DeltaTask(Task):
    """Traces what one task does."""

    def run(self) -> None:
        """All of it."""
        state, gates = self.state(), Gates(self, "r", self.names)
        for i in t.loop(self.chunks):
            k, q, v = self.keys("k", i, "n"), self.keys("q", i, "m"), self.value(i, "n")
            # What needs no solution runs beside the work on the first product.
            low, scores = k.rename("n", "r") @ k, q.rename("m", "r") @ k
            gates.load(i)
            beta, decays = gates.vector("beta"), self.sums(gates)
            low, seen = self.weighed(low, scores, beta, decays[0])
            inverse = t.lower_inverse(low)
            if self.config.states:
                square = t.span(0, CHUNK, "r"), t.span(0, CHUNK, "n")
                kept = self.batch, i, self.slot, *square
                t.store(self.arrays["inverse"], *kept, tile=inverse.cast(t.BF16))
            solved = (inverse * beta.rename("t", "n")).cast(t.BF16)
            self.keep(i, state)
            old = state.cast(t.BF16) @ k
            found = self.added(state, old, (q, v), solved, decays[0])
            self.put(i, self.advance(i, state, found, (k, seen), decays))
            gates.turn()
        self.end(state)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that rows have."""
        return ("beta", "g") if self.config.decay == "token" else ("beta",)

    def sums(self, gates: Gates) -> Sums:
        """The running sums of the chunk's g and their total; none without decay."""
        if self.config.decay != "token":
            return None, None
        return summed(gates.vector("g") * LOG2E)

    def added(
        self,
        state: t.Tile,
        old: t.Tile,
        given: tuple[t.Tile, t.Tile],
        solved: t.Tile,
        sums: t.Tile | None,
    ) -> tuple[t.Tile, t.Tile]:
        """What the rows of a chunk add, [e, r], and what the state before it has for its queries,
        from q and v, the solution of the chunk's system and what that state has for its keys."""
        q, v = given
        old *= -t.exp2(sums).rename("t", "n") if sums is not None else -1.0
        new = v @ solved
        new += old.cast(t.BF16) @ solved
        return new, state.cast(t.BF16) @ q

    def advance(
        self, i: t.Index, state: t.Tile, found: tuple[t.Tile, t.Tile], given: tuple[t.Tile, t.Tile],
        decays: Sums,
    ) -> t.Tile:  # fmt: skip
        """The result of chunk i, [e, m], from what its rows add, [e, r], and what the state before
        it has for its queries, and from its k and scores; the state is moved on."""
        (new, out), (k, seen), (sums, whole) = found, given, decays
        if self.config.states:
            where_u = self.batch, rows(i, "n"), self.head, self.values
            t.store(self.arrays["fresh"], *where_u, tile=new.T.cast(t.BF16).rename("r", "n"))
        fresh = added = new.cast(t.BF16).rename("r", "n")
        if sums is not None and whole is not None:
            added = (new * t.exp2(whole - sums).rename("t", "r")).cast(t.BF16).rename("r", "n")
            state *= t.exp2(whole)
        state += added @ k
        out *= (t.exp2(sums) * self.scale).rename("t", "m") if sums is not None else self.scale
        out += fresh @ seen
        return out

    def weighed(
        self, low: t.Tile, scores: t.Tile, beta: t.Tile, sums: t.Tile | None
    ) -> tuple[t.Tile, t.Tile]:
        """L, [r, n], and how much of row n is in row m, [m, n], from the products of keys and of
        queries with keys, both [r, n]. On and above the diagonal L is not read."""
        r, n = t.coordinate("r", CHUNK), t.coordinate("n", CHUNK)
        if sums is not None:  # once for both: exponentials are what a chunk has most of
            left = t.exp2(sums.rename("t", "r") - sums.rename("t", "n"))
            low, scores = low * left, scores * left
        seen = t.where(r >= n, scores * self.scale, 0.0).cast(t.BF16)
        return low * beta.rename("t", "r"), seen.rename("r", "m")
