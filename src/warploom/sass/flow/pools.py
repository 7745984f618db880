"""How many registers a warp has where: at first those of the launch, then what it asked for.

`setmaxnreg` (USETMAXREG) gives registers of a warp group to the pool of its block, or takes some.
A register at or above what the warp has left is another warp's. Followed over call-aware paths:
where two of them meet with different numbers, the smaller holds.
"""

from __future__ import annotations

from typing import Final

from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.paths import fixed_point

REALLOCATES: Final = "USETMAXREG"


def registers_after(item: Instruction, before: int) -> int:
    """The registers a warp has after an instruction."""
    if item.base != REALLOCATES:
        return before
    return int(item.effects.operands[-1].text, 16)


def registers_at(kernel: Kernel) -> dict[int, int]:
    """The fewest registers a warp may have at every instruction that control reaches."""

    def through(block: int, state: int) -> int:
        for item in kernel.instructions[kernel.blocks[block].start : kernel.blocks[block].end]:
            state = registers_after(item, state)
        return state

    if not any(item.base == REALLOCATES for item in kernel.instructions):
        return {}
    found: dict[int, int] = {}
    for place, entry in fixed_point(kernel, kernel.code.registers, through, min).items():
        state, block = entry, kernel.blocks[place.block]
        for item in kernel.instructions[block.start : block.end]:
            found[item.index] = min(state, found.get(item.index, state))
            state = registers_after(item, state)
    return found
