"""Exactly which registers and predicates an instruction reads and writes.

Widths come from the opcode and its modifiers (handbook table of the sm_90a forms, checked in the
tests against nvdisasm's own live ranges). A guarded write keeps the old value where the guard is
false, so it counts as a read of its destination too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.disassembly import Line
from warploom.sass.opcodes import OpInfo, Pipe, lookup
from warploom.sass.operands import Kind, Operand, RegisterName, parse_operands

# One number a resource: R0-R254, then UR, P and UP.
UNIFORM_BASE: Final = 256
PREDICATE_BASE: Final = 512
UNIFORM_PREDICATE_BASE: Final = 520
RESOURCES: Final = 528
PREDICATES: Final = 7
_FILE_BASE: Final = {
    "R": 0,
    "UR": UNIFORM_BASE,
    "P": PREDICATE_BASE,
    "UP": UNIFORM_PREDICATE_BASE,
}


@dataclass(frozen=True, slots=True)
class Access:
    """One resource touched: `slot` says where (`d0` first word of the result, `a`, `b`, `c`
    sources with their word, `addr`, `desc`, `guard`, `pred`)."""

    resource: int
    slot: str


@dataclass(frozen=True, slots=True)
class Effects:
    """What one instruction reads and writes."""

    info: OpInfo
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    partial: bool
    operands: tuple[Operand, ...]


def resource_name(resource: int) -> str:
    """`R12`, `UR4`, `P0` or `UP1`."""
    for file, base in (("UP", 520), ("P", 512), ("UR", 256), ("R", 0)):
        if resource >= base:
            return f"{file}{resource - base}"
    raise AssertionError(resource)


def _span(name: RegisterName, width: int) -> Iterator[tuple[int, int]]:
    """(resource, word) of every register of a group that starts at `name`."""
    if name.index < 0:
        return
    base = _FILE_BASE[name.file] + name.index
    for word in range(width):
        yield base + word, word


_MEMORY_WIDTH: Final = re.compile(r"\.(64|128|256)(?=\.|$)")
_WORDS: Final = {"64": 2, "128": 4, "256": 8}


def _data_width(opcode: str) -> int:
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


def _group_words(opcode: str) -> int:
    """32-bit accumulator words a thread of a 64xN warp-group matrix instruction."""
    match = _GROUP_SHAPE.search(opcode)
    columns = int(match.group(1)) if match else 256
    return columns // 4 if ".F16" in opcode.rsplit("x", maxsplit=1)[-1] else columns // 2


_WIDE_RESULT: Final = re.compile(r"\.(F64|S64|U64)\b")


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


def _register_widths(opcode: str, info: OpInfo, sources: int) -> tuple[int, tuple[int, ...]]:
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
        width = _data_width(opcode)
        return width, (width,) * 4 if base in ("IADD", "UIADD3", "MOV", "UMOV") else ones
    if base in ("LDSM", "STSM"):
        return next((count for count in (4, 2) if f".{count}" in opcode), 1), ones
    return 1, ones


class _Collector:
    """Gathers the accesses of one instruction."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def read(self, name: RegisterName, width: int, slot: str) -> None:
        self.reads.extend(
            Access(resource, slot if width == 1 else f"{slot}{word}")
            for resource, word in _span(name, width)
        )

    def write(self, name: RegisterName, width: int, slot: str = "d") -> None:
        self.writes.extend(
            Access(resource, f"{slot}{word}") for resource, word in _span(name, width)
        )


_SOURCE_SLOTS: Final = "abcefghij"
_GLOBAL_SPACES: Final = frozenset("LDG STG LD ST ATOM ATOMG RED REDG LDGSTS CCTL".split())


DESCRIPTOR_SHOWN_SINCE: Final = 90
_HIDDEN_DESCRIPTOR_MASK: Final = 0x3F


def _hidden_descriptor(
    out: _Collector, operands: tuple[Operand, ...], word: tuple[int, int], loads: bool
) -> None:
    """Before sm_90 the text leaves out the descriptor pair of a 64-bit global address.

    Its number stands in bits 64-69, for loads in bits 32-37; 63 (URZ) is none. Confirmed against
    nvdisasm's live ranges.
    """
    wide = any(operand.kind is Kind.MEMORY and ".64" in operand.text for operand in operands)
    number = (word[0] >> 32 if loads else word[1]) & _HIDDEN_DESCRIPTOR_MASK
    if wide and number != _HIDDEN_DESCRIPTOR_MASK:
        out.read(RegisterName("UR", number), 2, "desc")


def _read_memory(out: _Collector, opcode: str, operand: Operand) -> None:
    """Address and descriptor registers; `.E` means 64-bit addresses even where unmarked."""
    for name in operand.descriptor:
        out.read(name, 2, "desc")
    base = opcode.split(".", 1)[0]
    extended = base in _GLOBAL_SPACES and ".E" in f"{opcode}."
    shared_half = base == "LDGSTS" and not operand.descriptor and ".64" not in operand.text
    for name in operand.registers:
        wide = name.pair or (
            extended and not shared_half and f"{name.file}{name.index}.U32" not in operand.text
        )
        out.read(name, 2 if wide else 1, "addr" if name.file == "R" else "uaddr")


