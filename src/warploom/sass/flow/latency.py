"""How far apart two dependent instructions must issue: tables mined from compiler output.

The hardware does not interlock fixed-latency results, so a distance the compiler was never seen to
go below is the only safe lower bound. A key is (producer family, result word, consumer family,
source slot); it counts when `mining.ENOUGH` pairs stand at or below its value. A pair without a
key keeps the distance it had in the original code. What the compiler never goes below is another
question with a table of its own (`minima`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.opcodes import Order, Pipe, lookup
from warploom.sass.decode.resources import Access, resource_name

# Nothing of fixed latency takes longer: the slowest published figure is HMMA's 34 cycles. A mined
# value above this only says that no close pair was ever seen.
LONGEST: Final = 48

# A warp instruction occupies its pipe for at most this long; a larger mined spacing only says that
# no close pair was ever seen.
SLOWEST_PIPE: Final = 8

WHOLE_OPERAND: Final = frozenset((Pipe.LSU, Pipe.ASYNC, Pipe.CONTROL))

# Opcodes whose timing differs from the rest of their pipe get a family of their own.
OWN_FAMILY: Final = frozenset(
    "IMAD.WIDE IMAD.HI HFMA2.MMA UMOV ULDC R2UR VOTEU UIMAD UIMAD.WIDE CS2R P2R R2P VOTE "
    "UIADD3.64 UFLO UPOPC MOVM DADD DMUL DFMA DSETP DMMA F2FP".split()
)


# Opcodes that do several things, and how many modifiers tell them apart: an mbarrier's
# initialisation next to another says nothing of an arrival next to a test.
SEVERAL_JOBS: Final[Mapping[str, int]] = {
    "SYNCS": 1,
    "BAR": 1,
    "WARPGROUP": 1,
    "USETMAXREG": 1,
    "MEMBAR": 2,
    "FENCE": 2,
    "CCTL": 1,
    "UTMACCTL": 1,
    "DEPBAR": 1,
    "BMOV": 1,
}

# Both results of these come in two passes: the high word is written two cycles after the low one,
# and the high word of the addend is read two cycles after the other sources.
TWO_PASSES: Final = frozenset(("IMAD.WIDE", "UIMAD.WIDE"))


@cache
def _job(name: str, opcode: str) -> str:
    parts = opcode.split(".")
    return ".".join(parts[: 1 + SEVERAL_JOBS[parts[0]]]) if parts[0] in SEVERAL_JOBS else name


def job(item: Instruction) -> str:
    """The opcode's name, with the modifiers that make it another operation."""
    return _job(item.effects.info.name, item.line.opcode)


@cache
def _family_of(opcode: str) -> str:
    info = lookup(opcode)
    if info.pipe is Pipe.MMA and info.name != "MOVM":
        return opcode
    if info.name in OWN_FAMILY or info.pipe in (Pipe.CONTROL, Pipe.ASYNC, Pipe.UNKNOWN):
        return _job(info.name, opcode)
    return info.pipe.value


def _pass_of(item: Instruction, accesses: Iterable[Access], resource: int, late: str) -> str:
    """`.high` for a word that an operation of two passes touches in its second one."""
    if item.effects.info.name not in TWO_PASSES:
        return ""
    return ".high" if any(a.resource == resource and a.slot == late for a in accesses) else ".low"


def family(item: Instruction) -> str:
    """The timing family an instruction belongs to."""
    return _family_of(item.line.opcode)


def raw_key(producer: Instruction, slot: str, consumer: Instruction, consumer_slot: str) -> str:
    """Table key of a read after write.

    Memory and asynchronous units collect all words of an operand together, so the word's number
    is dropped there; arithmetic pipes may read the halves of a wide operand in different cycles.
    What warp-group matrix instructions read from registers is one kind whoever wrote it: a
    WARPGROUP.ARRIVE stands between, and close pairs are few.
    """
    pipe = consumer.effects.info.pipe
    if pipe is Pipe.ASYNC and consumer_slot[0] in "ac" and producer.base != "WARPGROUP":
        return "register.d > matrix.source"
    if pipe in WHOLE_OPERAND:
        consumer_slot = consumer_slot.rstrip("0123456789")
    return f"{family(producer)}.{slot} > {family(consumer)}.{consumer_slot}"


def waw_key(producer: Instruction, consumer: Instruction, resource: int) -> str:
    """Table key of a write after write."""
    first = _pass_of(producer, producer.effects.writes, resource, "d1")
    second = _pass_of(consumer, consumer.effects.writes, resource, "d1")
    return f"{family(producer)}{first} = {family(consumer)}{second}"


