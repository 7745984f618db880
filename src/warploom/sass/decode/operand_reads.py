"""Which registers a source operand reads: addresses, descriptors, constants, plain registers."""

from __future__ import annotations

import re
from typing import Final

from warploom.sass.decode.operands import Kind, Operand
from warploom.sass.decode.resources import (
    PREDICATE_BASE,
    PREDICATES,
    UNIFORM_PREDICATE_BASE,
    Access,
    Collector,
)

_SOURCE_SLOTS: Final = "abcefghij"
GLOBAL_SPACES: Final = frozenset("LDG STG LD ST ATOM ATOMG RED REDG LDGSTS CCTL".split())


def read_memory(out: Collector, opcode: str, operand: Operand) -> None:
    """Address and descriptor registers; `.E` means 64-bit addresses even where unmarked."""
    for name in operand.descriptor:
        out.read(name, 2, "desc")
    base = opcode.split(".", 1)[0]
    extended = base in GLOBAL_SPACES and ".E" in f"{opcode}."
    shared_half = base == "LDGSTS" and not operand.descriptor and ".64" not in operand.text
    for name in operand.registers:
        wide = name.pair or (
            extended and not shared_half and f"{name.file}{name.index}.U32" not in operand.text
        )
        out.read(name, 2 if wide else 1, "addr" if name.file == "R" else "uaddr")


def read_sources(
    out: Collector, opcode: str, operands: tuple[Operand, ...], widths: tuple[int, ...]
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
            whole_file(out.reads, operand.text, "pred", immediate(operands[-1]))
        elif operand.kind is Kind.MEMORY:
            read_memory(out, opcode, operand)
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


def whole_file(accesses: list[Access], text: str, slot: str, mask: int = -1) -> None:
    """The predicate file, or the part of it an immediate mask selects."""
    base = UNIFORM_PREDICATE_BASE if text.startswith("U") else PREDICATE_BASE
    accesses.extend(Access(base + index, slot) for index in range(PREDICATES) if mask >> index & 1)


def immediate(operand: Operand) -> int:
    """The value of an immediate mask; all ones when it is not one."""
    text = operand.text
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]+", text) else -1
