"""What a player may do in one step of the assembly game."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from warploom.errors import InputError
from warploom.sass.decode.control import Control

STEPS: Final = ("order", "stall", "yield", "reuse")  # names of `--moves`
# Moves that there were once: programs of other registers, loops and scoreboards, and longer stalls.
FORMER: Final = ("rename", "rotate", "pace", "scoreboards", "boards")
LOST: Final = "gone: it gained next to nothing (docs/search.md); "


def moves_of(names: Iterable[str]) -> frozenset[str]:
    """A set of move names; raises `InputError` for an unknown one, or when no step is left."""
    chosen = frozenset(names)
    if unknown := sorted(chosen - set(STEPS)):
        now = LOST if unknown[0] in FORMER else ""
        raise InputError(f"unknown move {unknown[0]!r}: {now}expected some of {', '.join(STEPS)}")
    if "order" not in chosen:
        raise InputError("the game needs the move 'order'; the others add to it")
    return chosen


@dataclass(frozen=True, slots=True)
class Move:
    """Move an instruction to a position of its block.

    `kept` lets control fields travel unchanged (SIP); otherwise they are re-derived.
    """

    index: int
    to: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class SetControl:
    """Ask for another control field on an instruction: a tighter stall, a yield, a reuse hint."""

    index: int
    control: Control
    kind: str


@dataclass(frozen=True, slots=True)
class Reorder:
    """Give a whole block a new order."""

    block: int
    order: tuple[int, ...]


Action = Move | SetControl | Reorder
