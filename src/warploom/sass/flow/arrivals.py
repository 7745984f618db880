"""Loads from shared memory that are on their way when their warp arrives at a barrier there.

A warp arrives at an mbarrier to give a slot back that it has read; the next copy may then overwrite
it. SYNCS does not stand in the queue of loads: with nothing that waits for a load's scoreboard, the
arrival can come before the load has read, and ptxas leaves it at that. On an H200 the copy was
first for 8,785 of 595,200 tiles (docs/sass.md). Which slot a load reads is not asked: a load that
reads another one only costs the arrival a wait.
"""

from __future__ import annotations

from typing import Final

from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.distances import never_both
from warploom.sass.flow.outstanding import Unsettled, before_issue, walk

LOADS: Final = frozenset(("LDS", "LDSM"))


def arrives(item: Instruction) -> bool:
    """True for an arrival at a barrier in shared memory, this block's or another's, that expects no
    bytes (A1T0): who expects some fills a slot and gives none back."""
    return item.line.opcode.startswith("SYNCS.ARRIVE") and item.line.opcode.endswith(".A1T0")


def early(kernel: Kernel) -> dict[int, set[Unsettled]]:
    """The arrivals, by index, that a load may be on its way at, with all such loads."""
    found: dict[int, set[Unsettled]] = {}
    for item, state in walk(kernel, LOADS):
        for one in before_issue(state, item) if arrives(item) else ():
            if one.written and not never_both(kernel, one.producer, item.index):
                found.setdefault(item.index, set()).add(one)
    return found
