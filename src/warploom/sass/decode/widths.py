"""How many 32-bit words each operand of an opcode has, from its modifiers."""

from __future__ import annotations

import re
from typing import Final

from warploom.sass.decode.opcodes import OpInfo, Pipe

_MEMORY_WIDTH: Final = re.compile(r"\.(64|128|256)(?=\.|$)")
_WORDS: Final = {"64": 2, "128": 4, "256": 8}


def data_width(opcode: str) -> int:
    """32-bit words a memory operation moves a thread."""
    match = _MEMORY_WIDTH.search(opcode)
    return _WORDS[match.group(1)] if match else 1


DMMA_WIDTHS: Final = {"16x8x16": (8, 16, 8, 8), "16x8x8": (8, 8, 4, 8), "16x8x4": (8, 4, 2, 8)}


def _matrix_widths(opcode: str) -> tuple[int, int, int, int]:
    """(d, a, b, c) words of a warp-level matrix instruction."""
    base = opcode.split(".", 1)[0]
    if base == "DMMA":
        return DMMA_WIDTHS.get(opcode.split(".")[1], (4, 2, 2, 4))
    if base == "IMMA":
        if "16832" in opcode or "16864" in opcode:
            return 4, 4, 2, 4
        return (4, 2, 1, 4) if "16816" in opcode else (2, 1, 1, 2)
    if "16816" in opcode or "16832" in opcode:
        return (2, 4, 2, 2) if opcode.endswith(".F16") else (4, 4, 2, 4)
    if "1688.F32.TF32" in opcode:
        return 4, 4, 2, 4
    if "1684" in opcode:
        return 4, 2, 1, 4
    return (2, 2, 1, 2) if opcode.endswith(".F16") else (4, 2, 1, 4)


_GROUP_SHAPE: Final = re.compile(r"\.(?:SP\.)?64x(\d+)x")


def group_words(opcode: str) -> int:
    """32-bit accumulator words a thread of a 64xN warp-group matrix instruction."""
    match = _GROUP_SHAPE.search(opcode)
    columns = int(match.group(1)) if match else 256
    return columns // 4 if ".F16" in opcode.rsplit("x", maxsplit=1)[-1] else columns // 2


def _conversion_widths(opcode: str) -> tuple[int, int]:
    """(result, source) words of I2F, F2I, F2F, FRND: `OP.TO.FROM`."""
    types = [part for part in opcode.split(".")[1:] if re.fullmatch(r"[FSU](8|16|32|64)", part)]
    base = opcode.split(".", 1)[0]
    first = 2 if types and types[0].endswith("64") else 1
    if base == "F2F":
        second = 2 if len(types) > 1 and types[1].endswith("64") else 1
        return first, second
    if base == "FRND":
        return first, first
    if base == "I2F":
        result = 2 if "F64" in types else 1
        return result, 2 if any(kind in ("S64", "U64") for kind in types) else 1
    result = 2 if any(kind in ("S64", "U64") for kind in types) else 1
    return result, 2 if "F64" in types else 1


def register_widths(opcode: str, info: OpInfo, sources: int) -> tuple[int, tuple[int, ...]]:
    """(result words, words of each source register operand in order)."""
    base = opcode.split(".", 1)[0]
    ones = (1,) * max(sources, 4)
    if base == "DMMA" or (info.pipe is Pipe.MMA and base != "MOVM"):
        result, *rest = _matrix_widths(opcode)
        return result, tuple(rest) + ones
    if base in ("IMAD", "UIMAD") and (".WIDE" in opcode or ".HI" in opcode):
        return 2 if ".WIDE" in opcode else 1, (1, 1, 2, 1)
    if info.pipe is Pipe.FP64:
        return 2, (2, 2, 2, 2)
    if base in ("I2F", "F2I", "F2F", "FRND"):
        result, source = _conversion_widths(opcode)
        return result, (source, 1, 1, 1)
    if base == "CS2R":
        return 1 if ".32" in opcode else 2, ones
    if base in ("ULDC", "LDC", "LDCU", "UMOV", "MOV", "IADD", "UIADD3", "LDL", "LDS", "LDG", "LD"):
        width = data_width(opcode)
        return width, (width,) * 4 if base in ("IADD", "UIADD3", "MOV", "UMOV") else ones
    if base in ("LDSM", "STSM"):
        return next((count for count in (4, 2) if f".{count}" in opcode), 1), ones
    return 1, ones


def store_width(opcode: str) -> int:
    if opcode.startswith("STSM"):
        return next((count for count in (4, 2) if f".{count}" in opcode), 1)
    return data_width(opcode)
