"""The vocabulary of a machine: every dotted key, its unit and its meaning (`keys.toml`).

A machine file may only use these keys, each in the unit named there, so that a misspelt key or a
bandwidth given in GB/s is refused by name instead of being carried along.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

TEXT_UNIT = "name"


@dataclass(frozen=True)
class Key:
    """One quantity a machine can have: `unit` is the only unit accepted for it."""

    name: str
    unit: str
    meaning: str

    @property
    def is_text(self) -> bool:
        """True when the value is a word (`sm_90a`), false when it is a number."""
        return self.unit == TEXT_UNIT


def _keys() -> dict[str, Key]:
    table = tomllib.loads(files("warploom.machine").joinpath("keys.toml").read_text())
    return {name: Key(name, *row) for name, row in table.items()}


KEYS = _keys()

KINDS: dict[str, str] = {
    "datasheet": "printed by the vendor for this product",
    "whitepaper": "the vendor's architecture paper",
    "documentation": "the vendor's programming guide or instruction-set manual",
    "measured": "measured by this project on the device the source names",
    "microbenchmark": "measured by others; the source names them",
    "derived": "arithmetic from sourced numbers; the source shows it",
    "model": "used in a published cost model, no measurement behind it: replace by an overlay",
}
