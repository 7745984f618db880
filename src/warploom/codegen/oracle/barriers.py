"""Barriers as the hardware has them, for the simulator: mbarriers with phases, named barriers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.errors import CheckFailed
from warploom.tile.evaluate import Value

WARPS = 4  # arrivals of one compute group at an empty barrier
TURNING = 3  # arrivals of the warps that turn operands, at the barriers of both of their rings


def arrivals_of(block: BlockProgram, ring: Ring) -> int:
    """How often a slot of a ring is given back: by the warps that turn what is in it, and by those
    of every group that takes it."""
    return TURNING * block.is_raw(ring) + WARPS * block.takers(ring)


@dataclass
class PhaseBarrier:
    """An mbarrier: a phase completes when arrivals and bytes are both used up; then it reloads.

    `completed` counts phases; `passed(parity)` is what `try_wait.parity` returns: whether the phase
    of that parity is the one before the current (PTX ISA, mbarrier phase).
    """

    name: str
    count: int
    pending: int = field(init=False)
    bytes: int = 0
    completed: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether a wait for `parity` returns now; a fresh barrier passes parity 1."""
        return (self.completed & 1) != parity

    def arrive(self, times: int = 1) -> None:
        """Arrive; more arrivals than the phase has left is a fault the hardware does not report."""
        if times > self.pending:
            raise CheckFailed(
                f"{self.name}: {times} arrivals with {self.pending} of {self.count} left in phase "
                f"{self.completed}: a stage was released twice or by too many"
            )
        self.pending -= times
        self._turn()

    def expect(self, count: int) -> None:
        """`arrive.expect_tx`: raise the byte count, then arrive once."""
        self.bytes += count
        self.arrive()

    def landed(self, count: int) -> None:
        """A copy of that many bytes completed.

        A peer's multicast may land before this block has said what it expects: the count is signed
        and the missing arrival keeps the phase open.
        """
        self.bytes -= count
        if self.bytes < 0 and self.pending < self.count:
            raise CheckFailed(f"{self.name}: more bytes landed than the phase expects")
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.completed += 1


@dataclass
class NamedBarrier:
    """`bar.sync` / `bar.arrive` between two groups: opens when both have come."""

    name: str
    arrived: int = 0
    waiting: set[int] = field(default_factory=set[int])

    def arrive(self) -> None:
        """The passing group's half."""
        self.arrived += 1
        if self.arrived > 1:
            raise CheckFailed(f"{self.name}: the turn was passed twice before it was taken")

    def take(self) -> bool:
        """The waiting group's half: True when the turn is its own."""
        if not self.arrived:
            return False
        self.arrived = 0
        return True


@dataclass
class TaskRing:
    """The ring through which the producer of a dynamic walk hands tasks to the compute groups."""

    name: str
    slots: int
    readers: int
    values: list[int] = field(default_factory=list[int])
    full: list[PhaseBarrier] = field(default_factory=list[PhaseBarrier])
    empty: list[PhaseBarrier] = field(default_factory=list[PhaseBarrier])

    def __post_init__(self) -> None:
        self.values = [-1] * self.slots
        self.full = [PhaseBarrier(f"{self.name} task full[{s}]", 1) for s in range(self.slots)]
        self.empty = [
            PhaseBarrier(f"{self.name} task empty[{s}]", self.readers) for s in range(self.slots)
        ]

    def give(self, count: int, task: int) -> bool:
        """The producer's `count`-th hand-over; False while the slot is still read."""
        slot, parity = count % self.slots, count // self.slots & 1
        if not self.empty[slot].passed(parity ^ 1):
            return False
        self.values[slot] = task
        self.full[slot].arrive()
        return True

    def take(self, count: int) -> int | None:
        """A reader's `count`-th task; None while it has not come."""
        slot, parity = count % self.slots, count // self.slots & 1
        if not self.full[slot].passed(parity):
            return None
        task = self.values[slot]
        self.empty[slot].arrive()
        return task


class Company:
    """What one group gets in a cluster reduction: a part of each block's tile, two barriers."""

    def __init__(self, name: str, blocks: int, readers: int) -> None:
        self.parts: list[Value | None] = [None] * blocks
        self.full = PhaseBarrier(f"{name} full", 1)
        self.free = PhaseBarrier(f"{name} free", WARPS * readers)
        self.name = name

    def take(self) -> Value:
        """The sum in the order of the blocks, rounded each time; the places are empty again."""
        found = [part for part in self.parts if part is not None]
        if len(found) < len(self.parts):
            raise CheckFailed(f"race: {self.name} reads parts that have not landed")
        self.parts = [None] * len(found)
        total = found[0]
        for part in found[1:]:
            total = np.asarray(total + part, dtype=total.dtype)
        return total


@dataclass
class Push:
    """A part under way to another block."""

    to: Company
    sender: int
    part: Value

    def land(self) -> bool:
        """A part arrives; a place that has not been read since the last one is a race."""
        if self.to.parts[self.sender] is not None:
            raise CheckFailed(f"race: block {self.sender} pushes over a part of {self.to.name}")
        self.to.parts[self.sender] = self.part
        self.to.full.landed(self.part.nbytes)
        return True
