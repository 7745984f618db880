"""Where the timing model says a block loses cycles: how long each instruction waits to issue.

One warp issues the block alone, a loop's block twice. What an instruction waits for after the stall
before it has passed (scoreboards, its pipe, matrix groups, copies) is lost; nothing else shows a
player which line to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.sass.timing.partition import Partition
from warploom.sass.timing.slots import Line


class _Recorded(Partition):
    """A walk of one warp that notes what every issue had to wait for."""

    def __init__(self, code: Sequence[Line]) -> None:
        super().__init__([code], [0.0])
        self.lost: list[float] = []

    def issue(self, warp: Any, now: float) -> None:
        self.lost.append(now - warp.ready)
        super().issue(warp, now)


def waits(code: Sequence[Line], loops: bool) -> npt.NDArray[np.float32]:
    """Cycles lost before each instruction, in issue order [n]; of the last pass of a loop."""
    recorded = _Recorded(code)
    recorded.run(2 if loops else 1)
    return np.array(recorded.lost[-len(code) :], np.float32)
