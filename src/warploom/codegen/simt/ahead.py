"""Which loads begin before their place in the program, so that many are under way at once.

A load of a loop without loops in it runs iterations ahead, and so does one of persistent blocks
that take task after task, where a task has no loop: every thread copies what it will need
into shared memory (cp.async) and reads it back itself, so nobody waits for anybody. A load that is
written again further down reads it back again, and need not stay in registers. What is too
small for that copy runs one iteration ahead, in registers. A staged schedule copies the tiles of a
block's one task the same way where the task begins. Other loads begin where their body
begins, as far as registers for them go; their values stay as they are in memory until they are
used. Arrays that the program stores to are loaded in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from warploom.codegen.simt.forms import COL, TILE, Layout
from warploom.codegen.simt.schedule import WIDEST_BYTES, SimtSchedule
from warploom.tile import Loop, Op, Program

SMALLEST_COPY = 4  # bytes that cp.async copies at least
Body = tuple[Op | Loop, ...]


@dataclass(frozen=True)
class Slot:
    """Where a load's copies lie: `at` bytes from the start of its loop's ring, in a stage `pieces`
    of `piece` bytes for every thread."""

    at: int
    pieces: int
    piece: int


@dataclass(frozen=True)
class Ahead:
    """Loads that begin early.

    first   ops whose load begins with their body
    next    ops whose load begins with the iteration before
    slots   by op, where the copies of loads that run iterations ahead lie
    copies  the ops that copy: the first of those with one slot
    stages  by loop index, bytes of a stage of its ring; "" is the walk over the tasks
    """

    first: frozenset[int]
    next: frozenset[int]
    slots: Mapping[int, Slot]
    copies: frozenset[int]
    stages: Mapping[str, int]

    @property
    def of_tasks(self) -> bool:
        """Whether loads of the next tasks begin in this one."""
        return "" in self.stages


def line_bytes(op: Op, layout: Layout, form: str) -> int:
    """Bytes of neighbouring elements that a thread loads with one access."""
    assert op.array is not None
    spanned = [number for number, span in enumerate(op.spans) if span.size is not None]
    wide = form in (TILE, COL) and spanned[-1] == len(op.array.dims) - 1
    return op.array.dtype.bytes * (layout.schedule.vector if wide else 1)


def held_bytes(op: Op, layout: Layout, form: str) -> int:
    """Bytes that a thread holds of what a load gives."""
    assert op.dst is not None and op.array is not None
    return prod(layout.extents(op.dst.type, form)) * op.array.dtype.bytes


def ahead(program: Program, layout: Layout, forms: Mapping[str, str], registers: int) -> Ahead:
    """The loads of a program that begin early; their values may take so many registers a thread."""
    schedule = layout.schedule
    everywhere = {op.array.name for op in program.ops() if op.array and op.kind != "load"}
    first, next_ = set[int](), set[int]()
    slots: dict[int, Slot] = {}
    copies = set[int]()
    stages: dict[str, int] = {}
    for index, body in _bodies(program.body):
        room, bytes_ = registers, 0
        same: dict[tuple[object, ...], Slot] = {}
        walks = bool(index) or _walks_ahead(schedule)
        innermost = not any(isinstance(item, Loop) for item in body)
        # The one task of a block loads what it stores to only later, too.
        staged = schedule.staged and not index and innermost
        stored = set[str]() if staged else everywhere
        for op in body:
            if isinstance(op, Loop):
                continue
            if op.kind != "load" and op.array is not None:
                stored.add(op.array.name)
            if op.kind != "load" or op.dst is None:
                continue
            if op.array is None or op.array.name in stored:
                continue
            form = forms[op.dst.name]
            line, held = line_bytes(op, layout, form), held_bytes(op, layout, form)
            runs_ahead = schedule.stages > 1 and walks and innermost
            runs_ahead = runs_ahead or (staged and form == TILE)
            runs_ahead = runs_ahead and _changes(op, index, program)
            words = held // line * -(-line // SMALLEST_COPY)
            if runs_ahead and line % SMALLEST_COPY == 0:
                piece = min(line, WIDEST_BYTES)
                key = (op.array, op.spans, op.value, form)
                if key not in same:
                    same[key] = Slot(bytes_, held // piece, piece)
                    bytes_ += held * schedule.threads
                    copies.add(op.id)
                slots[op.id] = same[key]
            elif runs_ahead and 2 * words <= room:
                next_.add(op.id)
                room -= 2 * words
            elif words <= room:
                first.add(op.id)
                room -= words
        if bytes_ or (not index and next_):
            stages[index] = bytes_
    return Ahead(frozenset(first), frozenset(next_), slots, frozenset(copies), stages)


def _walks_ahead(schedule: SimtSchedule) -> bool:
    """Whether a block knows its next tasks while it does one."""
    plan = schedule.launch
    return plan.persistent and plan.tile_scheduler == "static"


def _changes(op: Op, index: str, program: Program) -> bool:
    """Whether a load is another one in the next iteration of the loop, or the next task."""
    symbols = {index} if index else {name for name, _ in program.grid}
    used = frozenset[str]().union(*(span.start.symbols() for span in op.spans))
    # What a task reads from an array first would be waited for.
    return bool(symbols & used) and not used & {read.name for read in program.every_read()}


def _bodies(body: Body, index: str = "") -> Iterator[tuple[str, Body]]:
    """Every body with the index of its loop."""
    yield index, body
    for item in body:
        if isinstance(item, Loop):
            yield from _bodies(item.body, item.index)
