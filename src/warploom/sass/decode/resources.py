"""What instructions share: registers and predicates as numbers, and the accesses to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.operands import RegisterName

# One number a resource: R0-R254, then UR, P and UP.
UNIFORM_BASE: Final = 256
PREDICATE_BASE: Final = 512
UNIFORM_PREDICATE_BASE: Final = 520
RESOURCES: Final = 528
PREDICATES: Final = 7
_FILE_BASE: Final = {"R": 0, "UR": UNIFORM_BASE, "P": PREDICATE_BASE, "UP": UNIFORM_PREDICATE_BASE}


@dataclass(frozen=True, slots=True)
class Access:
    """One resource touched: `slot` says where (`d0` first word of the result, `a`, `b`, `c`
    sources with their word, `addr`, `desc`, `guard`, `pred`)."""

    resource: int
    slot: str


def resource_name(resource: int) -> str:
    """`R12`, `UR4`, `P0` or `UP1`."""
    for file, base in (("UP", 520), ("P", 512), ("UR", 256), ("R", 0)):
        if resource >= base:
            return f"{file}{resource - base}"
    raise AssertionError(resource)


def span(name: RegisterName, width: int) -> Iterator[tuple[int, int]]:
    """(resource, word) of every register of a group that starts at `name`."""
    if name.index < 0:
        return
    base = _FILE_BASE[name.file] + name.index
    for word in range(width):
        yield base + word, word


class Collector:
    """Gathers the accesses of one instruction."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def read(self, name: RegisterName, width: int, slot: str) -> None:
        self.reads.extend(
            Access(resource, slot if width == 1 else f"{slot}{word}")
            for resource, word in span(name, width)
        )

    def write(self, name: RegisterName, width: int, slot: str = "d") -> None:
        self.writes.extend(
            Access(resource, f"{slot}{word}") for resource, word in span(name, width)
        )
