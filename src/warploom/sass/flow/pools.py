"""How many registers a warp has where: at first those of the launch, then what it asked for.

`setmaxnreg` (USETMAXREG) gives registers of a warp group to the pool of its block, or takes some.
A register at or above what the warp has left is another warp's. Followed over call-aware paths:
where two of them meet with different numbers, the smaller holds.
"""

from __future__ import annotations

from typing import Final

from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.paths import states

REALLOCATES: Final = "USETMAXREG"


def registers_after(before: int, item: Instruction) -> int:
    """The registers a warp has after an instruction."""
    if item.base != REALLOCATES:
        return before
    return int(item.effects.operands[-1].text, 16)


def registers_at(kernel: Kernel) -> dict[int, int]:
    """The fewest registers a warp may have at every instruction that control reaches."""
    if not any(item.base == REALLOCATES for item in kernel.instructions):
        return {}
    found: dict[int, int] = {}
    for item, left in states(kernel, kernel.code.registers, registers_after, min):
        found[item.index] = min(left, found.get(item.index, left))
    return found