def split_results(info: OpInfo, operands: tuple[Operand, ...]) -> int:
    """How many leading operands are results."""
    predicates = (Kind.PREDICATE, Kind.UNIFORM_PREDICATE)
    registers = (Kind.REGISTER, Kind.UNIFORM)
    if info.dests == "p":
        count = 0
        while count < min(2, len(operands)) and operands[count].kind in predicates:
            count += 1
        return count
    if info.dests != "r":
        return 0
    if info.name in ("VOTE", "VOTEU"):
        return len(operands) - 1  # the last operand is the predicate voted on
    count = 0
    while count < len(operands) and operands[count].kind in predicates:
        count += 1
    if count == len(operands) or operands[count].kind not in registers:
        return count
    count += 1
    while count < len(operands) and operands[count].kind in predicates:
        if operands[count].negated:
            break
        count += 1
    return count


def effects_of(line: Line, word: tuple[int, int], sm: int) -> Effects:
    """The reads and writes of one instruction; its `word` (low, high) shows what text hides."""
    info = lookup(line.opcode)
    operands = parse_operands(line.operands)
    out = _Collector()
    never = line.guard == "!PT"
    if line.guard:
        match = re.fullmatch(r"!?(U?P)(\d|T)", line.guard)
        assert match is not None
        if match.group(2) != "T":
            out.read(RegisterName(match.group(1), int(match.group(2))), 1, "guard")
    if info.dests == "?":
        _unknown(out, operands)
    elif info.name in SPECIAL_FORMS:
        SPECIAL_FORMS[info.name](out, line.opcode, operands)
    else:
        _regular(out, line.opcode, info, operands)
    if sm < DESCRIPTOR_SHOWN_SINCE and info.name in _GLOBAL_SPACES:
        _hidden_descriptor(out, operands, word, info.name in ("LDG", "LD"))
    partial = bool(out.reads and out.reads[0].slot == "guard")
    if partial:
        out.reads.extend(Access(access.resource, "old") for access in out.writes)
    if never:
        out.writes.clear()
    return Effects(info, tuple(out.reads), tuple(out.writes), partial, operands)


def _regular(out: _Collector, opcode: str, info: OpInfo, operands: tuple[Operand, ...]) -> None:
    results = split_results(info, operands)
    registers = (Kind.REGISTER, Kind.UNIFORM)
    sources = [operand for operand in operands[results:] if operand.kind in registers]
    result_width, widths = _register_widths(opcode, info, len(sources))
    if info.name in STORE_LIKE:
        widths = (_store_width(opcode),) * 4
    for operand in operands[:results]:
        if operand.kind is Kind.PREDICATE_FILE:
            continue
        wide = operand.kind in registers
        out.write(operand.registers[0], result_width if wide else 1, "d" if wide else "p")
    _read_sources(out, opcode, operands[results:], widths)


def _store_width(opcode: str) -> int:
    if opcode.startswith("STSM"):
        return next((count for count in (4, 2) if f".{count}" in opcode), 1)
    return _data_width(opcode)


STORE_LIKE: Final = frozenset("STG STS ST STL STSM RED REDG REDS STAS ATOMG ATOM ATOMS".split())


def _read_sources(
    out: _Collector, opcode: str, operands: tuple[Operand, ...], widths: tuple[int, ...]
) -> None:
    position = 0
    for operand in operands:
        if operand.kind in (Kind.REGISTER, Kind.UNIFORM):
            width = 2 if operand.registers[0].pair else widths[min(position, len(widths) - 1)]
            out.read(operand.registers[0], width, _SOURCE_SLOTS[position])
            position += 1
        elif operand.kind in (Kind.PREDICATE, Kind.UNIFORM_PREDICATE):
            out.read(operand.registers[0], 1, "pred")
        elif operand.kind is Kind.PREDICATE_FILE:
            _whole_file(out.reads, operand.text, "pred", _immediate(operands[-1]))
        elif operand.kind is Kind.MEMORY:
            _read_memory(out, opcode, operand)
        elif operand.kind is Kind.CONSTANT:
            wide = operand.text.lstrip("-~|").startswith("cx")
            for name in operand.registers:
                out.read(name, 2 if wide else 1, "caddr")
            position += 1
        elif operand.kind is Kind.DESCRIPTOR:
            for name in operand.registers:
                out.read(name, 4, "gdesc")
        elif operand.kind is Kind.IMMEDIATE:
            for name in operand.registers:
                out.read(name, 1, _SOURCE_SLOTS[position])
            position += 1


