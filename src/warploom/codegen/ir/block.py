"""The block program: what each role of a thread block does, with every wait and signal explicit.

It is the one form that both the random-interleaving simulator and the CUDA emitter consume, so
what is checked is what is emitted. The steps are those of `ir.steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.codegen.ir.layout import ALIGNMENT, SharedTile
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import Issue, Step, Wait
from warploom.tile import Loop, Op


@dataclass(frozen=True)
class Buffer:
    """One tile of a ring's slot: byte offset in the slot and the loads that fill it.

    Loops that load equal tiles of one array take turns with one ring, so there can be several.
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

    @property
    def copied_bytes(self) -> int:
        """Bytes that the copies of one slot bring."""
        return sum(buffer.tile.bytes for buffer in self.buffers)


@dataclass(frozen=True)
class Straight:
    """Steps run once a task."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Pipeline:
    """A loop with `depth` iterations started ahead.

    With trips > depth - 1: prologue[0..depth-1], then `steady` for each further iteration, then
    epilogue[0..depth-1]. With fewer trips: `plain`, one iteration after the other.

    `copies`: register tiles with several copies, used in turn (`passes.copies`); `plain` uses the
    first ones only.

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
    copies: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Role:
    """A warp group: its registers a thread, its warps and its sections in order.

    `ahead`: what is done for a task before it begins, where a section says so, and for the first
    task at the start: waits and one matmul of its loop's first iteration (`passes.overlap`).
    """

    name: str
    warps: int
    registers: int
    sections: tuple[Straight | Pipeline, ...]
    part: int = -1
    ahead: tuple[Wait | Issue, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether it is the producer."""
        return self.part < 0


@dataclass(frozen=True)
class BlockProgram:
    """A scheduled program: rings, roles and the data they came from."""

    placement: Placement
    schedule: KernelSchedule
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

    def __str__(self) -> str:
        lines = [f"block program {self.placement.program.name}, schedule {self.schedule.name}"]
        for ring in self.rings:
            inner = ", ".join("/".join(buffer.names) for buffer in ring.buffers)
            lines.append(f"  ring {ring.name} x{ring.depth}: {inner} ({ring.slot_bytes} B a slot)")
        for role in self.roles:
            lines.append(f"  {role.name}: {role.warps} warps, {role.registers} registers")
            lines += [f"    ahead: {step}" for step in role.ahead]
            for section in role.sections:
                lines += _section_lines(section)
        return "\n".join(lines) + "\n"


def _section_lines(section: Straight | Pipeline) -> list[str]:
    if isinstance(section, Straight):
        return [f"    {step}" for step in section.steps]
    lines = [f"    loop {section.loop.index}, {section.depth} started ahead"]
    lines += [f"      {name} x{count}" for name, count in sorted(section.copies.items())]
    for number, steps in enumerate(section.prologue):
        lines += [f"      prologue {number}: {step}" for step in steps]
    lines += [f"      steady: {step}" for step in section.steady]
    for number, steps in enumerate(section.epilogue):
        lines += [f"      epilogue {number}: {step}" for step in steps]
    lines += [f"      left out: {step}" for step in section.skip]
    lines += [f"      no iteration: {step}" for step in section.none]
    return lines
