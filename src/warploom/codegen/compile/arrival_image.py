"""An image whose warps arrive at barriers with loads on their way is made one where they wait.

*requires*  nothing
*before -> after*  `LDSM (sets 2)`, `SYNCS.ARRIVE` -> `LDSM (sets 2)`, `SYNCS.ARRIVE (waits for 2)`
*keeps*  every instruction and its place; of the control fields all but waits of arrivals,
         scoreboards of loads that set none, and stalls of 1 before a wait for what was just set
"""

from __future__ import annotations

from dataclasses import replace

from warploom.sass.decode.control import SCOREBOARDS
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow.arrivals import early
from warploom.sass.flow.scoreboard import counting_waits

SHOWN_AFTER = 2  # cycles from what sets a scoreboard to what sees it


def with_waits(cubin: Cubin, kernel: Kernel) -> Cubin:
    """The cubin of a kernel with waits for the loads that are on their way at its arrivals."""
    items = waiting(kernel).instructions
    return cubin.replace(kernel.code, [(x.low, x.control.encode(x.high)) for x in items])


def waiting(kernel: Kernel) -> Kernel:
    """The kernel with other control fields (its words are the old ones)."""
    open_ = {load for loads in early(kernel).values() for load in loads}
    silent = {load.producer for load in open_ if not load.mask}
    items = list(kernel.instructions)
    for index in silent:
        items[index] = _with(items[index], write_sb=_shared(kernel, items[index]))
    changed = {*silent}
    for index, loads in early(replace(kernel, instructions=tuple(items))).items():
        for load in loads:
            waits = items[index].control.wait | load.mask & -load.mask
            items[index] = _with(items[index], wait=waits)
        changed.add(index - 1)
    for index in changed:
        control, after = items[index].control, items[index + 1].control
        if {control.write_sb, control.read_sb} & set(after.waits()):
            items[index] = _with(items[index], stall=max(control.stall, SHOWN_AFTER))
    return replace(kernel, instructions=tuple(items))


def _with(item: Instruction, **fields: int) -> Instruction:
    return replace(item, control=replace(item.control, **fields))


def _shared(kernel: Kernel, load: Instruction) -> int:
    """A scoreboard for a load that sets none: that of the next operation of its pipe, for which
    whoever uses the load waits anyway, or else one of which nobody counts what is open."""
    counted = {counting_waits(item) for item in kernel.instructions}
    block = kernel.blocks[kernel.block_of[load.index]]
    later = [
        item.control.write_sb
        for item in kernel.instructions[load.index : block.end]
        if item.effects.info.pipe is load.effects.info.pipe
    ]
    free = [number for number in range(SCOREBOARDS) if number not in counted]
    return next((number for number in later if number in free), free[-1])
