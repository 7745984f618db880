"""Faults of an emulated run: what happened, its two sides and their lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import CheckFailed

PLACE = re.compile(r"\{([0-9a-f ]*)\}")
# What a fault is called, by the first word of the machine's message.
KINDS = (
    "race", "proxy", "unwritten", "registers", "bounds", "bytes", "exit", "deadlock", "launch",
    "result",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of a source, and the lines it was called from, outermost last."""

    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        if not self.places:
            return "an unknown line"
        (name, line), *within = reversed(self.places)
        inner = ", ".join(f"{at}" for _, at in reversed(within))
        return f"{name}:{line}" + (f" (through {inner})" if inner else "")


class Fault(CheckFailed):
    """A run did what a GPU does not allow, or never ends."""

    def __init__(self, text: str, lines: tuple[Line, ...] = (), seed: int = 0) -> None:
        super().__init__(text)
        self.lines, self.seed = lines, seed

    @property
    def kind(self) -> str:
        """Its first word where that is one of `KINDS`, else "rule"."""
        first = re.split(r"\W", str(self), maxsplit=1)[0]
        return first if first in KINDS else "rule"

    def shown(self, sources: dict[str, str]) -> str:
        """The fault, and below it the lines that it names; `sources`: texts by name."""
        rows = [str(self)]
        for line in dict.fromkeys(self.lines):
            for name, at in line.places[-1:]:
                text = sources.get(name, "").splitlines()
                if 0 < at <= len(text):
                    rows.append(f"  {name}:{at} | {text[at - 1].strip()}")
        return "\n".join([*dict.fromkeys(rows), f"  replay: --seed {self.seed}"])


def fault_of(message: str, binary: Path, seed: int, names: Sequence[str]) -> Fault:
    """The fault of a machine's message, with addresses as lines of the sources `names`."""
    first, earlier, _ = message.partition("; before it, ")
    if earlier and "; the result is read at" in first:
        message = first  # it says what came before by itself
    asked = list(dict.fromkeys(word for each in PLACE.findall(message) for word in each.split()))
    known = _lines_of(binary, asked, names)
    lines: list[Line] = []

    def shown(found: re.Match[str]) -> str:
        places = [known[word] for word in found[1].split() if known.get(word)]
        line = Line(tuple(place for place in places if place is not None))
        lines.append(line)
        return str(line)

    return Fault(PLACE.sub(shown, message), tuple(lines), seed)


def _lines_of(
    binary: Path, addresses: list[str], names: Sequence[str]
) -> dict[str, tuple[str, int] | None]:
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return {}
    done = subprocess.run(
        [tool, "-e", str(binary), *addresses], capture_output=True, text=True, check=False
    )
    found: dict[str, tuple[str, int] | None] = {}
    for address, row in zip(addresses, done.stdout.splitlines(), strict=False):
        path, _, line = row.split(" ")[0].rpartition(":")
        own = [name for name in names if path == name or path.endswith(f"/{name}")]
        found[address] = (own[0], int(line)) if own and line.isdigit() else None
    return found
