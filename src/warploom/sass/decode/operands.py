"""Operands as nvdisasm prints them, parsed into typed pieces.

Only what dependence analysis needs is kept: which registers an operand names, how it uses them
(value, address, descriptor), and whether the text marks a 64-bit pair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final


class Kind(Enum):
    """What an operand is."""

    REGISTER = "register"
    UNIFORM = "uniform register"
    PREDICATE = "predicate"
    UNIFORM_PREDICATE = "uniform predicate"
    PREDICATE_FILE = "predicate file"
    MEMORY = "memory"
    DESCRIPTOR = "matrix descriptor"
    CONSTANT = "constant bank"
    IMMEDIATE = "immediate"
    LABEL = "label"
    SPECIAL = "special register"
    SCOREBOARD = "scoreboard"
    GROUP_SCOREBOARD = "matrix group scoreboard"
    CONVERGENCE = "convergence barrier"


@dataclass(frozen=True, slots=True)
class RegisterName:
    """A register in the text: `file` is R, UR, P or UP; `index` -1 is the zero register or PT."""

    file: str
    index: int
    pair: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: its kind, the registers it names, and details of the text.

    For memory operands `registers` are the address registers and `descriptor` the `desc[...]`
    pair. `offset` is the constant displacement in bytes.
    """

    text: str
    kind: Kind
    registers: tuple[RegisterName, ...] = ()
    descriptor: tuple[RegisterName, ...] = ()
    offset: int = 0
    reuse: bool = False
    negated: bool = False


_REGISTER: Final = re.compile(r"(?<![A-Za-z0-9_.])(UR|UP|R|P)(\d+|Z|T)((?:\.[A-Za-z0-9_]+)*)")
_SIMPLE: Final = re.compile(r"^[-~!+|]*(UR|UP|R|P)(\d+|Z|T)((?:\|?\.[A-Za-z0-9_]+)*)\|?$")
_OFFSET: Final = re.compile(r"([+-])(0x[0-9a-f]+)\]?$")
_SUFFIX_PAIR: Final = ".64"


def _name(file: str, number: str, suffixes: str) -> RegisterName:
    index = -1 if number in ("Z", "T") else int(number)
    return RegisterName(file, index, _SUFFIX_PAIR in suffixes)


def _names(text: str) -> tuple[RegisterName, ...]:
    return tuple(_name(*match.groups()) for match in _REGISTER.finditer(text))


_SIMPLE_KINDS: Final = {
    "R": Kind.REGISTER,
    "UR": Kind.UNIFORM,
    "P": Kind.PREDICATE,
    "UP": Kind.UNIFORM_PREDICATE,
}


# The operands of a kernel are few texts, each many times over.
@lru_cache(1 << 14)
def parse_operand(text: str) -> Operand:
    """One operand from its text; text we do not know becomes an immediate naming its registers."""
    if match := _SIMPLE.match(text):
        file, number, suffixes = match.groups()
        return Operand(
            text,
            _SIMPLE_KINDS[file],
            (_name(file, number, suffixes),),
            reuse=".reuse" in suffixes,
            negated="!" in text[: match.start(1)],
        )
    if text in ("PR", "UPR"):
        return Operand(text, Kind.PREDICATE_FILE)
    if text.startswith("gdesc["):
        return Operand(text, Kind.DESCRIPTOR, _names(text[5:]))
    if text.startswith(("desc[", "[", "tmem[", "gmem[")):
        return _parse_memory(text)
    if re.match(r"^[-~|]*(c|cx)\[", text):
        return Operand(text, Kind.CONSTANT, _names(text), reuse=".reuse" in text)
    if text.startswith("`("):
        return Operand(text, Kind.LABEL)
    if text.startswith("SR_") or text == "SRZ":
        return Operand(text, Kind.SPECIAL)
    if re.fullmatch(r"SB\d+", text):
        return Operand(text, Kind.SCOREBOARD)
    if re.fullmatch(r"gsb\d+", text):
        return Operand(text, Kind.GROUP_SCOREBOARD)
    if re.fullmatch(r"B\d+", text):
        return Operand(text, Kind.CONVERGENCE)
    return Operand(text, Kind.IMMEDIATE, _names(text))


def _parse_memory(text: str) -> Operand:
    descriptor: tuple[RegisterName, ...] = ()
    address = text
    if text.startswith("desc["):
        head, _, address = text.partition("][")
        descriptor = _names(head[5:])
        address = "[" + address
    offset = 0
    if match := _OFFSET.search(address):
        offset = int(match.group(2), 16) * (-1 if match.group(1) == "-" else 1)
    return Operand(text, Kind.MEMORY, _names(address), descriptor, offset)


def split_operands(text: str) -> list[str]:
    """The operands of one instruction's text, split at commas outside brackets."""
    parts: list[str] = []
    depth = 0
    current = ""
    for character in text:
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    return parts


def parse_operands(text: str) -> tuple[Operand, ...]:
    """Every operand of an instruction's text, in order."""
    return tuple(parse_operand(part) for part in split_operands(text))
