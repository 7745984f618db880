"""Move the first instructions of a loop over its back edge, to the end of the pass before.

Before -> after, for the first `count` instructions X of the header:

    preheader | X rest ... branch | exit        preheader X | rest ... X branch | exit

The instructions executed are the same in the same order, with one more X after the last pass. What
follows is that X may then be scheduled among the previous pass's instructions. The copy takes the
place of `count` of the NOPs that pad a kernel's end, so the file keeps its size.

Requires: the header is entered from one block, which falls into it, and from one latch; X has no
side effect and fixed latency; the branch does not read what X writes, and nobody does after the
loop; nothing but plain tables in `.nv.info` names code that shifts. `verify` proves the result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from warploom.errors import InputError
from warploom.sass.decode import nvinfo
from warploom.sass.decode.branches import relative_target
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, NO_SCOREBOARD
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.decode.opcodes import Order, Pipe
from warploom.sass.flow.liveness import live_registers, mask_of
from warploom.sass.flow.loops import natural_loops

PURE: Final = frozenset((Pipe.ALU, Pipe.FMA, Pipe.IMAD, Pipe.HALF, Pipe.UNIFORM))
SHIFTED_TABLES: Final = frozenset((*nvinfo.REWRITTEN, 0x1C, 0x1D))
DISPLACEMENT_BITS: Final = 48  # from bit 34 on; of BSSY fewer
SHORT_BITS: Final = 30


@dataclass(frozen=True)
class Rotation:
    """The first `count` instructions of a loop moved over its back edge.

    `header` and `latch` are instruction numbers before the rotation: the loop's first instruction
    and the branch back to it.
    """

    header: int
    count: int
    latch: int


def rotations(kernel: Kernel, most: int = 64) -> list[Rotation]:
    """The longest rotation of every loop that has one; shorter ones are its prefixes."""
    found: list[Rotation] = []
    for loop in natural_loops(kernel):
        header = kernel.blocks[loop.header]
        outside = [p for p in header.predecessors if p not in loop.blocks]
        if len(outside) != 1 or len(loop.latches) != 1 or len(header.predecessors) != 2:
            continue
        entry, latch_block = kernel.blocks[outside[0]], kernel.blocks[loop.latches[0]]
        latch = kernel.instructions[latch_block.end - 1]
        if entry.successors != (header.index,) or entry.end != header.start:
            continue
        if latch.base != "BRA" or not latch.line.guard or latch_block.size < 2:
            continue
        room = min(most, padding(kernel), header.size - 1)
        count = 0
        while count < room and _may_cross(kernel, kernel.instructions[header.start + count], latch):
            count += 1
        if count:
            found.append(Rotation(header.start, count, latch.index))
    return found


def may_cross(kernel: Kernel, index: int, latch: int) -> bool:
    """True when an instruction of the loop may cross its back edge, order aside."""
    return _may_cross(kernel, kernel.instructions[index], kernel.instructions[latch])


def _may_cross(kernel: Kernel, item: Instruction, latch: Instruction) -> bool:
    info, control = item.effects.info, item.control
    if item.pinned or info.pipe not in PURE or info.variable or info.order is not Order.FREE:
        return False
    if control.write_sb != NO_SCOREBOARD or control.read_sb != NO_SCOREBOARD:
        return False
    if item.offset in nvinfo.rewritten_offsets(kernel.info):
        return False
    written = {access.resource for access in item.effects.writes}
    if written & {access.resource for access in latch.effects.reads}:
        return False
    exits = [
        block
        for block in kernel.blocks[kernel.block_of[latch.index]].successors
        if latch.index + 1 == kernel.blocks[block].start
    ]
    return not any(_live(kernel, block) & mask_of(written) for block in exits)


_LIVE: dict[int, tuple[Kernel, tuple[int, ...]]] = {}


def _live(kernel: Kernel, block: int) -> int:
    """Bit set of what may be read from the start of a block on before it is written."""
    known = _LIVE.get(id(kernel))
    if known is None or known[0] is not kernel:
        _LIVE.clear()
        known = _LIVE[id(kernel)] = (kernel, live_registers(kernel).at_entry)
    return known[1][block]


def padding(kernel: Kernel) -> int:
    """NOPs at the end of the code, after everything control reaches: room for copies."""
    count = 0
    for item in reversed(kernel.instructions):
        if item.base != "NOP" or kernel.blocks[kernel.block_of[item.index]].predecessors:
            break
        count += 1
    return count


def rotate(cubin: Cubin, name: str, rotation: Rotation) -> Cubin:
    """The cubin with `rotation` done; raises `InputError` where it is not one of `rotations`."""
    kernel = decode(cubin, name)
    header, count, latch = rotation.header, rotation.count, rotation.latch
    longest = {row.header: row for row in rotations(kernel)}.get(header)
    if longest is None or longest.latch != latch or not 0 < count <= longest.count:
        raise InputError(f"{name}: no {count} instructions at {header} may cross a back edge")
    if kernel.code.relocations:
        raise InputError(f"{name}: relocations point into the code; it is not shifted")
    items = kernel.instructions
    source = [
        *range(latch),
        *range(header, header + count),
        *range(latch, len(items) - count),
    ]

    def place(index: int) -> int:
        return index if index <= latch else index + count

    words: list[tuple[int, int]] = []
    for new, index in enumerate(source):
        item = items[index]
        words.append((item.low, item.high))
        target = relative_target(item.line.opcode, item.offset, words[-1], kernel.sm)
        if target is None or target % WORD_BYTES:
            continue
        aim = target // WORD_BYTES
        to = header + count if index == latch and aim == header else place(aim)
        words[-1] = _aimed(item, words[-1], (to - new - 1) * WORD_BYTES, kernel.sm)
    last, branch = items[latch - 1].control, items[latch].control
    stall = min(MAX_STALL, last.stall + branch.stall)
    stay = last.stay and stall <= MAX_STALL_STAYING
    kept = replace(last, stall=stall, stay=stay, reuse=last.reuse if stay else 0)
    words[latch - 1] = (words[latch - 1][0], kept.encode(words[latch - 1][1]))
    info = _shifted(kernel, lambda index: place(index) if index != latch else latch + count)
    return cubin.replace(cubin.kernel(name), words, info)


def _aimed(item: Instruction, word: tuple[int, int], distance: int, sm: int) -> tuple[int, int]:
    """The branch with another displacement, in bytes from the instruction after it."""
    whole = word[0] | word[1] << 64
    before = relative_target(item.line.opcode, 0, word, sm)
    if before == distance + WORD_BYTES:
        return word
    if item.base not in ("BRA", "BSSY") and not item.line.opcode.startswith("WARPSYNC.COLL"):
        raise InputError(f"{item}: this kind of branch is not re-aimed")
    steps = distance // 4
    low = sm >= 90 and item.base != "BSSY"
    mask = (1 << (SHORT_BITS if item.base == "BSSY" else DISPLACEMENT_BITS)) - 1
    whole = whole & ~(mask << 34) | ((steps >> 8 if low else steps) & mask) << 34
    if low:
        whole = whole & ~(0xFF << 16) | (steps & 0xFF) << 16
    return whole & (1 << 64) - 1, whole >> 64


def _shifted(kernel: Kernel, place: Callable[[int], int]) -> bytes:
    """The `.nv.info` section with plain offset tables following the code.

    Raises `InputError` when a table that is not plain names an instruction.
    """
    result = bytearray(kernel.info)
    for record in nvinfo.records(kernel.info):
        if record.attribute in nvinfo.PINNED and record.attribute not in SHIFTED_TABLES:
            name = nvinfo.PINNED[record.attribute][0]
            raise InputError(f"{kernel.name}: .nv.info {name} names code that would shift")
        if record.attribute not in SHIFTED_TABLES:
            continue
        values = struct.unpack(f"<{len(record.payload) // 4}I", record.payload)
        moved = [place(value // WORD_BYTES) * WORD_BYTES for value in values]
        struct.pack_into(f"<{len(moved)}I", result, record.offset, *moved)
    return bytes(result)
