"""What the gradients of all kinds of recurrent attention share: a head's chunks, backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK, Task, rows
from warploom.tile import BF16, Array, Index, Span, Tile, load, store, zeros

COLUMNS = 64  # of a task's state, along e


class BackwardTask(Task):
    """A head's rows, for some columns of its values, 64 if a kernel does not say more: a slot."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, Array]) -> None:
        super().__init__(replace(config, value_dim=min(config.value_dim, COLUMNS)), arrays)

    def last(self, name: str, part: Span, columns: Span | None = None) -> Tile:
        """Part of a state after the last row, [e, d]; zeros where there is none."""
        if not self.config.final:
            return zeros(e=COLUMNS, d=CHUNK)
        where_state = self.batch, self.head, part, columns or self.values
        return load(self.arrays[name], *where_state).T.copy()

    def before(self, c: Index, part: Span, columns: Span | None = None) -> Tile:
        """Part of the state before chunk c, [e, d]."""
        where_state = self.batch, c, self.head, columns or self.values, part
        return load(self.arrays["states"], *where_state)

    def of_values(self, name: str, c: Index, axis: str, columns: Span) -> Tile:
        """Columns of v or of the gradient of the result, of chunk c."""
        return load(self.arrays[name], self.batch, rows(c, axis), self.head, columns)

    def result(self, c: Index) -> Tile:
        """The gradient of the result of chunk c, [m, e]."""
        return self.of_values("do", c, "m", self.values)

    def place_of(self, name: str) -> Index:
        """Where a task leaves its part of a gradient."""
        return self.head if name == "dv" else self.slot

    def give(self, name: str, c: Index, axis: str, columns: Span, tile: Tile) -> None:
        """Store a tile [axis, columns] of chunk c."""
        where_it = self.batch, rows(c, axis), self.place_of(name), columns
        store(self.arrays[name], *where_it, tile=tile.cast(BF16))

    def give_row(self, name: str, c: Index, vector: Tile) -> None:
        """Store a number of every row of chunk c, [t]."""
        store(self.arrays[name], self.batch, rows(c, "t"), self.slot, tile=vector)

    def first(self, part: Span, grad: Tile, columns: Span | None = None) -> None:
        """Store part of the gradient of the state before the first row where it was given."""
        if self.config.initial:
            where_state = self.batch, self.head, part, columns or self.values
            store(self.arrays["dinitial"], *where_state, tile=grad.T)
