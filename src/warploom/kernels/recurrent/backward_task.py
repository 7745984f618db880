"""What the gradients of all kinds of recurrent attention share: a head's chunks, backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK, Task, rows
from warploom.tile import BF16, Array, Index, Span, Tile, cdiv, load, size, store, zeros

COLUMNS = 64  # of a task's state, along e


class BackwardTask(Task):
    """A head's rows, for 64 columns of its values: a slot."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, Array]) -> None:
        super().__init__(replace(config, value_dim=min(config.value_dim, COLUMNS)), arrays)
        self.slot = self.head * cdiv(size("e"), COLUMNS) + self.column

    def last(self, name: str, part: Span) -> Tile:
        """Part of a state after the last row, [e, d]; zeros where there is none."""
        if not self.config.final:
            return zeros(e=COLUMNS, d=CHUNK)
        return load(self.arrays[name], self.batch, self.head, part, self.values).T.copy()

    def before(self, c: Index, part: Span) -> Tile:
        """Part of the state before chunk c, [e, d]."""
        return load(self.arrays["states"], self.batch, c, self.head, self.values, part)

    def result(self, c: Index) -> Tile:
        """The gradient of the result of chunk c, [m, e]."""
        return load(self.arrays["do"], self.batch, rows(c, "m"), self.head, self.values)

    def give(self, name: str, c: Index, axis: str, columns: Span, tile: Tile) -> None:
        """Store a tile [axis, columns] of chunk c."""
        place = self.head if name == "dv" else self.slot
        where_it = self.batch, rows(c, axis), place, columns
        store(self.arrays[name], *where_it, tile=tile.cast(BF16))

    def first(self, part: Span, grad: Tile) -> None:
        """Store part of the gradient of the state before the first row where it was given."""
        if self.config.initial:
            where_state = self.batch, self.head, part, self.values
            store(self.arrays["dinitial"], *where_state, tile=grad.T)
