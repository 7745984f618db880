"""Exactly which registers and predicates an instruction reads and writes.

Widths come from the opcode and its modifiers (the tests check them against nvdisasm's own
live ranges). A guarded write keeps the old value where the guard is
false, so it counts as a read of its destination too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from warploom.sass.decode.disassembly import Line
from warploom.sass.decode.opcodes import OpInfo, lookup
from warploom.sass.decode.operand_reads import GLOBAL_SPACES, read_sources
from warploom.sass.decode.operands import Kind, Operand, RegisterName, parse_operands
from warploom.sass.decode.resources import Access, Collector
from warploom.sass.decode.special_forms import SPECIAL_FORMS
from warploom.sass.decode.widths import register_widths, store_width


@dataclass(frozen=True, slots=True)
class Effects:
    """What one instruction reads and writes."""

    info: OpInfo
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    partial: bool
    operands: tuple[Operand, ...]


DESCRIPTOR_SHOWN_SINCE: Final = 90
_HIDDEN_DESCRIPTOR_MASK: Final = 0x3F


def _hidden_descriptor(
    out: Collector, operands: tuple[Operand, ...], word: tuple[int, int], loads: bool
) -> None:
    """Before sm_90 the text leaves out the descriptor pair of a 64-bit global address.

    Its number stands in bits 64-69, for loads in bits 32-37; 63 (URZ) is none. Confirmed against
    nvdisasm's live ranges.
    """
    wide = any(operand.kind is Kind.MEMORY and ".64" in operand.text for operand in operands)
    number = (word[0] >> 32 if loads else word[1]) & _HIDDEN_DESCRIPTOR_MASK
    if wide and number != _HIDDEN_DESCRIPTOR_MASK:
        out.read(RegisterName("UR", number), 2, "desc")


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
    hidden: tuple[int, int] | None = None
    if sm < DESCRIPTOR_SHOWN_SINCE and lookup(line.opcode).name in GLOBAL_SPACES:
        hidden = word
    return _effects(line.guard, line.opcode, line.operands, hidden)


# An edit leaves nearly all instructions as they were, so a kernel is decoded many times over.
@lru_cache(1 << 14)
def _effects(guard: str, opcode: str, text: str, hidden: tuple[int, int] | None) -> Effects:
    """What an instruction of this text does; `hidden` is its word where that says more."""
    info = lookup(opcode)
    operands = parse_operands(text)
    out = Collector()
    never = guard == "!PT"
    if guard:
        match = re.fullmatch(r"!?(U?P)(\d|T)", guard)
        assert match is not None
        if match.group(2) != "T":
            out.read(RegisterName(match.group(1), int(match.group(2))), 1, "guard")
    if info.dests == "?":
        _unknown(out, operands)
    elif info.name in SPECIAL_FORMS:
        SPECIAL_FORMS[info.name](out, opcode, operands)
    else:
        _regular(out, opcode, info, operands)
    if hidden is not None:
        _hidden_descriptor(out, operands, hidden, info.name in ("LDG", "LD"))
    partial = bool(out.reads and out.reads[0].slot == "guard")
    if partial:
        out.reads.extend(Access(access.resource, "old") for access in out.writes)
    if never:
        out.writes.clear()
    return Effects(info, tuple(out.reads), tuple(out.writes), partial, operands)


def _regular(out: Collector, opcode: str, info: OpInfo, operands: tuple[Operand, ...]) -> None:
    results = split_results(info, operands)
    registers = (Kind.REGISTER, Kind.UNIFORM)
    sources = [operand for operand in operands[results:] if operand.kind in registers]
    result_width, widths = register_widths(opcode, info, len(sources))
    if info.name in STORE_LIKE:
        widths = (store_width(opcode),) * 4
    for operand in operands[:results]:
        if operand.kind is Kind.PREDICATE_FILE:
            continue
        wide = operand.kind in registers
        out.write(operand.registers[0], result_width if wide else 1, "d" if wide else "p")
    read_sources(out, opcode, operands[results:], widths)


STORE_LIKE: Final = frozenset("STG STS ST STL STSM RED REDG REDS STAS ATOMG ATOM ATOMS".split())


def _unknown(out: Collector, operands: tuple[Operand, ...]) -> None:
    """Every register an unknown instruction names is read and written, as wide as a quad."""
    for operand in operands:
        for name in (*operand.registers, *operand.descriptor):
            width = 4 if name.file in ("R", "UR") else 1
            out.read(name, width, "a")
            out.write(name, width)
