"""Natural loops: which blocks repeat together, and how they nest.

A back edge goes to a block that dominates its source; the loop is every block that reaches the
source without passing the header (Aho, Lam, Sethi, Ullman, section 9.6). Out-of-line code that
jumps back to where it came from is therefore no loop, and a shared subroutine belongs to no loop of
its callers.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.paths import block_edges


@dataclass(frozen=True)
class Loop:
    """`header` is entered first, `blocks` are all its blocks in order, `depth` 1 is outermost."""

    header: int
    blocks: tuple[int, ...]
    latches: tuple[int, ...]
    depth: int


def natural_loops(kernel: Kernel) -> tuple[Loop, ...]:
    """Every natural loop, by header; the endless branch that pads a kernel is left out."""
    following = block_edges(kernel)
    dominators = _dominators(following)
    latches: dict[int, set[int]] = {}
    for block in kernel.blocks:
        for successor in following[block.index]:
            endless = successor == block.index and len(following[successor]) == 1
            if dominators[block.index] >> successor & 1 and not endless:
                latches.setdefault(successor, set()).add(block.index)
    preceding = _reversed(following)
    bodies = {header: _body(header, ends, preceding) for header, ends in latches.items()}
    return tuple(
        Loop(
            header,
            tuple(sorted(body)),
            tuple(sorted(latches[header])),
            sum(header in other for other in bodies.values()),
        )
        for header, body in sorted(bodies.items())
    )


def depths(kernel: Kernel, loops: tuple[Loop, ...]) -> list[int]:
    """How many loops contain each block."""
    return [sum(block.index in loop.blocks for loop in loops) for block in kernel.blocks]


def _reversed(following: list[tuple[int, ...]]) -> list[list[int]]:
    preceding: list[list[int]] = [[] for _ in following]
    for block, successors in enumerate(following):
        for successor in successors:
            preceding[successor].append(block)
    return preceding


def _dominators(following: list[tuple[int, ...]]) -> list[int]:
    """Bit set of the dominators of every block; blocks nothing jumps to are entries too."""
    preceding = _reversed(following)
    everything = (1 << len(following)) - 1
    found = [everything] * len(following)
    changed = True
    while changed:
        changed = False
        for block, before in enumerate(preceding):
            meet = everything
            for other in before if block else ():
                meet &= found[other]
            new = meet | 1 << block if before and block else 1 << block
            if new != found[block]:
                found[block], changed = new, True
    return found


def _body(header: int, latches: set[int], preceding: list[list[int]]) -> set[int]:
    body = {header}
    pending = [block for block in latches if block != header]
    while pending:
        block = pending.pop()
        if block not in body:
            body.add(block)
            pending.extend(preceding[block])
    return body
