"""The block program: what each role of a thread block does, with every wait and signal explicit.

It is the one form that both the random-interleaving simulator and the CUDA emitter consume, so
what is checked is what is emitted. The steps are those of `ir.steps`. A block program begins as
what a schedule says (`passes.scheduled`: loops are `Scheduled`), and the passes of `passes.lower`
bring it to the form that runs (loops are `Pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from warploom.codegen.ir.layout import ALIGNMENT, SharedTile
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Issue, Join, OpStep, RingStep, Step, Wait
from warploom.tile import Loop, Op

_Any = TypeVar("_Any")


@dataclass(frozen=True)
class Buffer:
    """One tile of a ring's slot: byte offset in the slot and the loads that fill it.

    Loops that load tiles of one array take turns with one ring, so there can be several; `tile` is
    the one with most rows.
    """

    loads: tuple[Op, ...]
    tile: SharedTile
    offset: int

    @property
    def names(self) -> tuple[str, ...]:
        """The tile variables that live here."""
        return tuple(op.dst.name for op in self.loads if op.dst is not None)


@dataclass(frozen=True)
class Ring:
    """A multi-buffered piece of shared memory with a full and an empty barrier a slot."""

    name: str
    depth: int
    buffers: tuple[Buffer, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: every tile begins where a swizzle does."""
        last = self.buffers[-1]
        return last.offset + -(-last.tile.bytes // ALIGNMENT) * ALIGNMENT


def make_ring(placement: Placement, name: str, depth: int, columns: Sequence[Sequence[Op]]) -> Ring:
    """The ring whose slots hold one tile for each column of loads, which take turns with it."""
    buffers: list[Buffer] = []
    offset = 0
    for loads in columns:
        tiles = [placement.shared[op.dst.name][1] for op in loads if op.dst is not None]
        tile = max(tiles, key=lambda one: one.bytes)
        buffers.append(Buffer(tuple(loads), tile, offset))
        offset += -(-tile.bytes // ALIGNMENT) * ALIGNMENT
    return Ring(name, depth, tuple(buffers))


@dataclass(frozen=True)
class Straight:
    """Steps run once a task."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class At:
    """A step and its time, in cycles from the start of its iteration."""

    time: int
    step: RingStep | OpStep


@dataclass(frozen=True)
class Scheduled:
    """A loop as its schedule has it: the steps of one iteration in program order, each with its
    time. An iteration begins every `interval` cycles, whether the one before has ended or not.
    """

    loop: Loop
    interval: int
    steps: tuple[At, ...]


@dataclass(frozen=True)
class Pipeline:
    """A loop with `depth` iterations started ahead.

    With trips > depth - 1: prologue[0..depth-1], then `steady` for each further iteration, then
    epilogue[0..depth-1]. With fewer trips: `plain`, one iteration after the other.

    A loop with `until` may end earlier for this part: `skip` then runs for each iteration left
    out, and `empty` once more when all of them are.

    `none` runs where there is no iteration (with one started ahead).
    """

    loop: Loop
    depth: int
    prologue: tuple[tuple[Step, ...], ...]
    steady: tuple[Step, ...]
    epilogue: tuple[tuple[Step, ...], ...]
    plain: tuple[Step, ...]
    skip: tuple[Step, ...] = ()
    empty: tuple[Step, ...] = ()
    none: tuple[Step, ...] = ()

    def with_iterations(self, change: Callable[[Sequence[Step]], tuple[Step, ...]]) -> Pipeline:
        """The pipeline with every run of steps that does iterations replaced."""
        return replace(
            self,
            prologue=tuple(map(change, self.prologue)),
            steady=change(self.steady),
            epilogue=tuple(map(change, self.epilogue)),
            plain=change(self.plain),
        )


Section = Straight | Scheduled | Pipeline


TRANSPOSES = -2  # the part of the role that turns operands


@dataclass(frozen=True)
class Role:
    """A warp group, or some warps of the loading one: its registers a thread, its warps and its
    sections in order.

    `ahead`: what is done for a task before it begins, where a section says so, and for the first
    task at the start: waits and one matmul of its loop's first iteration (`passes.overlap`).
    """

    name: str
    warps: int
    registers: int
    sections: tuple[Section, ...]
    part: int = -1
    ahead: tuple[Wait | Issue, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether it is the producer."""
        return self.part == -1

    @property
    def transposes(self) -> bool:
        """Whether it turns loaded operands: it takes slots of the producer and fills others."""
        return self.part == TRANSPOSES

    @property
    def computes(self) -> bool:
        """Whether it is a compute group."""
        return self.part >= 0


@dataclass(frozen=True)
class BlockProgram:
    """A scheduled program: rings, roles and the data they came from.

    `name` is that of its schedule; with `pingpong` the compute groups take the tensor core in turn.
    """

    name: str
    placement: Placement
    launch: LaunchPlan
    pingpong: bool
    rings: tuple[Ring, ...]
    roles: tuple[Role, ...]

    def ring(self, name: str) -> Ring:
        """The ring of that name."""
        return next(ring for ring in self.rings if ring.name == name)

    def home(self, name: str) -> tuple[Ring, Buffer]:
        """The ring and buffer in which a shared variable lives."""
        for ring in self.rings:
            for buffer in ring.buffers:
                if name in buffer.names:
                    return ring, buffer
        raise KeyError(name)

    def copied_bytes(self, ring: Ring, index: str) -> int:
        """Bytes that the copies of one slot bring in a loop; "": outside of loops."""
        loops = [loop for loop in self.placement.program.loops() if loop.index == index]
        here = {op.id for loop in loops for op in loop.body if isinstance(op, Op)}
        found = 0
        for buffer in ring.buffers:
            load = next((op for op in buffer.loads if op.id in here), buffer.loads[0])
            found += self.placement.shared[load.dst.name][1].bytes if load.dst is not None else 0
        return found

    def rings_read(self, op: Op) -> list[Ring]:
        """The rings that an op reads, in order of its operands."""
        shared = [var.name for var in self.placement.slots_read(op)]
        return list({ring.name: ring for ring, _ in map(self.home, shared)}.values())

    def used_by(self, part: int) -> set[str]:
        """The rings whose slots a compute group of that number takes: all that groups read, where
        every group does all ops."""
        placement = self.placement
        if not placement.led:
            alone = placement.only_turned
            return {ring.name for ring in self.rings if alone.isdisjoint(ring.buffers[0].names)}
        ops = [op for op in placement.program.ops() if op.id in placement.fusion.kept]
        ops = [op for op in ops if not (op.dst and placement.is_shared(op.dst))]
        own = [op for op in ops if placement.does(op, part)]
        return {ring.name for op in own for ring in self.rings_read(op)}

    def takers(self, ring: Ring) -> int:
        """How many compute groups take the slots of a ring."""
        return sum(ring.name in self.used_by(part) for part in range(self.placement.parts))

    def filled_in(self, loop: Loop) -> set[str]:
        """The rings that take a slot every iteration of a loop."""
        names = {op.dst.name for op in loop.body if isinstance(op, Op) and op.dst is not None}
        return {ring.name for ring in self.rings for b in ring.buffers if names & set(b.names)}

    def is_turned(self, ring: Ring) -> bool:
        """Whether warps that transpose fill the slots of a ring, and not the producer."""
        return not self.placement.turned.keys().isdisjoint(ring.buffers[0].names)

    def is_raw(self, ring: Ring) -> bool:
        """Whether warps that transpose take the slots of a ring."""
        return not set(self.placement.turned.values()).isdisjoint(ring.buffers[0].names)

    def taken_in(self, role: Role, loop: Loop) -> set[str]:
        """The rings that a role takes a slot of in every iteration of a loop."""
        if role.computes:
            return self.filled_in(loop) & self.used_by(role.part)
        own = {ring.name for ring in self.rings if self.is_raw(ring) and role.transposes}
        return self.filled_in(loop) & own

    def filled_by(self, role: Role, loop: Loop) -> set[str]:
        """The rings whose slots a role that loads or transposes fills in a loop."""
        own = {ring.name for ring in self.rings if self.is_turned(ring) == role.transposes}
        return self.filled_in(loop) & own

    def rewritten(self, change: Callable[[Role, Section], Sequence[Section]]) -> BlockProgram:
        """The block program with every section replaced by what `change` makes of it."""
        roles = tuple(
            replace(role, sections=tuple(new for old in role.sections for new in change(role, old)))
            for role in self.roles
        )
        return replace(self, roles=roles)


def with_turns(placement: Placement, steps: Sequence[_Any]) -> Iterator[tuple[_Any, Op | None]]:
    """Each step with the op that groups do in turn for which it is, or None: every iteration has
    it. A join in turn is for the step behind it."""
    for place, step in enumerate(steps):
        here = steps[place + 1] if isinstance(step, Join) and step.in_turn else step
        own = isinstance(here, OpStep) and here.op.id in placement.in_turn
        yield step, here.op if own and isinstance(here, OpStep) else None


def steps_of(section: Section) -> Iterator[Step]:
    """The steps of one iteration of a section, or of one task."""
    match section:
        case Straight():
            yield from section.steps
        case Scheduled():
            yield from (at.step for at in section.steps)
        case Pipeline():
            yield from section.steady


def ops_of(section: Section) -> Iterator[Op]:
    """The ops of one iteration of a section, or of one task."""
    return (step.op for step in steps_of(section) if isinstance(step, OpStep))
