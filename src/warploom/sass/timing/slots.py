"""Instructions as a scheduler partition sees them: what does not depend on order or control."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from warploom.errors import CheckFailed
from warploom.sass.decode.control import Control
from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.steady import MATRIX, Way
from warploom.sass.timing.costs import hopper

READERS: Final = frozenset({Pipe.FMA, Pipe.IMAD, Pipe.HALF, Pipe.ALU, Pipe.XU, Pipe.LSU})
WARP_GROUP: Final = 128  # threads
SHAPE: Final = re.compile(r"\.64x(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One instruction. Counts that an instruction waits down to are -1 where it does not wait."""

    pipe: Pipe
    occupancy: int  # of its pipe
    result: float  # cycles from issue until its result is there
    sources: float  # and until its sources were read
    matmul: float = 0.0  # tensor-core cycles; 0 for other instructions
    from_registers: bool = False  # its first operand
    commits: bool = False  # ends a group of matmuls
    retires: int = -1  # groups of matmuls that may stay in flight
    copies: bool = False  # ends a group of asynchronous copies
    copies_left: int = -1  # groups of copies that may stay in flight
    reads: bool = False  # registers, through the operand ports
    arrives: bool = False  # opens a batch of matmuls
    pause: float = 0.0  # cycles that it holds its warp, a barrier where nobody is late
    gate: bool = False  # the walk's `Gates` say when it may issue
    signal: bool = False
    jumps: bool = False


Line = tuple[Slot, Control]


def slot_of(item: Instruction) -> Slot:
    """An instruction that goes through open gates; raises `CheckFailed` for an unknown matmul."""
    costs, opcode, info = hopper(), item.line.opcode, item.effects.info
    text = item.line.operands.replace(" ", "")
    result, sources = costs.latency_of(info.name)
    matmul = 0.0
    if item.base in MATRIX:
        shape = SHAPE.search(opcode)
        if shape is None:
            raise CheckFailed(f"{item}: a matrix instruction of unknown shape")
        result = matmul = int(shape.group(1)) / costs.columns
    occupancy = costs.occupancy[info.pipe]
    width = re.search(r"\.(64|128)(?=\.|$)", opcode)
    if info.pipe is Pipe.LSU and width:
        occupancy *= int(width.group(1)) // 32 // (2 if width.group(1) == "128" else 1)
    copies = item.base == "LDGDEPBAR"
    return Slot(
        pipe=info.pipe,
        occupancy=occupancy,
        result=costs.latency["LDGSTS"][0] if copies else result,
        sources=sources,
        matmul=matmul,
        from_registers=bool(matmul) and not text.split(",")[1].startswith("gdesc"),
        commits=bool(matmul) and "gsb0" in text,
        retires=_count(text) if opcode.startswith("WARPGROUP.DEPBAR") else -1,
        copies=copies,
        copies_left=_count(text) if item.base == "DEPBAR" and text.startswith("SB0") else -1,
        reads=info.pipe in READERS,
        arrives=opcode.startswith("WARPGROUP.ARRIVE"),
        pause=costs.barrier if item.base == "BAR" else 0.0,
        signal=opcode.startswith(("SYNCS.ARRIVE", "BAR.ARV")),
    )


def _of_one_group(item: Instruction) -> bool:
    """Whether the warps that meet at a named barrier are those of one group."""
    return _count(item.line.operands) == WARP_GROUP


def _count(operands: str) -> int:
    return int(operands.rsplit(",", 1)[-1], 16)


def slots_of(way: Way) -> tuple[Line, ...]:
    """The code of a loop or of another way.

    Gates are its barrier polls and waits for other groups, signals its barrier arrivals, in the
    order of the code. Of a named barrier that each group takes under another number, one behind the
    other under guards, the first stands for all. Where the warps of one group meet, the one that is
    walked waits as long as a barrier takes.
    """
    return tuple(line for _, line in followed(way))


def followed(way: Way) -> tuple[tuple[Instruction, Line], ...]:
    """The instructions that `slots_of` takes, each with its line."""
    found: list[tuple[Instruction, Line]] = []
    guarded = ""
    for item, jumps in zip(way.instructions, way.jumps, strict=True):
        barrier = item.base == "BAR" and bool(item.line.guard)
        if barrier and item.line.opcode == guarded:
            continue
        slot = replace(slot_of(item), jumps=jumps)
        own = item.line.opcode.startswith("BAR.SYNC") and _of_one_group(item)
        slot = slot if own else replace(slot, pause=0.0)
        if item.line.opcode.startswith(("SYNCS.PHASECHK", "BAR.SYNC")) and not own:
            slot = replace(slot, gate=True, result=hopper().poll)
        if slot.gate or slot.signal or slot.matmul:
            guarded = item.line.opcode if barrier else ""
        found.append((item, (slot, item.control)))
    return tuple(found)
