"""What an action does to one version of a block: the places that differ, and how time shifts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """Wishes by instruction, as lists (see `derive.Wishes`)."""

    stall: list[int]
    stay: list[int]
    reuse: list[int]


class Cell(NamedTuple):
    """What stands at one place: instruction, stall, yield hint, wait mask, reuse hints."""

    number: int
    stall: int
    stay: int
    wait: int
    reuse: int


@dataclass(frozen=True)
class Move:
    """An instruction goes from one place to another; those between make room.

    Of two neighbours it is always the upper that goes down (`moving`).
    """

    here: int
    to: int

    @staticmethod
    def moving(here: int, to: int) -> Move:
        """The move from one place to another."""
        return Move(to, here) if to == here - 1 else Move(here, to)

    @property
    def span(self) -> tuple[int, int]:
        """First and last place that change their instruction."""
        return min(self.here, self.to), max(self.here, self.to)


@dataclass(frozen=True)
class Wish:
    """A control edit: the stall, stay or reuse wished for one instruction."""

    name: str
    number: int
    value: int


@dataclass
class Patch:
    """One action beside the version that stands.

    cells  what differs, by place
    first, end  the places derived anew; from `end` on only time is shifted, by `delta`
    issue  issue times of what was derived anew, by name; `now`: the last one's. These and `tails`,
        how long one of them asks the block to last, count from the issue of the place before
    shifts  how much earlier and later what other blocks depend on is issued, at most
    floor  the last stall's least; `longer`: how much longer the block lasts
    reads  the places [begin, end) that all of this was worked out from
    twisted  twins crossed, or a stall too long for its field: to be judged as a whole
    odd  the same, the block's last stall included
    sound  what it touches inside the block is legal, the last place aside; `legal`: all of it
    """

    action: Move | Wish
    cells: dict[int, Cell]
    first: int
    end: int
    delta: int
    issue: dict[int, int]
    now: int
    tails: int
    floor: int
    last_wait: int
    reads: tuple[int, int]
    twisted: bool = False
    odd: bool = False
    sound: bool = False
    legal: bool = False
    last_stall: int = 0
    longer: int = 0
    shifts: tuple[int, int] = (0, 0)

    @cached_property
    def names(self) -> Ints:
        """What was derived anew."""
        return np.fromiter(self.issue.keys(), np.int64, len(self.issue))

    @cached_property
    def times(self) -> Ints:
        """The issue time of each of `names`."""
        return np.fromiter(self.issue.values(), np.int64, len(self.issue))
