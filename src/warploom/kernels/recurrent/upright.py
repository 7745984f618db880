"""A chunk under decays of every row with rows of q as rows of registers: simple GLA, Mamba-2.

The state is [d, e] here, the other way round than in the other kinds, and it is what goes through
shared memory, once a chunk and beside everything else. How much a row has of earlier ones stays
in the registers in which it was made, and rows of k are weighed on the way from their slot, two
products an instruction.
"""

from __future__ import annotations

from warploom.kernels.recurrent.config import SHORT, RecurrentConfig
from warploom.kernels.recurrent.scalar import GATES, ScalarTask
from warploom.kernels.recurrent.task import CHUNK, rows
from warploom.tile import BF16, Tile, coordinate, exp2, load, loop, store, where, zeros


def stands_upright(config: RecurrentConfig) -> bool:
    """Whether a configuration is traced so: one compute group has all of a task's state."""
    narrow = config.depth <= SHORT and config.columns <= SHORT
    plain = not (config.in_parts or config.states)
    return config.decay in GATES and narrow and plain and config.output


class UprightTask(ScalarTask):
    """Traces what one task does."""

    axis = "m"

    def run(self) -> None:
        """All of it."""
        state, ahead = self.state(), self.ahead()
        assert ahead is not None
        m, n = coordinate("m", CHUNK), coordinate("n", CHUNK)
        for i in loop(self.chunks):
            q, k, v = self.keys("q", i, "m"), self.keys("k", i, "n"), self.value(i, "n")
            out = q @ state.cast(BF16)
            scores = q @ k
            after, weights = ahead.load(i), ahead.weights(i)
            own, other = weights.own.rename("t", "m"), weights.other.rename("t", "n")
            seen = scores * exp2(own + other)
            if self.skip is not None:
                seen += where(m.equals(n), self.skip, 0.0)
            seen = where(m >= n, seen, 0.0).cast(BF16)
            added = k.T * weights.ahead.cast(BF16).rename("t", "n")
            state *= weights.whole
            out *= weights.before.rename("t", "m")
            out += seen @ v
            state += added @ v
            place = self.batch, rows(i, "m"), self.head, self.values
            store(self.arrays["o"], *place, tile=out.cast(BF16))
            ahead.turn(after)
        if self.config.final:
            self.store_state(state)

    def state(self) -> Tile:
        """[d, e] before the first row."""
        if not self.config.initial:
            return zeros(d=self.config.depth, e=self.columns)
        where_state = self.batch, self.head, self.depth, self.values
        return load(self.arrays["initial"], *where_state).copy()

    def store_state(self, state: Tile) -> None:
        """The state after the last row."""
        store(self.arrays["final"], self.batch, self.head, self.depth, self.values, tile=state)
