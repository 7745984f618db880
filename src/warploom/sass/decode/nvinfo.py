"""`.nv.info` records: which of them hold instruction offsets, and rewriting those.

A record is `format (1 byte), attribute (1 byte), size or value (2 bytes), payload`. Some payloads
are tables of instruction offsets the driver reads; a moved instruction makes them stale. Tables we
understand are rewritten through the permutation, the others pin the instructions they name.
Attribute numbers: cuobjdump -elf output on CUDA 12.8-13.5 cubins.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

FORMAT_SIZED: Final = 4
REGISTER_COUNT: Final = 0x2F
REQUIRED_THREADS: Final = 0x10  # three words: the block's size, where the code asks for one

# Tables of plain 4-byte instruction offsets that may be rewritten when an instruction moves.
REWRITTEN: Final[dict[int, str]] = {
    0x28: "COOP_GROUP_INSTR_OFFSETS",
    0x31: "INT_WARP_WIDE_INSTR_OFFSETS",
}
# Tables whose instructions stay where they are: either they end a block, or the record carries
# more than offsets (kind, registers) that we do not re-create. Entry stride in bytes.
PINNED: Final[dict[int, tuple[str, int]]] = {
    0x1C: ("EXIT_INSTR_OFFSETS", 4),
    0x1D: ("S2RCTAID_INSTR_OFFSETS", 4),
    0x25: ("LD_CACHEMOD_INSTR_OFFSETS", 4),
    0x27: ("ATOM_SYS_INSTR_OFFSETS", 4),
    0x34: ("INDIRECT_BRANCH_TARGETS", 4),
    0x39: ("MBARRIER_INSTR_OFFSETS", 16),
    0x3A: ("COROUTINE_RESUME_OFFSETS", 4),
    0x40: ("INSTR_REG_MAP", 4),
    0x44: ("UNUSED_LOAD_BYTE_OFFSET", 4),
    0x46: ("SYSCALL_OFFSETS", 4),
    0x47: ("SW_WAR_MEMBAR_SYS_INSTR_OFFSETS", 4),
    0x54: ("REG_RECONFIG", 4),
    0x55: ("ANNOTATIONS", 4),
    0x57: ("STACK_CANARY_TRAP_OFFSETS", 4),
    0x59: ("LOCAL_CTA_ASYNC_STORE_OFFSETS", 4),
}


@dataclass(frozen=True)
class InfoRecord:
    """One record: where its payload lies in the section and what it says."""

    attribute: int
    offset: int
    payload: bytes


def records(section: bytes) -> Iterator[InfoRecord]:
    """The records of one `.nv.info` section, in order."""
    position = 0
    while position + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, position)
        start = position + 4
        length = size if form == FORMAT_SIZED else 0
        yield InfoRecord(attribute, start, section[start : start + length])
        position = start + length


def _words(record: InfoRecord) -> list[int]:
    count = len(record.payload) // 4
    return list(struct.unpack(f"<{count}I", record.payload[: 4 * count]))


def required_threads(section: bytes) -> int | None:
    """Threads of a block, when the code was compiled for exactly that many; None otherwise."""
    for record in records(section):
        if record.attribute == REQUIRED_THREADS and len(record.payload) >= 12:
            x, y, z = _words(record)[:3]
            return x * y * z
    return None


def pinned_offsets(section: bytes, code_bytes: int) -> dict[int, str]:
    """Instruction offsets that must not move, each with the record that names it.

    Tables with a stride of more than one word are read conservatively: every word that could be
    an instruction offset counts as one.
    """
    found: dict[int, str] = {}
    for record in records(section):
        if record.attribute not in PINNED:
            continue
        name, _ = PINNED[record.attribute]
        for value in _words(record):
            if value < code_bytes and value % 16 == 0:
                found.setdefault(value, name)
    return found


def rewritten_offsets(section: bytes) -> dict[int, str]:
    """Instruction offsets named by tables we rewrite, each with the record's name."""
    return {
        value: REWRITTEN[record.attribute]
        for record in records(section)
        if record.attribute in REWRITTEN
        for value in _words(record)
    }


def labelled_offsets(section: bytes, code_bytes: int) -> frozenset[int]:
    """Offsets that newer nvdisasm labels although no branch goes there: lane exchanges and mbarrier
    operations that tables of `section` name."""
    mbarriers = {
        offset
        for offset, name in pinned_offsets(section, code_bytes).items()
        if name == "MBARRIER_INSTR_OFFSETS"
    }
    return frozenset((*rewritten_offsets(section), *mbarriers))


def rewrite(section: bytes, moved: Callable[[int], int]) -> bytes:
    """The section with every rewritable table sent through `moved` (old offset -> new offset).

    Entries keep their place in the table, because a parallel record (the lane masks of
    COOP_GROUP) is matched to them by index.
    """
    result = bytearray(section)
    for record in records(section):
        if record.attribute in REWRITTEN:
            values = [moved(value) for value in _words(record)]
            struct.pack_into(f"<{len(values)}I", result, record.offset, *values)
    return bytes(result)
