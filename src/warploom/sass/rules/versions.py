"""Many versions of one block side by side, and what of a kernel their checks share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np

from warploom.sass.rules.distance_rules import PipeSpacing
from warploom.sass.rules.rules import Ints
from warploom.sass.rules.verify import Verifier

FAR: Final = 1 << 30


@dataclass(frozen=True)
class Rows:
    """Arrays with a row a version."""

    def take(self, rows: Ints | list[int] | slice) -> Self:
        """Some of the versions."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class Versions(Rows):
    """K versions of a block of n instructions.

    order  [K, n]  the instruction (number inside the block as compiled) at each position
    stall, stay, wait, reuse  [K, n]  control fields by position; scoreboards stay as compiled
    """

    order: Ints
    stall: Ints
    stay: Ints
    wait: Ints
    reuse: Ints

    def __len__(self) -> int:
        """How many versions."""
        return len(self.order)


@dataclass(frozen=True)
class Timed(Rows):
    """What other blocks need to know of K versions: issue times [K, n] by instruction, cycles from
    the block's start; the duration [K]; per spaced pipe the first and last instruction [K, pipes]
    (-1: none); what the boundary instructions set, wait for and stall [K]."""

    issue: Ints
    duration: Ints
    first: Ints
    last: Ints
    first_instruction: Ints
    last_instruction: Ints
    first_wait: Ints
    last_sets: Ints
    last_stall: Ints


class KernelTables:
    """Per-instruction data of one kernel that every block's checks share."""

    def __init__(self, verifier: Verifier) -> None:
        known = verifier.known
        items = known.kernel.instructions
        self.kernel, self.constraints = known.kernel, known.constraints
        self.block_of, self.own, self.depbar = known.block_of, known.own, known.depbar
        self.sync_wait, self.no_wait = known.sync_wait, known.no_wait
        self.sources, self.keeps = known.sources, known.keeps
        self.stall, self.wait = known.before.stall, known.before.wait
        self.stay, self.reuse = known.before.stay, known.before.reuse
        self.write_sb, self.read_sb = known.before.write_sb, known.before.read_sb
        self.sets, self.early = known.sets, known.early
        self.pinned = np.zeros(len(items), bool)
        self.pinned[known.pinned] = True
        spacing = PipeSpacing(known)
        self.pipes, self.pipe, self.family = spacing.pipes, spacing.pipe, spacing.family
        self.spacing, self.close = spacing.spacing, spacing.close
        self.identity = [item.identity for item in items]