def _whole_file(accesses: list[Access], text: str, slot: str, mask: int = -1) -> None:
    """The predicate file, or the part of it an immediate mask selects."""
    base = UNIFORM_PREDICATE_BASE if text.startswith("U") else PREDICATE_BASE
    accesses.extend(Access(base + index, slot) for index in range(PREDICATES) if mask >> index & 1)


def _immediate(operand: Operand) -> int:
    """The value of an immediate mask; all ones when it is not one."""
    text = operand.text
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]+", text) else -1


def _unknown(out: _Collector, operands: tuple[Operand, ...]) -> None:
    """Every register an unknown instruction names is read and written, as wide as a quad."""
    for operand in operands:
        for name in (*operand.registers, *operand.descriptor):
            width = 4 if name.file in ("R", "UR") else 1
            out.read(name, width, "a")
            out.write(name, width)


def _warp_group_matrix(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """`HGMMA D, (A regs,) gdesc, C (, predicates, gsb)`: A from registers is four words."""
    words = _group_words(opcode)
    out.write(operands[0].registers[0], words)
    before_descriptor = True
    for operand in operands[1:]:
        if operand.kind is Kind.DESCRIPTOR:
            before_descriptor = False
            for name in operand.registers:
                out.read(name, 4, "gdesc")
        elif operand.kind is Kind.REGISTER:
            out.read(
                operand.registers[0], 4 if before_descriptor else words, "ac"[not before_descriptor]
            )
        elif operand.kind in (Kind.PREDICATE, Kind.UNIFORM_PREDICATE):
            out.read(operand.registers[0], 1, "pred")


def _bulk_copy(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """TMA and bulk copies: uniform register groups whose size follows the tensor's rank. The mask
    of a multicast is an operand of its own."""
    match = re.search(r"\.(\d)D", opcode)
    rank = int(match.group(1)) if match else 5
    groups = {
        "UTMALDG": 2 + rank,
        "UTMASTG": 1 + rank,
        "UTMAREDG": 1 + rank,
        "UTMAPF": rank,
    }
    width = groups.get(opcode.split(".", 1)[0], 2)
    for operand in operands:
        for name in operand.descriptor:
            out.read(name, 2, "desc")
        for name in operand.registers:
            if name.file in ("UP", "P"):
                out.read(name, 1, "pred")
            else:
                out.read(name, width if operand.kind is Kind.MEMORY else 1, "uaddr")
                width = 2


def _barrier_object(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """SYNCS: mbarrier operations; results first (predicate or 64-bit state), then address, data."""
    seen_memory = False
    for operand in operands:
        if operand.kind is Kind.MEMORY:
            seen_memory = True
            for name in (*operand.registers, *operand.descriptor):
                out.read(name, 1, "addr" if name.file == "R" else "uaddr")
        elif operand.kind in (Kind.PREDICATE, Kind.UNIFORM_PREDICATE):
            if seen_memory:
                out.read(operand.registers[0], 1, "pred")
            else:
                out.write(operand.registers[0], 1, "p")
        elif operand.registers:
            name = operand.registers[0]
            if seen_memory:
                out.read(name, 2 if "EXCH" in opcode or name.pair else 1, "b")
            else:
                out.write(name, 2 if "64" in opcode else 1)


def _compare_and_swap(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """Atomics: optional predicate result, register result, address, then data operands."""
    width = _data_width(opcode)
    results = True
    position = 0
    for operand in operands:
        if operand.kind is Kind.MEMORY:
            results = False
            _read_memory(out, opcode, operand)
        elif operand.kind is Kind.PREDICATE:
            if results:
                out.write(operand.registers[0], 1, "p")
            else:
                out.read(operand.registers[0], 1, "pred")
        elif operand.kind in (Kind.REGISTER, Kind.UNIFORM):
            if results:
                out.write(operand.registers[0], width)
            else:
                out.read(operand.registers[0], width, "bc"[min(position, 1)])
                position += 1


def _register_to_predicates(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """R2P PR, R, mask: may write the whole predicate file and keeps what the mask leaves out."""
    _whole_file(out.writes, operands[0].text, "p0")
    _whole_file(out.reads, operands[0].text, "old")
    _read_sources(out, opcode, operands[1:], (1, 1, 1, 1))


def _return(out: _Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """RET and indirect branches read a 64-bit address."""
    for operand in operands:
        for name in operand.registers:
            out.read(name, 2 if name.file == "R" and not opcode.startswith("WARPSYNC") else 1, "a")


SPECIAL_FORMS: Final = {
    **dict.fromkeys(("HGMMA", "QGMMA", "IGMMA", "BGMMA"), _warp_group_matrix),
    **dict.fromkeys(
        ("UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKRED UBLKPF UTMACMDFLUSH".split()),
        _bulk_copy,
    ),
    **dict.fromkeys(("ATOM", "ATOMG", "ATOMS"), _compare_and_swap),
    **dict.fromkeys(("R2P", "UR2UP"), _register_to_predicates),
    **dict.fromkeys(("RET", "BRX", "JMX"), _return),
    "SYNCS": _barrier_object,
}
