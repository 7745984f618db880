"""Sizes that a program leaves open: its author names the choices, a search takes one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from warploom.tile.blame import refuse, shown


class Tunable(int):
    """A whole number that may also be one of others: the first of `choices` unless one is given."""

    choices: tuple[int, ...]

    def __new__(cls, choices: Iterable[int]) -> Tunable:
        """The first choice, with all of them."""
        values = tuple(choices)
        if not values or len(set(values)) != len(values):
            raise refuse(f"tunable of {shown(values)}: expected distinct whole numbers")
        for value in values:
            given: Any = value
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise refuse(f"tunable of {shown(value)}: expected whole numbers of at least 1")
        made = super().__new__(cls, values[0])
        made.choices = values
        return made

    def __reduce__(self) -> tuple[type[Tunable], tuple[tuple[int, ...]]]:
        return Tunable, (self.choices,)  # what a copy is made of, in another process


def tunable(*choices: int | range) -> int:
    """A default for a parameter of a program: `tile_m: int = tunable(128, 64, 192)`, or a range.

    The program is traced with the first choice unless another is set; `optimize` tries all.
    """
    return Tunable(
        number
        for choice in choices
        for number in (choice if isinstance(choice, range) else (choice,))
    )
