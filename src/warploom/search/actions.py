"""What a player may do in one step of the assembly game."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.sass.control import Control


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
