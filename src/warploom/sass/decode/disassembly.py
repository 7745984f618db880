"""nvdisasm's text of every instruction, joined with the words it belongs to.

NVIDIA's own disassembler names the opcode and operands; the words come from the file itself, and
the two are compared, so a disagreement is an error and never a guess.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from warploom import toolchain
from warploom.errors import InputError
from warploom.sass.decode.cubin import TEXT_PREFIX, Cubin

KEPT = 64  # listings
_SECTION: Final = re.compile(r"^//-+ (\.\S+)\s+-+$")
_INSTRUCTION: Final = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/"
)
_HIGH_WORD: Final = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL: Final = re.compile(r"^(\.?[\w$.@]+):")
_LINE: Final = re.compile(r'^\s*//## File "(.*?)", line (\d+)( inlined at)?')
_NOTE: Final = re.compile(r'\s*\(\*"?(.*?)"?\*\)')
_COMPUTED: Final = re.compile(r" (BRX|JMX)U?[ .]")
_GUARD: Final = re.compile(r"^@(!?)(U?P)(\d|T) ")


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction as text: guard predicate, opcode with modifiers, operand text.

    `source` is the line that it was compiled from, `at` the line of the kernel itself, where that
    stands in an inlined function.
    """

    offset: int
    guard: str
    opcode: str
    operands: str
    source: tuple[str, int] | None
    note: str = ""  # what nvdisasm remarks: BRANCH_TARGETS of a computed branch
    at: tuple[str, int] | None = None

    @property
    def text(self) -> str:
        """The instruction as one would read it."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Listing:
    """The text of one kernel: its lines in order and the labels by offset."""

    lines: tuple[Line, ...]
    labels: Mapping[int, tuple[str, ...]]


def disassemble(cubin: Cubin, with_source: bool = False) -> dict[str, Listing]:
    """The listing of every kernel in the file.

    Raises `ToolMissing` without nvdisasm and `InputError` when the tool refuses the file or
    disagrees with the file about a single word.
    """
    tool = toolchain.find("nvdisasm")
    try:
        listings = _listings(tool, cubin.data, with_source)
    except InputError as error:
        raise InputError(f"{cubin.origin}: {error}") from None
    for name, kernel in cubin.kernels.items():
        words = [word for word, _ in listings.get(name, ([], {}))[0]]
        if tuple(words) != kernel.words:
            raise InputError(
                f"{cubin.origin}: nvdisasm printed {len(words)} instructions of {name} and the "
                f"file holds {len(kernel.words)}, or their words differ"
            )
    return {
        name: Listing(tuple(line for _, line in listings[name][0]), listings[name][1])
        for name in cubin.kernels
    }


_Rows = tuple[list[tuple[tuple[int, int], Line]], dict[int, tuple[str, ...]]]


# A run takes half a second however small the file is, and the same bytes give the same text.
@lru_cache(KEPT)
def _listings(tool: toolchain.Tool, image: bytes, with_source: bool) -> dict[str, _Rows]:
    with tempfile.TemporaryDirectory(prefix="warploom-") as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(image)
        flags = ["-c", "-hex", *(["-gi"] if with_source else [])]
        # Where a computed branch may go is found by an analysis that takes a quarter of a run.
        done = tool.run(*flags, "-ndf", str(path))
        if _COMPUTED.search(done.stdout):
            done = tool.run(*flags, str(path))
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[:300]
        raise InputError(f"nvdisasm {tool.version} refuses it: {reason}")
    return _parse(done.stdout)


def _parse(text: str) -> dict[str, _Rows]:
    """Rows of (word, line) and labels by offset, for every code section of the text."""
    listings: dict[str, _Rows] = {}
    rows: _Rows | None = None
    pending: list[str] = []
    source: tuple[str, int] | None = None
    at: tuple[str, int] | None = None
    inlined = False
    low: tuple[int, Line] | None = None
    for row in text.splitlines():
        if match := _SECTION.match(row):
            name = match.group(1)
            rows, pending, source, at, inlined = None, [], None, None, False
            if name.startswith(TEXT_PREFIX):
                rows = listings.setdefault(name.removeprefix(TEXT_PREFIX), ([], {}))
        elif rows is None:
            continue
        elif match := _INSTRUCTION.match(row):
            line = _line(int(match.group(1), 16), match.group(2), source, at)
            low = (int(match.group(3), 16), line)
            if pending:
                rows[1][line.offset] = tuple(pending)
                pending = []
        elif (match := _HIGH_WORD.match(row)) and low is not None:
            rows[0].append(((low[0], int(match.group(1), 16)), low[1]))
            low = None
        elif match := _LINE.match(row):
            at = (match.group(1), int(match.group(2)))
            source = source if inlined else at
            inlined = match.group(3) is not None
        elif (match := _LABEL.match(row)) and not match.group(1).startswith(TEXT_PREFIX):
            pending.append(match.group(1))
    return listings


def _line(
    offset: int, text: str, source: tuple[str, int] | None, at: tuple[str, int] | None
) -> Line:
    note = " ".join(_NOTE.findall(text))
    body = _NOTE.sub("", text).rstrip(" ;")
    guard = ""
    if match := _GUARD.match(body):
        guard = "".join(match.groups())
        body = body[match.end() :]
    opcode, _, operands = body.strip().partition(" ")
    return Line(offset, guard, opcode, operands.strip(), source, note, at)
