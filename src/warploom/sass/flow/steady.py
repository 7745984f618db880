"""The steady loops of a kernel: innermost ones around matrix instructions, along their usual path.

What a warp group repeats is one natural loop. Of the ways through it the shortest is the usual one:
masks of whole tiles, corrections that a vote skips and polls that failed stand beside it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.loops import Loop, natural_loops
from warploom.sass.flow.paths import block_edges

MATRIX: Final = "HGMMA", "QGMMA", "IGMMA"  # 16-bit and tf32, 8-bit, integer
MATRIX_STORES: Final = "STSM", "UTMASTG", "UTMAREDG"
ELEMENT_STORES: Final = "STG", "RED", "STS"
STORED_BITS: Final = re.compile(r"\.[US]?(8|16|64|128)(?=\.|$)")


@dataclass(frozen=True)
class Way:
    """Instructions that a warp takes one after the other, and whether control jumps behind each."""

    instructions: tuple[Instruction, ...]
    jumps: tuple[bool, ...]


@dataclass(frozen=True)
class SteadyLoop(Way):
    """One pass of a loop, from its header (a block) on."""

    header: int

    @property
    def matmuls(self) -> int:
        """Matrix instructions in a pass."""
        return sum(item.base in MATRIX for item in self.instructions)


def steady_loops(kernel: Kernel) -> tuple[SteadyLoop, ...]:
    """The innermost loops that hold matrix instructions, in the order of their headers."""
    holding = [loop for loop in natural_loops(kernel) if _matmuls(kernel, loop)]
    inner = [
        loop
        for loop in holding
        if not any(set(other.blocks) < set(loop.blocks) for other in holding)
    ]
    return tuple(found for found in (_pass(kernel, loop) for loop in inner) if found.matmuls)


def loop_passes(kernel: Kernel) -> tuple[SteadyLoop, ...]:
    """A pass of every loop, with matrix instructions or without."""
    return tuple(_pass(kernel, loop) for loop in natural_loops(kernel))


def _matmuls(kernel: Kernel, loop: Loop) -> bool:
    spans = (kernel.blocks[block] for block in loop.blocks)
    return any(item.base in MATRIX for span in spans for item in kernel.items(span))


def way_between(kernel: Kernel, first: SteadyLoop | int, then: int | None) -> Way | None:
    """The usual way from behind a loop, or from a block on, to a block; None: there is none.

    `then` None is any exit. Loops on the way are passed once, as short as they can be: what stands
    beside the usual way (few iterations, tails) is not taken.
    """
    edges = block_edges(kernel)
    if isinstance(first, int):
        starts, closed = {first}, set[int]()
    else:
        own = {loop.header: set(loop.blocks) for loop in natural_loops(kernel)}
        closed = own[first.header]
        starts = {after for block in closed for after in edges[block]} - closed
    goals = {b for b, after in enumerate(edges) if not after} if then is None else {then}
    inside = set(range(len(edges))) - closed | goals
    order = _usual(kernel, edges, starts, goals, inside)
    order = order or _shortest(kernel, edges, starts, goals, inside)
    if order is None:
        return None
    kept = order if then is None else order[:-1]
    return Way(*_taken(kernel, kept, order[-1]))


def _usual(
    kernel: Kernel,
    edges: Sequence[Sequence[int]],
    starts: set[int],
    goals: set[int],
    inside: set[int],
) -> list[int] | None:
    """Blocks from a start to a goal: of the ways that enter no loop twice the one with the most
    stores of whole matrices, else with the most bits stored by a thread, and of those the one with
    the fewest instructions; None: no way leads there. A store stands behind a test whether its
    panel is in the array, and wide ones behind a test whether all of a row is."""
    again = {(block, loop.header) for loop in natural_loops(kernel) for block in loop.blocks}
    known: dict[int, tuple[tuple[int, int, int], int]] = {}  # what a block's way has, what is next
    stack = [(block, False) for block in sorted(starts & inside)]
    seen: set[int] = set()
    while stack:
        block, left = stack.pop()
        after = [b for b in edges[block] if b in inside and (b in goals or (block, b) not in again)]
        if left:
            if block in goals:
                known[block] = (0, 0, 0), block
                continue
            ways = [(known[b][0], -b) for b in after if b in known]
            if ways:
                (matrices, bits, size), behind = max(ways)
                span = kernel.blocks[block]
                items = kernel.items(span)
                matrices += sum(item.base in MATRIX_STORES for item in items)
                bits += sum(_bits(item) for item in items if item.base in ELEMENT_STORES)
                known[block] = (matrices, bits, size - span.size), -behind
        elif block not in seen:
            seen.add(block)
            stack.append((block, True))
            stack += [(b, False) for b in after if b not in seen and block not in goals]
    begins = [block for block in starts & inside if block in known]
    if not begins:
        return None
    way = [max(begins, key=lambda block: (known[block][0], -block))]
    while way[-1] not in goals:
        way.append(known[way[-1]][1])
    return way


def _bits(store: Instruction) -> int:
    """Bits that a thread stores."""
    width = STORED_BITS.search(store.line.opcode)
    return int(width.group(1)) if width else 32


def _pass(kernel: Kernel, loop: Loop) -> SteadyLoop:
    edges = block_edges(kernel)
    inside, start = set(loop.blocks), loop.header
    after = set(edges[start]) & inside
    order = [start]
    if start not in after:
        order += (_shortest(kernel, edges, after, {start}, inside) or [start])[:-1]
    return SteadyLoop(*_taken(kernel, order, start), start)


def _taken(
    kernel: Kernel, order: Sequence[int], then: int
) -> tuple[tuple[Instruction, ...], tuple[bool, ...]]:
    """Instructions of blocks in order, and where control jumps; `then` comes behind the last."""
    instructions: list[Instruction] = []
    jumps: list[bool] = []
    for block, following in zip(order, [*order[1:], then], strict=True):
        span = kernel.blocks[block]
        instructions += kernel.items(span)
        jumps += [False] * span.size
        jumps[-1] = following != block + 1
    return tuple(instructions), tuple(jumps)


def _shortest(
    kernel: Kernel,
    edges: Sequence[Sequence[int]],
    starts: set[int],
    goals: set[int],
    inside: set[int],
) -> list[int] | None:
    """Blocks from a start to a goal, both included, with the fewest instructions before the goal
    (Dijkstra); None: no way leads there inside of the given blocks."""
    heap = [(0, block) for block in sorted(starts & inside)]
    best = {block: 0 for _, block in heap}
    before: dict[int, int] = {}
    while heap:
        so_far, block = heapq.heappop(heap)
        if so_far > best[block]:
            continue
        if block in goals:
            way = [block]
            while way[-1] in before:
                way.append(before[way[-1]])
            return way[::-1]
        further = so_far + kernel.blocks[block].size
        for after in edges[block]:
            if after in inside and further < best.get(after, further + 1):
                best[after], before[after] = further, block
                heapq.heappush(heap, (further, after))
    return None
