"""Opcodes whose operands do not read from left to right as results and sources."""

from __future__ import annotations

import re
from typing import Final

from warploom.sass.decode.operand_reads import read_memory, read_sources, whole_file
from warploom.sass.decode.operands import Kind, Operand
from warploom.sass.decode.resources import Collector
from warploom.sass.decode.widths import data_width, group_words


def _warp_group_matrix(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """`HGMMA D, (A regs,) gdesc, C (, predicates, gsb)`: A from registers is four words."""
    words = group_words(opcode)
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


def _bulk_copy(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """TMA and bulk copies: uniform register groups whose size follows the tensor's rank. The mask
    of a multicast is an operand of its own."""
    match = re.search(r"\.(\d)D", opcode)
    rank = int(match.group(1)) if match else 5
    groups = {"UTMALDG": 2 + rank, "UTMASTG": 1 + rank, "UTMAREDG": 1 + rank, "UTMAPF": rank}
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


def _barrier_object(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
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


def _compare_and_swap(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """Atomics: optional predicate result, register result, address, then data operands."""
    width = data_width(opcode)
    results = True
    position = 0
    for operand in operands:
        if operand.kind is Kind.MEMORY:
            results = False
            read_memory(out, opcode, operand)
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


def _register_to_predicates(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
    """R2P PR, R, mask: may write the whole predicate file and keeps what the mask leaves out."""
    whole_file(out.writes, operands[0].text, "p0")
    whole_file(out.reads, operands[0].text, "old")
    read_sources(out, opcode, operands[1:], (1, 1, 1, 1))


def _return(out: Collector, opcode: str, operands: tuple[Operand, ...]) -> None:
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
