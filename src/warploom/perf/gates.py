"""The gates of a loop that is replayed: when loads arrive, slots are free and turns begin.

loads     one thread fills the rings in the order of its steps; a copy takes a latency and
          its time on the link: an SM's own rate, or its share of L2's when all of them load.
          Neighbours that ask for the same bytes are served together (`Rates`)
turned    warps of the loading group take a slot, turn it for as long as `extract.turn_cycles`
          says, and publish another
slots     a ring's slot is filled again when every group gave it back
turns     a group's turn begins when the one before passes it on
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.ir.block import BlockProgram, Pipeline
from warploom.codegen.ir.steps import (
    Acquire,
    Fill,
    Publish,
    Release,
    RingStep,
    Step,
    TurnPass,
    TurnWait,
    Wait,
)
from warploom.perf.extract import turn_cycles
from warploom.schedule.model.costs import CostTable

KIB = 1024
BOX = 128  # bytes of a row that one copy instruction brings
WAITS = Wait | TurnWait
SIGNALS = Release | TurnPass
Rates = Mapping[str, float]  # cycles in which an SM gets a KiB of a load, by its label


@dataclass(frozen=True)
class Copy:
    """A use of a ring's slot, in cycles: its copies begin, are complete, all groups gave it back
    (infinite, where the walk ended before)."""

    ring: str
    slot: int
    begun: float
    complete: float
    freed: float


def section_of(block: BlockProgram, index: str, part: int) -> Pipeline:
    """The loop of a compute group."""
    role = next(role for role in block.roles if role.part == part)
    return next(s for s in role.sections if isinstance(s, Pipeline) and s.loop.index == index)


def loading_of(block: BlockProgram, index: str) -> tuple[Pipeline, ...]:
    """What fills the slots of a loop: the loading thread, and the warps that turn operands."""
    return tuple(
        section
        for role in block.roles
        for section in role.sections
        if not role.computes and isinstance(section, Pipeline) and section.loop.index == index
    )


def _uses(steps: Sequence[Step], ring: str) -> int:
    """How many of a group's waits, or releases, are of a ring."""
    return sum(isinstance(step, Wait | Release) and step.ring == ring for step in steps)


class Blocks:
    """Gates of the blocks that share an SM: groups of one, then those of the next."""

    def __init__(self, blocks: Sequence[Gates]) -> None:
        self.blocks = blocks

    def opens(self, group: int, number: int) -> float | None:
        """What the gates of the group's own block say."""
        block, part = divmod(group, self.blocks[0].parts)
        return self.blocks[block].opens(part, number)

    def signals(self, group: int, number: int, now: float) -> None:
        """What the gates of the group's own block say."""
        block, part = divmod(group, self.blocks[0].parts)
        self.blocks[block].signals(part, number, now)


