"""Which operand-cache slot each register source of an arithmetic instruction is read through.

The three reuse bits name slots a, b and c. A source's slot is its place among the sources as
printed, with the exceptions below; the register field that encodes it may stand elsewhere (a
constant third source moves the second register to bits 64-71). Read off the `.reuse` marks nvdisasm
prints: 51 cubins, ptxas 12.8 to 13.5, no other exception.
"""

from __future__ import annotations

from typing import Final

from warploom.sass.kernel import Instruction
from warploom.sass.opcodes import Pipe
from warploom.sass.operands import Kind

SLOTS: Final = 3
SLOT_NAMES: Final = "abc"
KEEPING: Final = frozenset((Pipe.FMA, Pipe.IMAD, Pipe.ALU, Pipe.HALF, Pipe.FP64, Pipe.MMA))

# Additions read their second source through c, single-source moves read theirs through b.
_EXCEPTIONS: Final = {"FADD": (0, 2), "HADD2": (0, 2), "DADD": (0, 2), "IABS": (1,), "MOV": (1,)}
_PREDICATES: Final = (Kind.PREDICATE, Kind.UNIFORM_PREDICATE, Kind.PREDICATE_FILE)


def slot_registers(item: Instruction) -> dict[int, int]:
    """{slot: register read through it}; empty for instructions that keep no operands."""
    if item.effects.info.pipe not in KEEPING:
        return {}
    operands = list(item.effects.operands)
    while operands and operands[0].kind in _PREDICATES:
        operands.pop(0)
    if item.effects.info.dests == "r" and operands:
        operands.pop(0)
    sources = [operand for operand in operands if operand.kind not in _PREDICATES]
    places = _EXCEPTIONS.get(item.base, range(SLOTS))
    return {
        slot: operand.registers[0].index
        for slot, operand in zip(places, sources, strict=False)
        if operand.kind is Kind.REGISTER and operand.registers[0].index >= 0
    }
