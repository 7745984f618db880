"""Paths through a kernel, calls and reconvergence told apart, and dataflow over them.

The edges of a kernel's blocks join every caller of a subroutine with every return, and every BSYNC
with every BSSY of its barrier. A check that must not cry wolf needs better. Here a place is a block
together with how control came there: a RET goes back to its own caller, a BSYNC to where the
last BSSY of its barrier said, an indirect branch to the targets nvdisasm lists for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from warploom.sass.decode.kernel import Block, Instruction, Kernel

DEEPEST_STACK: Final = 6
DEEPEST_NESTING: Final = 12
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Place:
    """A block, the blocks to return to (innermost last) and the open convergence barriers, each
    as (name, block where its threads meet)."""

    block: int
    stack: tuple[int, ...] = ()
    barriers: tuple[tuple[str, int], ...] = ()


def following(kernel: Kernel, place: Place) -> Iterator[Place]:
    """Where control may go after a place. A return with no caller on the stack goes to every
    return point; nesting beyond the limits is forgotten at the far end."""
    block = kernel.blocks[place.block]
    last = kernel.instructions[block.end - 1]
    here = replace(place, barriers=_opened(kernel, block, place.barriers))
    beyond = place.block + 1
    falls = bool(last.line.guard) and beyond < len(kernel.blocks)
    if last.base == "CALL":
        back = (beyond,) if beyond < len(kernel.blocks) else ()
        stack = (*place.stack, *back)[-DEEPEST_STACK:]
        for successor in block.successors:
            skipped = falls and successor == beyond
            yield replace(here, block=successor, stack=place.stack if skipped else stack)
    elif last.base == "RET" and place.stack:
        yield replace(here, block=place.stack[-1], stack=place.stack[:-1])
        if falls:
            yield replace(here, block=beyond)
    elif last.base == "BSYNC" and (meeting := _closed(last.line.operands, here)) is not None:
        yield meeting
        if falls:
            yield replace(here, block=beyond)
    else:
        for successor in _listed_targets(kernel, last.line.note) or block.successors:
            yield replace(here, block=successor)


def _listed_targets(kernel: Kernel, note: str) -> tuple[int, ...]:
    """The blocks an indirect branch may go to, from nvdisasm's remark; empty when it has none."""
    if not note.startswith("BRANCH_TARGETS"):
        return ()
    blocks = kernel.labelled_blocks
    names = note.removeprefix("BRANCH_TARGETS").replace(",", " ").split()
    return tuple(sorted({blocks[name] for name in names if name in blocks}))


def _opened(
    kernel: Kernel, block: Block, barriers: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """The open convergence barriers after the BSSY instructions of a block."""
    for item in kernel.items(block):
        if item.base == "BSSY":
            name, label = item.effects.operands[0].text, item.effects.operands[-1].text
            target = kernel.labelled_blocks.get(label[2:-1])
            if target is not None and (not barriers or barriers[-1] != (name, target)):
                barriers = (*barriers, (name, target))[-DEEPEST_NESTING:]
    return barriers


def _closed(name: str, place: Place) -> Place | None:
    """Where the innermost barrier called `name` meets; None when none is open."""
    for depth in range(len(place.barriers) - 1, -1, -1):
        barrier, block = place.barriers[depth]
        if barrier == name:
            return replace(place, block=block, barriers=place.barriers[:depth])
    return None


def block_edges(kernel: Kernel) -> list[tuple[int, ...]]:
    """The blocks control may reach next from each block, inside one subroutine: a CALL falls
    through, a RET ends. Empty for blocks that control never reaches."""
    edges: list[set[int]] = [set() for _ in kernel.blocks]
    reached = {Place(0)}
    pending = [Place(0)]
    while pending:
        place = pending.pop()
        last = kernel.instructions[kernel.blocks[place.block].end - 1]
        for successor in following(kernel, place):
            same_routine = len(successor.stack) == len(place.stack)
            if same_routine and last.base not in ("CALL", "RET"):
                edges[place.block].add(successor.block)
            if successor not in reached:
                reached.add(successor)
                pending.append(successor)
        if last.base in ("CALL", "RET") and (last.base == "CALL" or last.line.guard):
            edges[place.block].update({place.block + 1} & set(range(len(kernel.blocks))))
    return [tuple(sorted(targets)) for targets in edges]


def fixed_point(
    kernel: Kernel,
    empty: State,
    through: Callable[[int, State], State],
    merge: Callable[[State, State], State],
) -> dict[Place, State]:
    """The state at the start of every place that control reaches.

    `through(block, state)` is the state after a block. `merge(known, new)` joins two paths; it
    must return a state equal to `known` when `new` adds nothing, and may only grow.
    """
    start = Place(0)
    entry: dict[Place, State] = {start: empty}
    pending = [start]
    waiting = {start}
    targets: dict[Place, tuple[Place, ...]] = {}
    while pending:
        place = pending.pop(0)
        waiting.discard(place)
        after = through(place.block, entry[place])
        if place not in targets:
            targets[place] = tuple(following(kernel, place))
        for successor in targets[place]:
            if successor in entry:
                merged = merge(entry[successor], after)
                if merged == entry[successor]:
                    continue
                entry[successor] = merged
            else:
                entry[successor] = after
            if successor not in waiting:
                waiting.add(successor)
                pending.append(successor)
    return entry


def states(
    kernel: Kernel,
    empty: State,
    step: Callable[[State, Instruction], State],
    merge: Callable[[State, State], State],
) -> Iterator[tuple[Instruction, State]]:
    """Every instruction of every place that control reaches, with the state before it.

    `step(state, item)` is the state after an instruction, `merge` as of `fixed_point`.
    """

    def through(block: int, state: State) -> State:
        for item in kernel.items(kernel.blocks[block]):
            state = step(state, item)
        return state

    for place, entry in fixed_point(kernel, empty, through, merge).items():
        state = entry
        for item in kernel.items(kernel.blocks[place.block]):
            yield item, state
            state = step(state, item)
