"""Where a branch goes, from its word: `address + 16 + 4 * displacement`.

The disassembler prints labels too, but which ones depends on its version; a block boundary missed
is a wrong reordering accepted. The fields were checked against every label nvdisasm 13.5 prints in
13,000 branches of sm_80, sm_90a and sm_100a code.
"""

from __future__ import annotations

from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import WORD_BYTES

_HIGH_FIELD: Final = 34
_LOW_BYTE_SINCE: Final = 90
INDIRECT_TARGETS: Final = 0x34


def relative_target(opcode: str, offset: int, word: tuple[int, int], sm: int) -> int | None:
    """Byte offset a direct branch, call, BSSY or collective WARPSYNC goes to; None for others."""
    base = opcode.split(".", 1)[0]
    whole = word[0] | word[1] << 64
    if base in ("BSSY", "UBSSY"):
        return offset + WORD_BYTES + 4 * _signed(whole >> _HIGH_FIELD, 30)
    direct = base == "BRA" or opcode.startswith(("CALL.REL", "WARPSYNC.COLLECTIVE"))
    if not direct:
        return None
    if sm < _LOW_BYTE_SINCE:
        return offset + WORD_BYTES + 4 * _signed(whole >> _HIGH_FIELD, 48)
    displacement = _signed(whole >> _HIGH_FIELD, 48) << 8 | whole >> 16 & 0xFF
    return offset + WORD_BYTES + 4 * displacement


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def indirect_targets(info: bytes, code_bytes: int) -> set[int]:
    """Offsets a computed branch may reach, from the `.nv.info` table of them."""
    found: set[int] = set()
    for record in nvinfo.records(info):
        if record.attribute == INDIRECT_TARGETS:
            words = (record.payload[i : i + 4] for i in range(0, len(record.payload) - 3, 4))
            values = (int.from_bytes(word, "little") for word in words)
            found.update(v for v in values if v % WORD_BYTES == 0 and v < code_bytes)
    return found
