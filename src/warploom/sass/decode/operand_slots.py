"""Which operand-cache slot each register source of an arithmetic instruction is read through.

The three reuse bits name slots a, b and c. A source's slot is its place among the sources as
printed, with the exceptions below; the register field that encodes it may stand elsewhere (a
constant third source moves the second register to bits 64-71).

Nothing here is mined: nvdisasm refuses a word that asks for a slot its form does not have, and
marks the operand it reads through the slot. A test sets each bit on one instruction of every form
of the corpus and compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.operands import Kind, Operand

if TYPE_CHECKING:
    from warploom.sass.decode.kernel import Instruction

SLOTS: Final = 3
SLOT_NAMES: Final = "abc"
KEEPING: Final = frozenset((Pipe.FMA, Pipe.IMAD, Pipe.ALU, Pipe.HALF, Pipe.FP64, Pipe.MMA))
# R2UR reads a register through slot a from sm_90 on, where it has another opcode than before.
_R2UR: Final = 0x2CA
_OPCODE: Final = 0xFFF

# Additions and DSETP read their second source through c, what has one source reads it through b,
# matrix instructions have no slot for the accumulator.
_EXCEPTIONS: Final = {
    "FADD": (0, 2),
    "HADD2": (0, 2),
    "DADD": (0, 2),
    "DSETP": (0, 2),
    "IABS": (1,),
    "MOV": (1,),
    "I2FP": (1,),
}
_MATRIX_SLOTS: Final = (0, 1)
_PREDICATES: Final = (Kind.PREDICATE, Kind.UNIFORM_PREDICATE, Kind.PREDICATE_FILE)


def keeps_operands(item: Instruction) -> bool:
    """Whether an instruction has reuse bits at all."""
    return item.effects.info.pipe in KEEPING or item.low & _OPCODE == _R2UR


def slot_registers(item: Instruction) -> dict[int, int]:
    """{slot: register read through it}; empty for instructions that keep no operands."""
    if not keeps_operands(item):
        return {}
    operands = list(item.effects.operands)
    while operands and operands[0].kind in _PREDICATES:
        operands.pop(0)
    if item.effects.info.dests == "r" and operands:
        operands.pop(0)
    sources = [operand for operand in operands if operand.kind not in _PREDICATES]
    if item.effects.info.pipe is Pipe.HALF:
        sources = _halves_joined(sources)
    usual = _MATRIX_SLOTS if item.effects.info.pipe is Pipe.MMA else range(SLOTS)
    places = _EXCEPTIONS.get(item.base, _MATRIX_SLOTS if item.base == "DMMA" else usual)
    return {
        slot: operand.registers[0].index
        for slot, operand in zip(places, sources, strict=False)
        if operand.kind is Kind.REGISTER and operand.registers[0].index >= 0
    }


def slot_words(item: Instruction) -> dict[int, tuple[int, ...]]:
    """{slot: every register read through it}, the words of a wide operand in order."""
    read = {(access.resource, access.slot) for access in item.effects.reads}
    found: dict[int, tuple[int, ...]] = {}
    for slot, register in slot_registers(item).items():
        words = 1
        while any((register + words, f"{x}{words}") in read for x in "abc") and any(
            (register, f"{x}0") in read for x in "abc"
        ):
            words += 1
        found[slot] = tuple(range(register, register + words))
    return found


def _halves_joined(sources: list[Operand]) -> list[Operand]:
    """A packed constant is printed as two immediates and is one source."""
    joined: list[Operand] = []
    for operand in sources:
        pair = operand.kind is Kind.IMMEDIATE and joined and joined[-1].kind is Kind.IMMEDIATE
        if not pair:
            joined.append(operand)
    return joined
