"""What a simulated cluster holds: slots of rings, matmuls under way, and agents."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from warploom.codegen.ir.block import Ring, Role
from warploom.codegen.oracle.barriers import PhaseBarrier
from warploom.tile import Op
from warploom.tile.evaluate import Value
from warploom.tile.interpret import begun


@dataclass
class Slot:
    """One slot of a ring: tile values by buffer, copies under way and readers under way."""

    values: list[Value | None]
    landing: int = 0
    readers: int = 0
    version: int = 0


@dataclass
class SharedRing:
    """A ring of one block."""

    ring: Ring
    slots: list[Slot]
    full: list[PhaseBarrier]
    empty: list[PhaseBarrier]


@dataclass
class Room:
    """An operand in shared memory that every group writes a part of: the parts, how often their
    writers had met before, the matmuls under way that read it, and how often a group that took what
    one has written for all had met before it did."""

    parts: list[Value | None]
    written: list[int]
    readers: int = 0
    taken: dict[int, int] = field(default_factory=dict[int, int])


@dataclass
class Matmul:
    """A started matmul: the op, its operands' slots and what it will do when it completes."""

    op: Op
    slots: list[tuple[Slot, int, int]]  # slot, buffer, version when started
    registers: set[str]
    symbols: dict[str, int]
    rooms: dict[str, Room] = field(default_factory=dict[str, Room])  # that operands lie in
    void: bool = False  # reads no matter what, and nobody reads its result


@dataclass
class Panels:
    """What a late store has written: the op as its group runs it, and where."""

    op: Op
    local: Op
    value: Value
    symbols: dict[str, int]


@dataclass
class Agent:
    """A role of a block: its registers, ring positions and unfinished matmuls."""

    name: str
    block: int
    role: Role
    state: dict[str, Value] = field(default_factory=dict[str, Value])
    taken: dict[str, int] = field(default_factory=dict[str, int])
    released: dict[str, int] = field(default_factory=dict[str, int])
    at: dict[str, Slot] = field(default_factory=dict[str, Slot])
    # of rings taken once an iteration: the loop's index, its first value and what was taken before
    entered: dict[str, tuple[str, int, int]] = field(
        default_factory=dict[str, tuple[str, int, int]]
    )
    tasks: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    count: int = 0  # tasks taken, or asked for in vain
    next: dict[str, int] | None = None  # the symbols of the task to do next
    begun: set[str] = field(default_factory=set[str])  # rings whose first slot was taken ahead
    flying: deque[Matmul] = field(default_factory=deque[Matmul])
    waits_for: str = ""
    meetings: int = 0  # of the block's groups that this one has come to
    waiting: bool = False  # at the last of them
    iteration: int = 0  # of its loop, from 0 on
    staged: dict[str, int] = field(default_factory=dict[str, int])  # times it wrote its part
    reductions: int = 0  # in the cluster, so far
    pushed: bool = False  # in the present one of them
    panels: Panels | None = None  # of a store, not copied yet
    copying: bool = False  # copies may still read the panels


class Sums:
    """Which sums that stores add to in turn have been begun, each group's part by itself."""

    def __init__(self) -> None:
        self.known = set[tuple[object, ...]]()

    def store(self, op: Op, part: int, memory: dict[str, Value], symbols: dict[str, int]) -> Op:
        """The store of a part, which begins a sum where it is the first; the first part counts."""
        if (turn := op.turn) is None:
            return op
        if part == 0:
            begun(op, turn, memory, symbols)
        place = (turn.counts.name, part, *(index.evaluate(symbols) for index in turn.at))
        first = place not in self.known
        self.known.add(place)
        return replace(op, kind="store") if first else op
