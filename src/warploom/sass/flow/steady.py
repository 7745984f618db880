"""The steady loops of a kernel: innermost ones around matrix instructions, along their usual path.

What a warp group repeats is one natural loop. Of the ways through it the shortest is the usual one:
masks of whole tiles, corrections that a vote skips and polls that failed stand beside it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.loops import Loop, natural_loops

MATRIX: Final = "HGMMA", "QGMMA", "IGMMA"  # 16-bit and tf32, 8-bit, integer


@dataclass(frozen=True)
class SteadyLoop:
    """One pass: its instructions in order, and of each whether control jumps behind it."""

    header: int
    instructions: tuple[Instruction, ...]
    jumps: tuple[bool, ...]

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
    return any(
        item.base in MATRIX for span in spans for item in kernel.instructions[span.start : span.end]
    )


def _pass(kernel: Kernel, loop: Loop) -> SteadyLoop:
    order = _shortest(kernel, loop)
    instructions: list[Instruction] = []
    jumps: list[bool] = []
    for number, block in enumerate(order):
        span = kernel.blocks[block]
        instructions += kernel.instructions[span.start : span.end]
        jumps += [False] * span.size
        jumps[-1] = order[(number + 1) % len(order)] != block + 1
    return SteadyLoop(loop.header, tuple(instructions), tuple(jumps))


def _shortest(kernel: Kernel, loop: Loop) -> list[int]:
    """Blocks of the way from the header back to it with the fewest instructions (Dijkstra)."""
    inside, start = set(loop.blocks), loop.header
    cost = {block: kernel.blocks[block].size for block in loop.blocks}
    best = {start: cost[start]}
    before: dict[int, int] = {}
    heap = [(cost[start], start)]
    last, least = start, None
    while heap:
        so_far, block = heapq.heappop(heap)
        if so_far > best[block]:
            continue
        for successor in kernel.blocks[block].successors:
            if successor == start:
                if least is None or so_far < least:
                    last, least = block, so_far
            elif successor in inside:
                further = so_far + cost[successor]
                if further < best.get(successor, further + 1):
                    best[successor], before[successor] = further, block
                    heapq.heappush(heap, (further, successor))
    way = [last]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]
