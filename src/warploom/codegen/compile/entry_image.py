"""An image that was compiled for fewer threads than its blocks have is made one for all of them.

*requires*  a kernel declared with fewer threads (`analysis.entry`): every role changes its
            registers before it names one that a thread does not have at entry
*before -> after*  three records of .nv.info: registers at entry, their limit, most threads
*keeps*  every instruction; the requirement is checked on the machine code, block by block
"""

from __future__ import annotations

import io
import struct

from elftools.elf.elffile import ELFFile

from warploom.codegen.analysis.entry import entry_registers
from warploom.errors import CheckFailed
from warploom.sass.decode import nvinfo
from warploom.sass.decode.branches import relative_target
from warploom.sass.decode.cubin import WORD_BYTES
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.resources import UNIFORM_BASE

LIMIT_RECORD, THREADS_RECORD = 0x1B, 0x05  # EIATTR_MAXREG_COUNT (a value), EIATTR_MAX_THREADS
VALUE_FORM = 3  # of a record that has its value in the place of its size
RECORDS = 3
CHANGE = "USETMAXREG"


def with_entry(image: bytes, kernel: Kernel, threads: int) -> bytes:
    """The cubin of a kernel that was compiled for fewer threads as one for `threads`.

    Raises `CheckFailed` when the kernel names a register at entry that such a block does not have.
    """
    registers = entry_registers(threads)
    check_entry(kernel, registers)
    data, changed = bytearray(image), 0
    elf = ELFFile(io.BytesIO(image))
    for name in (".nv.info", f".nv.info.{kernel.name}"):
        section = elf.get_section_by_name(name)
        assert section is not None, name
        for record in nvinfo.records(section.data()):
            at = int(section["sh_offset"]) + record.offset
            if record.attribute == nvinfo.REGISTER_COUNT:
                struct.pack_into("<I", data, at + 4, registers)
            elif record.attribute == THREADS_RECORD:
                struct.pack_into("<I", data, at, threads)
            elif record.attribute == LIMIT_RECORD and data[at - 4] == VALUE_FORM:
                struct.pack_into("<H", data, at - 2, registers)
            else:
                continue
            changed += 1
    if changed != RECORDS:
        raise CheckFailed(
            f"kernel {kernel.name}: {changed} records of its entry, expected {RECORDS}"
        )
    return bytes(data)


def check_entry(kernel: Kernel, registers: int) -> None:
    """Raise `CheckFailed` where control can come from the entry, without a change of registers, to
    an instruction that names one beyond `registers`."""
    for item in _before_change(kernel):
        accesses = (*item.effects.reads, *item.effects.writes)
        named = [a.resource for a in accesses if a.resource < UNIFORM_BASE]
        if max(named, default=0) >= registers:
            raise CheckFailed(
                f"kernel {kernel.name}: {item} names R{max(named)} before its role changes its "
                f"registers; a thread begins with {registers}"
            )


def _before_change(kernel: Kernel) -> list[Instruction]:
    """The instructions that control can reach from the entry without a change of registers.

    BSYNC goes where a BSSY said that was passed before it: to no other one's target.
    """
    reached: set[int] = {0}
    found: list[Instruction] = []
    count = 0
    while count != len(reached):
        count = len(reached)
        found = []
        meetings: set[int] = set()
        parted: list[int] = []
        for place in sorted(reached):
            block = kernel.blocks[place]
            for item in kernel.items(block):
                if item.base == CHANGE:
                    break
                found.append(item)
                if item.base == "BSSY":
                    word = (item.low, item.high)
                    target = relative_target(item.line.opcode, item.offset, word, kernel.sm)
                    assert target is not None
                    meetings.add(kernel.block_of[target // WORD_BYTES])
            else:
                if found[-1].base == "BSYNC":
                    parted += block.successors
                else:
                    reached.update(block.successors)
        reached.update(set(parted) & meetings)
    return found
