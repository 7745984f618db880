"""The actions on one block as it stands, with the versions they lead to and their verdicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.rl.batch import BlockBatch
from warploom.rl.coupling import Coupling
from warploom.rl.derive import Wishes
from warploom.rl.judge import Judge
from warploom.rl.patches import Patch
from warploom.rl.trace import Trace
from warploom.sass.rules.versions import Timed, Versions

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BlockNow:
    """One block as it stands: its version, what was wished for, its interface to the others."""

    version: Versions
    wishes: Wishes
    timed: Timed
    row: int


@dataclass(frozen=True)
class Patched:
    """Actions as patches of the version that stands."""

    trace: Trace
    judge: Judge
    patches: list[Patch]


@dataclass(frozen=True)
class Offers:
    """The actions on one block: (line, kind) of each, verdicts inside the block, and for those that
    could break what ties it to other blocks (rows, what `Coupling` needs of them).

    The versions they lead to are held as whole versions or as patches.
    """

    lines: Ints
    kinds: Ints
    legal: Bools
    coupled: list[tuple[Ints, Timed]]
    versions: Versions | None = None
    wishes: Wishes | None = None
    patched: Patched | None = None

    def held(self, rows: Ints) -> tuple[Versions, Wishes]:
        """Some of the versions that are held as such, and their wishes."""
        assert self.versions is not None and self.wishes is not None
        return self.versions.take(rows), self.wishes.take(rows)

    def fitting(self, block: int, coupling: Coupling) -> Bools:
        """Which actions are legal with the other blocks as they stand."""
        legal = self.legal.copy()
        for rows, timed in self.coupled:
            legal[rows] &= coupling.check(block, timed)
        return legal


class Windows:
    """How far each instruction of a block may move by order alone."""

    def __init__(self, batch: BlockBatch) -> None:
        self._pins, self._size = batch.pinned, batch.size
        rows = np.unique(batch.order_rows, axis=0)
        self._by_later = rows[np.argsort(rows[:, 1], kind="stable")]
        self._by_earlier = rows[np.argsort(rows[:, 0], kind="stable")]
        self._later, self._starts_later = np.unique(self._by_later[:, 1], return_index=True)
        self._earlier, self._starts_earlier = np.unique(self._by_earlier[:, 0], return_index=True)

    def of(self, position: Ints) -> tuple[Ints, Ints]:
        """(first, last) position of each instruction, where they stand at `position` now."""
        first = np.zeros(self._size, np.int64)
        last = np.full(self._size, self._size - 1)
        if len(self._by_later):
            before = np.maximum.reduceat(position[self._by_later[:, 0]], self._starts_later)
            first[self._later] = before + 1
            behind = np.minimum.reduceat(position[self._by_earlier[:, 1]], self._starts_earlier)
            last[self._earlier] = behind - 1
        # What is pinned stands at its own number and is not crossed.
        pins = self._pins
        behind = np.where(pins[:, None] < position, pins[:, None] + 1, 0)
        ahead = np.where(pins[:, None] > position, pins[:, None] - 1, self._size - 1)
        return (
            np.maximum(first, behind.max(0, initial=0)),
            np.minimum(last, ahead.min(0, initial=self._size - 1)),
        )
