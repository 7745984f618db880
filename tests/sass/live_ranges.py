"""nvdisasm's own live-range table (`-plr -lrm narrow`) as an oracle for reads and writes.

Marks: `^` written, `v` read, `x` both, `:` live. The option works only for cubins of the ELF
generation nvdisasm itself belongs to.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from warploom import toolchain
from warploom.sass.decode.cubin import NEW_LAYOUT_ABI, Cubin
from warploom.sass.decode.resources import PREDICATE_BASE, UNIFORM_BASE, UNIFORM_PREDICATE_BASE

_BASES = {"GPR": 0, "PRED": PREDICATE_BASE, "UGPR": UNIFORM_BASE, "UPRED": UNIFORM_PREDICATE_BASE}
EI_ABIVERSION = 8  # place of that byte in an ELF file
_ROW = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/")


def live_ranges(cubin: Cubin) -> dict[str, dict[int, tuple[set[int], set[int]]]]:
    """{kernel: {offset: (reads, writes)}}; an empty dict when nvdisasm has no dataflow for it."""
    if cubin.data[EI_ABIVERSION] < NEW_LAYOUT_ABI:
        return {}  # half a second that would only say so
    tool = toolchain.find("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(cubin.data)
        done = tool.run("-c", "-plr", "-lrm", "narrow", str(path))
    if done.returncode != 0 or "Dataflow analysis disabled" in done.stderr:
        return {}
    result: dict[str, dict[int, tuple[set[int], set[int]]]] = {}
    columns: list[tuple[int, int, int]] = []
    titles = ""
    current: dict[int, tuple[set[int], set[int]]] | None = None
    for row in done.stdout.splitlines():
        if match := re.match(r"^//-+ \.text\.(\S+)\s+-+$", row):
            current = result.setdefault(match.group(1), {})
            continue
        if "// |" not in row or current is None:
            continue
        body = row[row.index("// |") + 3 :]
        if re.search(r"\bGPR\b", body):
            titles = body
            continue
        if titles and re.search(r"#\s+0", body) and not _ROW.match(row):
            columns = _columns(titles, body)
            continue
        if (match := _ROW.match(row)) and columns:
            reads: set[int] = set()
            writes: set[int] = set()
            for start, count, base in columns:
                for index, mark in enumerate(body[start : start + count].ljust(count)):
                    if mark in "vx":
                        reads.add(base + index)
                    if mark in "^x":
                        writes.add(base + index)
            current[int(match.group(1), 16)] = (reads, writes)
    return result


def _columns(titles: str, digits: str) -> list[tuple[int, int, int]]:
    """(first character, registers, resource base) of each register file's columns."""
    found: list[tuple[int, int, int]] = []
    position = 0
    for title, block in zip(titles.split("|")[1:], digits.split("|")[1:], strict=True):
        position += 1
        if (name := title.strip()) in _BASES and (match := re.search(r"# (\d+)", block)):
            found.append((position + match.start(1), len(match.group(1)), _BASES[name]))
        position += len(block)
    return found
