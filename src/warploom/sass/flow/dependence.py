"""Register dependences inside a block, as the original order defines them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from warploom.sass.decode.kernel import GROUP_SLOT, Instruction
from warploom.sass.decode.opcodes import Pipe


class Hazard(Enum):
    """Why two instructions must keep their order."""

    RAW = "read after write"
    WAR = "write after read"
    WAW = "write after write"


class Dependence(NamedTuple):
    """`later` needs `earlier`: the resource, and where each of the two names it.

    A tuple, for a kernel has tens of thousands: made in half of a frozen dataclass's time.
    """

    earlier: int
    later: int
    hazard: Hazard
    resource: int
    earlier_slot: str
    later_slot: str


def dependences(instructions: Sequence[Instruction]) -> Iterator[Dependence]:
    """Every dependence between neighbours in the def-use chain of straight-line code.

    Chains are complete: a dependence between instructions further apart follows from these by
    transitivity of order, and every reader of a value is tied to the writer it reads from. That
    holds through a WARPGROUP instruction too, which names the registers of matrix instructions
    without writing them: what comes out of an arithmetic unit must still be there in time.
    Indices are those of the instructions in their kernel.
    """
    writer: dict[int, tuple[int, str]] = {}
    hidden: dict[int, tuple[int, str]] = {}
    readers: dict[int, list[tuple[int, str]]] = {}
    for item in instructions:
        for access in item.effects.reads:
            resource = access.resource
            if resource in writer:
                index, slot = writer[resource]
                yield Dependence(index, item.index, Hazard.RAW, resource, slot, access.slot)
                if slot == GROUP_SLOT != access.slot and resource in hidden:
                    index, slot = hidden[resource]
                    yield Dependence(index, item.index, Hazard.RAW, resource, slot, access.slot)
            readers.setdefault(resource, []).append((item.index, access.slot))
        for access in item.effects.writes:
            resource = access.resource
            if resource in writer:
                index, slot = writer[resource]
                yield Dependence(index, item.index, Hazard.WAW, resource, slot, access.slot)
            for index, slot in readers.get(resource, ()):
                if index != item.index:
                    yield Dependence(index, item.index, Hazard.WAR, resource, slot, access.slot)
        for access in item.effects.writes:
            if access.slot != GROUP_SLOT and item.effects.info.pipe is not Pipe.ASYNC:
                hidden[access.resource] = (item.index, access.slot)
            elif access.slot != GROUP_SLOT:
                hidden.pop(access.resource, None)
            writer[access.resource] = (item.index, access.slot)
            readers[access.resource] = []