def war_key(reader: Instruction, writer: Instruction, resource: int) -> str:
    """Table key of a write after read; register files differ in when a source is read."""
    file = resource_name(resource).rstrip("0123456789")
    first = _pass_of(reader, reader.effects.reads, resource, "c1")
    second = _pass_of(writer, writer.effects.writes, resource, "d1")
    return f"{family(reader)}{first}.{file} < {family(writer)}{second}"


def sync_key(earlier: Instruction, later: Instruction) -> str:
    """Table key of a synchronising instruction and what it orders, in either direction."""
    return f"{_sync_name(earlier)} ~ {_sync_name(later)}"


def _sync_name(item: Instruction) -> str:
    """Memory operations count as one kind: what a barrier does to one it does to all."""
    return "lsu" if item.effects.info.order is Order.MEMORY else job(item)


def spacing_key(earlier: Instruction, later: Instruction) -> str:
    """Table key of two instructions that follow each other in one pipe."""
    return f"{_spacing_name(earlier)} | {_spacing_name(later)}"


def _spacing_name(item: Instruction) -> str:
    """Memory operations are told apart: the closest pair of one kind says nothing of others."""
    return item.base if item.effects.info.pipe is Pipe.LSU else family(item)


def takes_carry(item: Instruction) -> bool:
    """Whether an addition of the uniform datapath hands on or takes a carry: the one kind of
    neighbours that gave wrong results in consecutive cycles on an H200."""
    touched = (*item.effects.reads, *item.effects.writes)
    return item.base == "UIADD3" and any(
        resource_name(access.resource).startswith("UP") and access.slot != "guard"
        for access in touched
    )


# Pipes whose instructions the compiler always spaces by at least their occupancy.
SPACED: Final = frozenset(
    (
        Pipe.FMA,
        Pipe.IMAD,
        Pipe.ALU,
        Pipe.HALF,
        Pipe.MMA,
        Pipe.FP64,
        Pipe.UNIFORM,
        Pipe.XU,
        Pipe.LSU,
        Pipe.CONSTANT,
    )
)


@dataclass(frozen=True)
class LatencyTable:
    """Mined distances in cycles for one architecture, with where they come from.

    `gaps` between dependent instructions, `stalls` the least own stall of each opcode, `spacings`
    between neighbours of one pipe, with `pipes` for pairs never seen, and `interlocked` the cycles
    down to which the hardware was measured to keep such neighbours apart by itself. `minima`: what
    no compiler output ever went below (`flow.minima`).
    """

    sm: int
    provenance: str
    gaps: Mapping[str, int]
    stalls: Mapping[str, int]
    spacings: Mapping[str, int]
    pipes: Mapping[str, int]
    interlocked: Mapping[str, int]
    minima: Mapping[str, int]

    def gap(self, key: str, original: int) -> int:
        """Cycles needed for `key`: the mined minimum, never more than the original distance."""
        return min(original, self.gaps.get(key, LONGEST), LONGEST)

    def spacing(self, earlier: Instruction, later: Instruction) -> int:
        """Cycles between two instructions that follow each other in one pipe."""
        pipe = earlier.effects.info.pipe
        key = spacing_key(earlier, later)
        found = min(self.spacings.get(key, self.pipes.get(pipe.value, 1)), SLOWEST_PIPE)
        if takes_carry(earlier) and takes_carry(later):
            return found
        return min(found, self.interlocked.get(key, found))

    def own_stall(self, item: Instruction) -> int:
        """The least stall ever seen on this opcode; its own when the opcode was never mined."""
        mined = self.stalls.get(job(item))
        return item.control.stall if mined is None else min(mined, item.control.stall)


TABLE_PARTS: Final = ("gaps", "stalls", "spacings", "pipes", "interlocked", "minima")
TABLES: Final[Mapping[int, str]] = {80: "latency_sm80.json", 90: "latency_sm90a.json"}


@cache
def table_for(sm: int) -> LatencyTable:
    """The table shipped for an architecture; an empty one (everything pinned) for the others."""
    file = TABLES.get(sm)
    if file is None:
        return LatencyTable(sm, "none: every distance stays as compiled", {}, {}, {}, {}, {}, {})
    data: dict[str, Any] = json.loads(
        (resources.files("warploom.sass") / "data" / file).read_text()
    )
    parts = (data[name] for name in TABLE_PARTS)
    return LatencyTable(sm, data["provenance"], *parts)
