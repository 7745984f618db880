"""A GPU as data: a frozen map from documented keys to quantities with unit and source."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

from warploom.errors import InputError
from warploom.machine.keys import KEYS, KINDS

SCHEMA_VERSION = 1
Value = int | float | str


@dataclass(frozen=True)
class Quantity:
    """One number (or word) of a machine: its unit, where it comes from and how it was got."""

    value: Value
    unit: str
    source: str
    kind: str

    def __str__(self) -> str:
        return f"{format_value(self.value)} {self.unit} ({self.kind}: {self.source})"


def check_quantity(key: str, quantity: Quantity, where: str) -> None:
    """Refuse an unknown key, a wrong unit, kind or value; the error names `where` and the fix."""
    if key not in KEYS:
        raise InputError(f"{where}: unknown key {key!r}{_did_you_mean(key, KEYS)}")
    known = KEYS[key]
    if quantity.unit != known.unit:
        raise InputError(f"{where}: {key} has unit {quantity.unit!r}, expected {known.unit!r}")
    if quantity.kind not in KINDS:
        raise InputError(
            f"{where}: {key} has kind {quantity.kind!r}, expected one of {', '.join(KINDS)}"
        )
    if not quantity.source.strip():
        raise InputError(f"{where}: {key} has no source, expected where the number comes from")
    if known.is_text:
        if not isinstance(quantity.value, str) or not quantity.value:
            raise InputError(f"{where}: {key} is {quantity.value!r}, expected a word")
        return
    value = quantity.value
    if isinstance(value, bool | str) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: {key} is {value!r}, expected a finite number above zero")


@dataclass(frozen=True)
class Machine:
    """One GPU. Read numbers by dotted key; `warploom.machine.KEYS` documents every key.

    `overlays` names what was laid over the shipped data, oldest first.
    """

    name: str
    title: str
    quantities: Mapping[str, Quantity]
    overlays: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check every quantity against the key table; `InputError` names the first bad one."""
        for key, quantity in self.quantities.items():
            check_quantity(key, quantity, f"machine {self.name}")

    def __hash__(self) -> int:
        return hash((self.name, self.overlays, tuple(sorted(self.quantities.items()))))

    def __contains__(self, key: str) -> bool:
        return key in self.quantities

    def __getitem__(self, key: str) -> Value:
        """The bare value of `key`, number or word."""
        return self.quantity(key).value

    def keys(self) -> Iterator[str]:
        """The keys this machine has a value for, in the order of the key table."""
        return (key for key in KEYS if key in self.quantities)

    def quantity(self, key: str) -> Quantity:
        """Value, unit and provenance of `key`; raises `InputError` when unknown or absent."""
        if key not in KEYS:
            raise InputError(f"unknown machine key {key!r}{_did_you_mean(key, KEYS)}")
        if key not in self.quantities:
            raise InputError(
                f"machine {self.name} has no value for {key} ({KEYS[key].meaning}, "
                f"{KEYS[key].unit}): supply one with warploom.machine.overlay(machine, "
                f"{{{key!r}: {{'value': ..., 'unit': {KEYS[key].unit!r}, "
                "'source': ..., 'kind': 'measured'}})"
            )
        return self.quantities[key]

    def value(self, key: str) -> float:
        """The number behind `key`, in the unit `KEYS[key].unit`; an int stays an int."""
        value = self.quantity(key).value
        if isinstance(value, str):
            raise InputError(f"{key} of machine {self.name} is the word {value!r}: use text()")
        return value

    def integer(self, key: str) -> int:
        """The count behind `key`; raises `InputError` when it is not a whole number."""
        value = self.value(key)
        if value != int(value):
            raise InputError(f"{key} of machine {self.name} is {value}, expected a whole number")
        return int(value)

    def text(self, key: str) -> str:
        """The word behind `key`, such as `sm_90a`."""
        value = self.quantity(key).value
        if not isinstance(value, str):
            raise InputError(f"{key} of machine {self.name} is the number {value}: use value()")
        return value

    def get(self, key: str, default: float | None = None) -> float | None:
        """The number behind `key`, or `default` when this machine has none; a bad key raises."""
        if key in KEYS and key not in self.quantities:
            return default
        return self.value(key)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; `from_json` restores an equal machine."""
        return {
            "schema": SCHEMA_VERSION,
            "name": self.name,
            "title": self.title,
            "overlays": list(self.overlays),
            "quantities": {key: asdict(self.quantities[key]) for key in self.keys()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """A machine back from `to_json`; `InputError` on another schema or a bad quantity."""
        if data.get("schema") != SCHEMA_VERSION:
            raise InputError(
                f"machine JSON has schema {data.get('schema')!r}, expected {SCHEMA_VERSION}"
            )
        try:
            quantities = {key: Quantity(**entry) for key, entry in data["quantities"].items()}
            return cls(data["name"], data["title"], quantities, tuple(data["overlays"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"machine JSON is incomplete: {error}") from None

    def __str__(self) -> str:
        lines = [f"{self.title} ({self.name})", *(f"overlay: {name}" for name in self.overlays)]
        for key in self.keys():
            quantity = self.quantities[key]
            number = f"{format_value(quantity.value)} {quantity.unit}"
            lines.append(f"  {key:<28} {number:<34} {quantity.kind}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{key}</code></td><td>{format_value(quantity.value)}</td>"
            f"<td>{html.escape(quantity.unit)}</td><td>{quantity.kind}</td>"
            f"<td>{html.escape(quantity.source)}</td></tr>"
            for key, quantity in ((key, self.quantities[key]) for key in self.keys())
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption><tr><th>key</th><th>value</th>"
            f"<th>unit</th><th>kind</th><th>source</th></tr>{rows}</table>"
        )


def format_value(value: Value) -> str:
    """A value for people: words as they are, large numbers with thousands separated."""
    if isinstance(value, str):
        return value
    if value >= 1e12:
        return f"{value:.4g}"
    return f"{value:,}"


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; see warploom.machine.KEYS"
