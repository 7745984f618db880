"""Where in an instruction's word each register stands: asked of nvdisasm, not of a table.

For every place whose bits equal a register's number, the bits are changed and the disassembler says
which register of the text changed with them. A register with no such place, or with several, is not
encoded by a field we understand and keeps its number.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warploom import toolchain
from warploom.errors import InputError
from warploom.sass.decode.kernel import Instruction

NAME: Final = re.compile(r"(?<![A-Za-z0-9_.])(UR|UP|R|P)(\d+)(?!\d)")
_ROW: Final = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*$")
_AT: Final = re.compile(r"at address (0x[0-9a-f]+)")
# Bits a register number takes, by file, and where the word's operand fields begin and end.
BITS: Final = {"R": 8, "UR": 6, "P": 3, "UP": 3}
FIRST_BIT: Final = 12
LAST_BIT: Final = 91
ASIDE: Final = {"R": 4, "UR": 4, "P": 1, "UP": 1}  # keeps pairs and quads aligned
MODES: Final = {80: "SM80", 86: "SM86", 87: "SM87", 89: "SM89", 90: "SM90a"}


@dataclass(frozen=True, slots=True)
class Field:
    """The bits of one register named in an instruction's text, the `occurrence`-th from the left
    (its guard included)."""

    occurrence: int
    file: str
    number: int
    bit: int


def texts(words: Sequence[tuple[int, int]], sm: int) -> list[str]:
    """nvdisasm's text of bare instruction words; empty for a word it calls illegal or leaves out.

    Raises `InputError` when it refuses them without saying which.
    """
    if sm not in MODES:
        raise InputError(f"sm_{sm}: registers are not renamed for this architecture")
    tool = toolchain.find("nvdisasm")
    left = list(range(len(words)))
    with tempfile.TemporaryDirectory(prefix="warploom-") as folder:
        path = Path(folder) / "words.bin"
        while left:
            path.write_bytes(b"".join(struct.pack("<QQ", *words[place]) for place in left))
            done = tool.run("-b", MODES[sm], str(path))
            if done.returncode == 0:
                rows = (match for row in done.stdout.splitlines() if (match := _ROW.match(row)))
                read = {left[int(row.group(1), 16) // 16]: row.group(2) for row in rows}
                return [read.get(place, "") for place in range(len(words))]
            refused = {int(address, 16) // 16 for address in _AT.findall(done.stderr)}
            kept = [place for row, place in enumerate(left) if row not in refused]
            if len(kept) == len(left):
                reason = " ".join(done.stderr.split())[:200]
                raise InputError(f"nvdisasm refuses {len(left)} bare instruction words: {reason}")
            left = kept
    return [""] * len(words)


def occurrences(text: str) -> list[tuple[str, int]]:
    """The registers a text names, from left to right, as (file, number)."""
    return [(match.group(1), int(match.group(2))) for match in NAME.finditer(text)]


def shape(text: str) -> str:
    """The text with every register number left out."""
    return NAME.sub(lambda match: f"{match.group(1)}#", text)


def fields(items: Iterable[Instruction], sm: int) -> dict[int, tuple[Field, ...]]:
    """{instruction index: the fields of its registers that were found for certain}."""
    trials = list(_trials(items))
    wanted = {trial.item.index: trial.item for trial in trials}
    plain = [(item.low, item.high) for item in wanted.values()]
    said = texts([*plain, *(trial.word for trial in trials)], sm) if trials else []
    before, after = dict(zip(wanted, said, strict=False)), said[len(plain) :]
    found: dict[int, list[Field]] = {}
    for trial, text in zip(trials, after, strict=True):
        field = _changed(trial, before[trial.item.index], text)
        if field is not None:
            found.setdefault(trial.item.index, []).append(field)
    return {index: tuple(_certain(rows)) for index, rows in found.items()}


@dataclass(frozen=True, slots=True)
class _Trial:
    item: Instruction
    file: str
    number: int
    other: int
    bit: int
    word: tuple[int, int]


def _trials(items: Iterable[Instruction]) -> Iterator[_Trial]:
    """Every place of a word that holds the number of a register its text names."""
    for item in items:
        word = item.low | item.high << 64
        for file, number in dict.fromkeys(occurrences(item.line.text)):
            bits = BITS[file]
            other = number ^ ASIDE[file]
            for bit in range(FIRST_BIT, LAST_BIT - bits + 2):
                if word >> bit & (1 << bits) - 1 == number:
                    new = put(word, bit, bits, other)
                    halves = (new & (1 << 64) - 1, new >> 64)
                    yield _Trial(item, file, number, other, bit, halves)


def put(word: int, bit: int, bits: int, value: int) -> int:
    """The 128-bit word with `bits` bits from `bit` on replaced."""
    return word & ~(((1 << bits) - 1) << bit) | value << bit


def _changed(trial: _Trial, before: str, after: str) -> Field | None:
    """The field a trial proves: one register of the text changed, as expected, and nothing else."""
    if shape(before) != shape(after):
        return None
    pairs = list(zip(occurrences(before), occurrences(after), strict=True))
    differing = [place for place, (one, other) in enumerate(pairs) if one != other]
    if len(differing) != 1:
        return None
    place = differing[0]
    if pairs[place] != ((trial.file, trial.number), (trial.file, trial.other)):
        return None
    return Field(place, trial.file, trial.number, trial.bit)


def _certain(rows: list[Field]) -> Iterator[Field]:
    """Fields whose register has exactly one place."""
    count: Mapping[int, int] = {
        row.occurrence: sum(other.occurrence == row.occurrence for other in rows) for row in rows
    }
    return (row for row in rows if count[row.occurrence] == 1)
