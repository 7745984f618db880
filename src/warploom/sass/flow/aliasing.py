"""Which memory operations may change places: spaces, disjointness and the alias mode.

`strict`: a store keeps its order with every access of its space unless both addresses come from
the same unchanged registers and the constant offsets do not overlap. `triton`: as strict, and a
global load may cross a global store when their addresses derive from different pointer parameters
(a Triton kernel's pointer arguments are distinct buffers between barriers). The mode is named in
every verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.opcodes import Order
from warploom.sass.decode.operands import Kind


class AliasMode(Enum):
    """What is assumed about pointers; see the module."""

    STRICT = "strict"
    TRITON = "triton"

    @property
    def about(self) -> str:
        """The assumption in words."""
        return _ABOUT[self]


_ABOUT: Final = {
    AliasMode.STRICT: "may point to the same bytes",
    AliasMode.TRITON: "every pointer argument is a buffer of its own",
}

_GLOBAL: Final = 1
_SHARED: Final = 2
_LOCAL: Final = 4
_ALL: Final = _GLOBAL | _SHARED | _LOCAL

# (space read, space written) of every opcode whose order the alias rules decide.
SPACES: Final[Mapping[str, tuple[int, int]]] = {
    "LDG": (_GLOBAL, 0),
    "LDS": (_SHARED, 0),
    "LDSM": (_SHARED, 0),
    "LDL": (_LOCAL, 0),
    "LD": (_ALL, 0),
    "STG": (0, _GLOBAL),
    "STS": (0, _SHARED),
    "STSM": (0, _SHARED),
    "STL": (0, _LOCAL),
    "ST": (0, _ALL),
    "LDGSTS": (_GLOBAL, _SHARED),
}
_COLLECTIVE: Final = frozenset(("LDSM", "STSM", "LDGSTS"))
_SYNCHRONISING: Final = re.compile(r"\.(STRONG|MMIO|VOLATILE|ACQUIRE|RELEASE|SC)\b")


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """One memory operation: spaces, address (register versions and offset), bytes, pointers."""

    index: int
    base: str
    reads: int
    writes: int
    address: tuple[tuple[int, int], ...]
    offset: int
    size: int
    pointers: frozenset[int]


def is_sync(item: Instruction) -> bool:
    """True for an instruction that keeps its order with all memory and every other such one."""
    info = item.effects.info
    if info.order is Order.SYNC:
        return True
    if info.order is not Order.MEMORY:
        return False
    # The never-executed loads ptxas puts before a run of LDGSTS look like a hardware workaround.
    return item.line.guard == "!PT" or bool(_SYNCHRONISING.search(item.line.opcode))


def _size(item: Instruction) -> int:
    opcode = item.line.opcode
    if match := re.search(r"\.(8|16|32|64|128|256)(?=\.|$)", opcode):
        return int(match.group(1)) // 8
    if match := re.search(r"\.[USF](8|16)(?=\.|$)", opcode):
        return int(match.group(1)) // 8
    return 4


def memory_accesses(
    items: Sequence[Instruction], pointers: Mapping[int, frozenset[int]]
) -> list[MemoryAccess]:
    """The alias-ordered memory operations of one block, in order.

    `pointers` gives the pointer parameters each instruction's global address derives from.
    """
    version: dict[int, int] = {}
    found: list[MemoryAccess] = []
    for item in items:
        if item.effects.info.order is Order.MEMORY and not is_sync(item):
            reads, writes = SPACES[item.effects.info.name]
            memory = [op for op in item.effects.operands if op.kind is Kind.MEMORY]
            address = tuple(
                (access.resource, version.get(access.resource, 0))
                for access in item.effects.reads
                if access.slot.startswith(("addr", "uaddr", "desc"))
            )
            found.append(
                MemoryAccess(
                    item.index,
                    item.effects.info.name,
                    reads,
                    writes,
                    address,
                    memory[0].offset if memory else 0,
                    _size(item),
                    pointers.get(item.index, frozenset()),
                )
            )
        for access in item.effects.writes:
            version[access.resource] = version.get(access.resource, 0) + 1
    return found


def must_keep_order(first: MemoryAccess, second: MemoryAccess, mode: AliasMode) -> bool:
    """True when the two accesses may touch the same bytes and one of them writes."""
    if first.base == second.base == "LDGSTS":
        return True  # order within an asynchronous group is observed by the hardware
    shared_spaces = first.writes & (second.reads | second.writes) | second.writes & first.reads
    if not shared_spaces:
        return False
    collective = first.base in _COLLECTIVE or second.base in _COLLECTIVE
    if not collective and first.address == second.address:
        apart = (
            first.offset + first.size <= second.offset
            or second.offset + second.size <= first.offset
        )
        return not apart
    if mode is AliasMode.TRITON and shared_spaces == _GLOBAL:
        distinct = len(first.pointers) == 1 == len(second.pointers)
        return not (distinct and first.pointers != second.pointers)
    return True
