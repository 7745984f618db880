"""Registers that later code touches: read or written in any block that control can reach.

Sets may only be too large: calls and indirect branches go wherever the block graph lets them, and
an instruction that gives registers back to the SM (`setmaxnreg`) touches all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.kernel import Block, Kernel
from warploom.sass.decode.resources import RESOURCES

EVERYTHING: Final = (1 << RESOURCES) - 1
_ENDS: Final = frozenset(("EXIT", "KILL", "BRA", "NOP", "RTT", "BPT"))
_REALLOCATES: Final = "USETMAXREG"


@dataclass(frozen=True, slots=True)
class Later:
    """Resources read or written (`touched`), and those written, in the blocks after a block."""

    touched: int = 0
    written: int = 0

    def __or__(self, other: Later) -> Later:
        """What either touches."""
        return Later(self.touched | other.touched, self.written | other.written)


def touched_later(kernel: Kernel) -> list[Later]:
    """`Later` of every block, by block index."""
    inside = [_inside(kernel, block) for block in kernel.blocks]
    after = [_beyond(kernel, block) for block in kernel.blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(kernel.blocks):
            found = after[block.index]
            for successor in block.successors:
                found = found | inside[successor] | after[successor]
            if found != after[block.index]:
                after[block.index] = found
                changed = True
    return after


def _inside(kernel: Kernel, block: Block) -> Later:
    touched = written = 0
    for item in kernel.items(block):
        if item.base == _REALLOCATES or item.effects.info.name == "UNKNOWN":
            return Later(EVERYTHING, EVERYTHING)
        for access in item.effects.writes:
            written |= 1 << access.resource
        for access in item.effects.reads:
            touched |= 1 << access.resource
    return Later(touched | written, written)


def _beyond(kernel: Kernel, block: Block) -> Later:
    """Everything, where control leaves a block for a place that is not known."""
    last = kernel.instructions[block.end - 1]
    if block.successors or last.base in _ENDS:
        return Later()
    return Later(EVERYTHING, EVERYTHING)


def mask_of(resources: Iterable[int]) -> int:
    """The bit set of some resources."""
    mask = 0
    for resource in resources:
        mask |= 1 << resource
    return mask
