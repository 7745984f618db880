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

from warploom.sass.decode.control import Control
from warploom.sass.timing.issue import Cost, Simulation


class _Recorded(Simulation):
    """A simulation that notes what every issue had to wait for."""

    def __init__(self, costs: list[Cost], controls: tuple[Control, ...], rounds: int) -> None:
        super().__init__(costs, controls, rounds, 1)
        self.lost: list[int] = []

    def _issue(self, warp: Any) -> None:
        self.lost.append(self.clock - warp.ready)
        super()._issue(warp)


def waits(
    costs: Sequence[Cost], controls: Sequence[Control], loops: bool
) -> npt.NDArray[np.float32]:
    """Cycles lost before each instruction, in issue order [n]; of the last pass of a loop."""
    recorded = _Recorded(list(costs), tuple(controls), 2 if loops else 1)
    recorded.run()
    return np.array(recorded.lost[-len(costs) :], np.float32)
