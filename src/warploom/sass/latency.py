"""How far apart two dependent instructions must issue: tables mined from compiler output.

The hardware does not interlock fixed-latency results, so a distance the compiler was never seen to
go below is the only safe lower bound. A key is (producer family, result word, consumer family,
source slot); it counts when at least `ENOUGH` pairs stand at or below its value. A pair without a
key keeps the distance it had in the original code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from warploom.sass.effects import resource_name
from warploom.sass.kernel import Instruction
from warploom.sass.opcodes import Order, Pipe

ENOUGH: Final = 5

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


@cache
def _family_of(name: str, pipe: Pipe, opcode: str) -> str:
    if pipe is Pipe.MMA and name != "MOVM":
        return opcode
    if name in OWN_FAMILY or pipe in (Pipe.CONTROL, Pipe.ASYNC, Pipe.UNKNOWN):
        return name
    return pipe.value


def family(item: Instruction) -> str:
    """The timing family an instruction belongs to."""
    info = item.effects.info
    return _family_of(info.name, info.pipe, item.line.opcode)


def raw_key(producer: Instruction, slot: str, consumer: Instruction, consumer_slot: str) -> str:
    """Table key of a read after write.

    Memory and asynchronous units collect all words of an operand together, so the word's number
    is dropped there; arithmetic pipes may read the halves of a wide operand in different cycles.
    """
    if consumer.effects.info.pipe in WHOLE_OPERAND:
        consumer_slot = consumer_slot.rstrip("0123456789")
    return f"{family(producer)}.{slot} > {family(consumer)}.{consumer_slot}"


def waw_key(producer: Instruction, consumer: Instruction) -> str:
    """Table key of a write after write."""
    return f"{family(producer)} = {family(consumer)}"


def war_key(reader: Instruction, writer: Instruction, resource: int) -> str:
    """Table key of a write after read; register files differ in when a source is read."""
    file = resource_name(resource).rstrip("0123456789")
    return f"{family(reader)}.{file} < {family(writer)}"


def sync_key(earlier: Instruction, later: Instruction) -> str:
    """Table key of a synchronising instruction and what it orders, in either direction."""
    return f"{_sync_name(earlier)} ~ {_sync_name(later)}"


def _sync_name(item: Instruction) -> str:
    """Memory operations count as one kind: what a barrier does to one it does to all."""
    return "lsu" if item.effects.info.order is Order.MEMORY else item.base


def spacing_key(earlier: Instruction, later: Instruction) -> str:
    """Table key of two instructions that follow each other in one pipe."""
    return f"{_spacing_name(earlier)} | {_spacing_name(later)}"


def _spacing_name(item: Instruction) -> str:
    """Memory operations are told apart: the closest pair of one kind says nothing of others."""
    return item.base if item.effects.info.pipe is Pipe.LSU else family(item)


# Pipes whose instructions the compiler always spaces by at least their occupancy. On an H200 two
# carry-producing UIADD3 in consecutive cycles gave wrong results: this is not only throughput.
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
    between neighbours of one pipe, with `pipes` for pairs never seen.
    """

    sm: int
    provenance: str
    gaps: Mapping[str, int]
    stalls: Mapping[str, int]
    spacings: Mapping[str, int]
    pipes: Mapping[str, int]

    def gap(self, key: str, original: int) -> int:
        """Cycles needed for `key`: the mined minimum, never more than the original distance."""
        return min(original, self.gaps.get(key, LONGEST), LONGEST)

    def spacing(self, earlier: Instruction, later: Instruction) -> int:
        """Cycles between two instructions that follow each other in one pipe."""
        pipe = earlier.effects.info.pipe
        found = self.spacings.get(spacing_key(earlier, later), self.pipes.get(pipe.value, 1))
        return min(found, SLOWEST_PIPE)

    def own_stall(self, item: Instruction) -> int:
        """The least stall ever seen on this opcode; its own when the opcode was never mined."""
        mined = self.stalls.get(item.effects.info.name)
        return item.control.stall if mined is None else min(mined, item.control.stall)


def smallest_supported(counts: Mapping[int, int]) -> int | None:
    """The smallest distance with at least `ENOUGH` pairs at or below it; None with too few."""
    total = 0
    for gap, count in sorted(counts.items()):
        total += count
        if total >= ENOUGH:
            return gap
    return None


TABLES: Final[Mapping[int, str]] = {80: "latency_sm80.json", 90: "latency_sm90a.json"}


@cache
def table_for(sm: int) -> LatencyTable:
    """The table shipped for an architecture; an empty one (everything pinned) for the others."""
    file = TABLES.get(sm)
    if file is None:
        return LatencyTable(sm, "none: every distance stays as compiled", {}, {}, {}, {})
    text = (resources.files("warploom.sass") / "data" / file).read_text()
    data = json.loads(text)
    return LatencyTable(
        sm, data["provenance"], data["gaps"], data["stalls"], data["spacings"], data["pipes"]
    )


def merge_counts(
    into: dict[str, dict[int, int]], parts: Iterable[tuple[str, int]]
) -> dict[str, dict[int, int]]:
    """Count observed distances by key."""
    for key, gap in parts:
        counts = into.setdefault(key, {})
        counts[gap] = counts.get(gap, 0) + 1
    return into
