"""Evidence rows: what a claim of ours must leave behind, and the check that a row is whole.

A row is one measurement of one kernel at one shape, written by a script of `bench/` on the machine
it names. The claims of the README and the tables of the docs are generated from these files, and a
test fails when they disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_text_atomically


@dataclass(frozen=True)
class Evidence:
    """One measured claim.

    `ratio_to_best` is > 1 when we win, whichever way `better` points. `ci95` is the interval of
    that ratio and `control` the interval of the same ratio for two copies of one thing (A/A).
    """

    claim: str
    kernel: str
    shape: str
    dtype: str
    device: str
    driver: str
    compiler: str
    date: str
    command: str
    unit: str
    better: str
    ours: float
    baselines: Mapping[str, float]
    ratio_to_best: float
    ci95: tuple[float, float] | None = None
    control: tuple[float, float] | None = None
    samples: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: str = ""

    def __post_init__(self) -> None:
        """Refuse a row that could not be read later: an unknown direction or no baseline."""
        if self.better not in ("higher", "lower"):
            raise InputError(
                f"evidence row {self.claim}/{self.kernel}: better={self.better!r}, "
                "expected 'higher' or 'lower'"
            )
        for name in ("claim", "kernel", "device", "date", "command", "unit"):
            if not getattr(self, name):
                raise InputError(f"evidence row {self.claim}/{self.kernel}: {name} is empty")

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        """A row back from JSON; raises `InputError` naming a missing or unknown field."""
        known = set(cls.__dataclass_fields__)
        if unknown := set(data) - known:
            raise InputError(f"evidence row has unknown fields {sorted(unknown)}")
        values = dict(data)
        for name in ("ci95", "control"):
            if values.get(name) is not None:
                low, high = values[name]
                values[name] = (float(low), float(high))
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"evidence row is incomplete: {error}") from None


def write_rows(path: Path, rows: Iterable[Evidence]) -> None:
    """Write rows to `path` in one step: a reader never sees half a file."""
    text = json.dumps([row.to_json() for row in rows], indent=1) + "\n"
    write_text_atomically(path, text)


def read_rows(path: Path) -> list[Evidence]:
    """Read the rows of one evidence file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not an evidence file ({error})") from None
    return [Evidence.from_json(row) for row in data]
