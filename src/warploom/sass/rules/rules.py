"""The rules a legal reordering keeps, by name, and the arrays they become for one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
BLOCK_EDGE: Final = -1


class Rule(IntEnum):
    """The rules of the verdict; the name is what a refusal prints."""

    REGISTER_ORDER = 0
    MEMORY_ORDER = 1
    SYNC_ORDER = 2
    SCOREBOARD_ORDER = 3
    LATENCY = 4
    SPACING = 5
    LATENCY_ACROSS_BLOCKS = 6
    WAIT = 7
    INHERITED_WAIT = 8
    WAIT_BEFORE_EXIT = 9
    SYNC_DISTANCE = 10


@dataclass
class Builder:
    """Rows under construction; turned into arrays once."""

    order: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    gaps: list[tuple[int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int]]
    )
    edge_gaps: list[tuple[int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int]]
    )
    waits: list[tuple[int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int]]
    )
    cross: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    durations: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reuse: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])


@dataclass(frozen=True)
class Constraints:
    """The arrays. All indices are instruction numbers of the original order.

    order      [n, 4]  earlier, later, rule, resource: position of earlier < position of later
    gaps       [n, 5]  earlier, later, cycles, rule, resource: issue times that far apart
    edge_gaps  [n, 4]  instruction, block, cycles, at_end: distance from the block's start or end
    waits      [n, 5]  holder (-1: block start), consumer (-1: block end), scoreboard, block, rule
    cross      [n, 3]  producer, consumer in a later block, cycles: from the producer to its
                       block's end plus from the consumer's block's start to the consumer
    durations  [n, 2]  block, cycles it must last, because a pair of `cross` relies on it
    reuse      [n, 4]  instruction, source slot, first register, next writer of one of the words
                       read through the slot (-1: none before the block's end; the instruction
                       itself when it overwrites its source)
    """

    order: Ints
    gaps: Ints
    edge_gaps: Ints
    waits: Ints
    cross: Ints
    durations: Ints
    reuse: Ints