class Gates:
    """Loads, slots and turns of one loop, as `partition.Gates`."""

    def __init__(self, block: BlockProgram, index: str, table: CostTable, rates: Rates) -> None:
        self.block, self.table, self.rates = block, table, rates
        # Midway between L2's median and DRAM's: tasks that run together ask for the same bytes at
        # much the same time, so that all wait for what one of them has brought from DRAM. With
        # L2's alone rings of two slots were predicted 3 to 20 % too fast.
        self.latency = (table.value("load.latency") + table.at("high").value("load.latency")) / 2
        self.parts = block.placement.parts
        self.sections = [section_of(block, index, part) for part in range(self.parts)]
        self.waits = [[s for s in one.steady if isinstance(s, WAITS)] for one in self.sections]
        self.gives = [[s for s in one.steady if isinstance(s, SIGNALS)] for one in self.sections]
        self.full: dict[str, list[float]] = {}
        self.freed: dict[str, dict[int, list[float]]] = {}
        self.begun: dict[str, list[float]] = {}  # when the copies into a slot began
        self.passed: list[list[float]] = [[] for _ in range(self.parts)]
        self.passed[0].append(0.0)
        self.turns = [0] * self.parts
        # What the iterations started ahead have waited for, given back and passed on.
        self.waited = [self._ahead(one, Wait) for one in self.sections]
        self.given = [self._ahead(one, Release) for one in self.sections]
        for part in range(self.parts):
            for ring, count in self.given[part].items():
                for use in range(count):
                    self._releases(ring, use).append(0.0)
        loader, *turners = loading_of(block, index)
        self.loading = [self._loads(loader), *map(self._turns, turners)]
        self.blocked = False

    def _ahead(self, section: Pipeline, kind: type[Wait | Release]) -> dict[str, int]:
        count: dict[str, int] = {}
        for step in (step for steps in section.prologue for step in steps):
            if isinstance(step, kind):
                count[step.ring] = count.get(step.ring, 0) + 1
        return count

    def _releases(self, ring: str, use: int) -> list[float]:
        return self.freed.setdefault(ring, {}).setdefault(use, [])

    def opens(self, group: int, number: int) -> float | None:
        """When the group's wait of that number is over; None: not known yet."""
        own = self.waits[group]
        turn, place = divmod(number, len(own))
        step = own[place]
        if isinstance(step, TurnWait):
            each = sum(isinstance(one, TurnWait) for one in own)
            before = sum(isinstance(one, TurnWait) for one in own[:place])
            given = self.passed[group]
            at = turn * each + before
            return given[at] + self.table.value("barrier.named") if at < len(given) else None
        each = _uses(own, step.ring)
        before = _uses(own[:place], step.ring)
        use = self.waited[group].get(step.ring, 0) + turn * each + before
        slots = self.full.setdefault(step.ring, [])
        while len(slots) <= use:
            if not any(map(self._goes_on, self.loading)):
                return None
        return slots[use]

    def _goes_on(self, one: Generator[None, None, None]) -> bool:
        """Whether what fills slots could do so once more."""
        self.blocked = False
        next(one)
        return not self.blocked

    def _takers(self, ring: str) -> int:
        """How many give a slot of a ring back."""
        own = self.block.ring(ring)
        return self.block.is_raw(own) + self.block.takers(own)

    def signals(self, group: int, number: int, now: float) -> None:
        """The group gives a slot back, or its turn on."""
        own = self.gives[group]
        turn, place = divmod(number, len(own))
        step = own[place]
        if isinstance(step, TurnPass):
            self.passed[(group + 1) % self.parts].append(now)
            return
        each = _uses(own, step.ring)
        before = _uses(own[:place], step.ring)
        use = self.given[group].get(step.ring, 0) + turn * each + before
        self._releases(step.ring, use).append(now)

    def copies(self) -> tuple[Copy, ...]:
        """Every use of a slot that was filled in the walk, and not before it."""
        found: list[Copy] = []
        for ring, begun in self.begun.items():
            depth = self.block.ring(ring).depth
            for use, begin in list(enumerate(begun))[depth:]:
                given = self._releases(ring, use)
                freed = max(given) if len(given) == self._takers(ring) else inf
                found.append(Copy(ring, use % depth, begin, self.full[ring][use], freed))
        return tuple(found)

    def _loads(self, section: Pipeline) -> Generator[None, None, None]:
        """The loading thread: yields after every slot published, and blocked before one that is
        not given back."""
        now, link, began = 0.0, 0.0, 0.0
        uses: dict[str, int] = {}
        while True:
            complete = now
            for step in section.steady:
                if not isinstance(step, Acquire | Fill | Publish):
                    continue
                ring = step.ring
                if uses.get(ring, 0) < self.block.ring(ring).depth:
                    complete = 0.0  # the walk begins with full rings
                    if not isinstance(step, Publish):
                        continue
                if isinstance(step, Acquire):
                    before = uses[ring] - self.block.ring(ring).depth
                    yield from self._until(ring, before)
                    now = self._freed_at(ring, before, now)
                    complete = began = now
                elif isinstance(step, Fill):
                    size, issues = self._copy(step)
                    now += issues * self.table.value("load.issue")
                    every = self.table.value("load.per_kib_all")
                    share = size / KIB * self.rates.get(step.op.label, every)
                    share *= self.block.launch.resident
                    link = max(link, now - share) + share
                    alone = now + size / KIB * self.table.value("load.per_kib")
                    arrived = max(alone, link) + self.latency
                    complete = max(complete, arrived)
                else:
                    uses[ring] = uses.get(ring, 0) + 1
                    self.full.setdefault(ring, []).append(complete)
                    self.begun.setdefault(ring, []).append(began)
                    yield

    def _until(self, ring: str, use: int) -> Generator[None, None, None]:
        """Blocked, until a use of a slot has been given back."""
        while use >= 0 and len(self._releases(ring, use)) < self._takers(ring):
            self.blocked = True
            yield

    def _freed_at(self, ring: str, use: int, now: float) -> float:
        """When one who waits for that sees it."""
        if use < 0:
            return now
        seen = max(self._releases(ring, use)) + self.table.value("barrier.wait")
        return max(now + self.table.value("barrier.poll"), seen)

    def _turns(self, section: Pipeline) -> Generator[None, None, None]:
        """The warps that turn operands, as `_loads`; they too begin with full rings."""
        now, began = 0.0, 0.0
        uses: dict[str, int] = {}
        while True:
            for step in section.steady:
                if not isinstance(step, RingStep | Fill):
                    continue
                ring = step.ring
                use = uses.get(ring, 0)
                idle = use < self.block.ring(ring).depth
                if isinstance(step, Acquire) and not idle:
                    before = use - self.block.ring(ring).depth
                    yield from self._until(ring, before)
                    now = began = self._freed_at(ring, before, now)
                elif isinstance(step, Wait) and not idle:
                    while len(self.full.setdefault(ring, [])) <= use:
                        self.blocked = True
                        yield
                    now = max(now, self.full[ring][use]) + self.table.value("barrier.wait")
                elif isinstance(step, Fill) and not idle and step.op.dst is not None:
                    now += turn_cycles(self.table, step.op.dst.type)
                elif isinstance(step, Release):
                    self._releases(ring, use).append(now)
                    uses[ring] = use + 1
                elif isinstance(step, Publish):
                    self.full.setdefault(ring, []).append(now)
                    self.begun.setdefault(ring, []).append(began)
                    uses[ring] = use + 1
                    yield

    def _copy(self, step: Fill) -> tuple[int, int]:
        """Bytes that this block loads for one tile, and the copies it takes."""
        assert step.op.dst is not None
        kind, plan = step.op.dst.type, self.block.launch
        size = self.block.placement.shared[step.op.dst.name][1].bytes
        if is_multicast(self.block.placement.program, plan, step.op):
            size //= plan.cluster[1]
        return size, max(1, ceil(kind.shape[-1] * kind.dtype.bytes / BOX))
