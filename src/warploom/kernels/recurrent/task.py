"""What the tasks of all kinds of recurrent attention share: a head's rows, in chunks.

Everything is transposed: the state, [e, d], is then the first operand of its product with q, so it
stays in registers, and groups that share out its rows need nothing of one another.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom import tile as t
from warploom.kernels.recurrent.config import RecurrentConfig

CHUNK = 64  # rows


class Task:
    """A head's rows, for some columns of its state."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        self.config, self.arrays = config, arrays
        self.scale = t.scalar("scale")
        name, blocks = self.third()
        places = t.grid(batch=t.size("batch"), heads=t.size("heads"), **{name: blocks})
        self.batch, self.head, self.column = places
        self.slot = self.head * blocks + self.column  # of what every task has a part of
        # What does not depend on the head is loaded once for a cluster of them.
        own = self.head * t.size("groups") // t.size("heads")
        self.group: t.Index | int = 0 if config.shared else own
        self.depth = t.span(0, config.depth, "d")
        self.values = t.span(self.column * self.columns, self.columns, "e")

    @property
    def columns(self) -> int:
        """Of the state, of a task."""
        return self.config.columns

    def third(self) -> tuple[str, t.Index]:
        """What the tasks of a head are told apart by: the columns of its state."""
        return "cols", t.cdiv(t.size("e"), self.columns)

    @property
    def chunks(self) -> t.Index:
        """How many there are."""
        return t.cdiv(t.size("rows"), CHUNK)

    def state(self) -> t.Tile:
        """[e, d] before the first row."""
        if not self.config.initial:
            return t.zeros(e=self.columns, d=self.config.depth)
        where_state = self.batch, self.head, self.depth, self.values
        return t.load(self.arrays["initial"], *where_state).T.copy()

    def keys(self, name: str, i: t.Index, axis: str) -> t.Tile:
        """The q or k of chunk i, [axis, d]."""
        return t.load(self.arrays[name], self.batch, rows(i, axis), self.group, self.depth)

    def value(self, i: t.Index, axis: str) -> t.Tile:
        """The v of chunk i, [axis, e]."""
        return t.load(self.arrays["v"], self.batch, rows(i, axis), self.head, self.values)

    def gates(self, name: str, i: t.Index | int, axis: str) -> t.Tile:
        """A number of every row of chunk i. Along rows of tiles every warp loads its own: far apart
        in memory, all would be slow."""
        return t.load(self.arrays[name], self.batch, rows(i, axis), self.head)

    def put(self, i: t.Index, out: t.Tile, axis: str = "m") -> None:
        """Store the result of chunk i, [e, axis]."""
        where_out = self.batch, rows(i, axis), self.head, self.values
        t.store(self.arrays["o"], *where_out, tile=out.T.cast(t.BF16))

    def keep(self, i: t.Index, state: t.Tile) -> None:
        """Store the state before chunk i, [e, d], where that is asked for."""
        if self.config.states:
            where_state = self.batch, i, self.head, self.values, self.depth
            t.store(self.arrays["states"], *where_state, tile=state.cast(t.BF16))

    def end(self, state: t.Tile) -> None:
        """Store the state after the last row where that is asked for."""
        if self.config.final:
            where_state = self.batch, self.head, self.depth, self.values
            t.store(self.arrays["final"], *where_state, tile=state.T)


def rows(i: t.Index | int, axis: str) -> t.Span:
    """The rows of chunk i."""
    return t.span(i * CHUNK, CHUNK, axis)
