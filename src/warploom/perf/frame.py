"""What all launches of a program under a plan have in common: what a task loads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.ir.layout import padded
from warploom.codegen.ir.plan import LaunchPlan
from warploom.rewrites.split_sums import leaves_sums
from warploom.tile import Index, Loop, Op, Program


@dataclass(frozen=True)
class Strip:
    """What one load brings a task: `bytes` each time, in the loops of these numbers around it.

    first   where it begins in its array, in the first iteration of the loops
    """

    op: Op
    first: tuple[Index, ...]
    loops: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, eq=False)
class Frame:
    """What is the same in all launches of a program under a plan."""

    program: Program
    plan: LaunchPlan

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """What a task loads, over all iterations of the loops around each load."""
        index = [loop.index for loop in self.program.loops()]
        found: list[Strip] = []
        for op, around in loads_of(self.program):
            first = (*(span.start for span in op.spans), *(one.start for one in around))
            loops = tuple(index.index(one.index) for one in around)
            found.append(Strip(op, first, loops, bytes_of(op)))
        return tuple(found)

    @cached_property
    def asked(self) -> tuple[float, ...]:
        """Bytes of each strip that a block asks for itself, of what comes to its SM: the last panel
        of rows that do not fill it comes whole."""
        blocks = self.plan.cluster[1]
        shared = (is_multicast(self.program, self.plan, strip.op) for strip in self.strips)
        return tuple(
            copied_of(strip.op) / (blocks if one else 1) * self.plan.resident
            for strip, one in zip(self.strips, shared, strict=True)
        )

    @cached_property
    def stored(self) -> float:
        """Bytes that a task stores."""
        return float(
            sum(
                prod(op.srcs[0].type.shape) * op.srcs[0].type.dtype.bytes
                for op in self.program.ops()
                if op.kind.startswith("store")
            )
        )

    @cached_property
    def handed_on(self) -> float:
        """Of them bytes of sums that a second kernel adds up (`rewrites.split_sums`)."""
        return self.stored if leaves_sums(self.program) else 0.0

    @cached_property
    def exchanged(self) -> float:
        """Bytes of sums that a task gets from others of its cluster."""
        return float(
            sum(
                (int(op.value or 1) - 1) * prod(op.dst.type.shape) * op.dst.type.dtype.bytes
                for op in self.program.ops()
                if op.kind == "reduce_scatter" and op.dst is not None
            )
        )

    @cached_property
    def waited(self) -> int:
        """Bytes loaded once a task into a slot that has to be free first."""
        return sum(
            bytes_of(op)
            for op, around in loads_of(self.program)
            if not around and op.dst is not None and self.plan.task_rings.get(op.dst.name, 1) == 1
        )


def loads_of(program: Program) -> list[tuple[Op, tuple[Loop, ...]]]:
    """Loads with the loops around them, the outermost first."""
    found: list[tuple[Op, tuple[Loop, ...]]] = []

    def visit(body: Sequence[Op | Loop], around: tuple[Loop, ...]) -> None:
        for item in body:
            if isinstance(item, Loop):
                visit(item.body, (*around, item))
            elif item.kind == "load":
                found.append((item, around))

    visit(program.body, ())
    return found


def copied_of(op: Op) -> int:
    """Bytes that its copies bring, those of the columns beyond it in its last panel included."""
    assert op.dst is not None
    kind = op.dst.type
    if len(kind.axes) != 2:
        return bytes_of(op)
    return kind.shape[0] * padded(kind.shape[1], kind.dtype.bytes) * kind.dtype.bytes


def bytes_of(op: Op) -> int:
    """Bytes of the tile that a load brings."""
    assert op.dst is not None
    return prod(op.dst.type.shape) * op.dst.type.dtype.bytes
