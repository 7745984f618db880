"""Reads and writes against nvdisasm's own live ranges, on every cubin it has them for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.sass.live_ranges import live_ranges

from warploom.sass.decode import kernel
from warploom.sass.decode.cubin import load
from warploom.sass.decode.disassembly import Line
from warploom.sass.decode.effects import effects_of
from warploom.sass.decode.resources import resource_name

# What nvdisasm's table leaves out or adds; each is on the careful side in ours.
EXCEPTIONS = {
    "LDGSTS": "the source predicate is read, the table leaves it out",
    "P2R": "reads the predicates its mask selects, the table says otherwise",
    "R2P": "writes the predicates its mask selects, the table says otherwise",
    "CALL": "the table adds what the callee uses",
}


def compare(path: Path) -> tuple[int, Counter[str], list[str]]:
    """(instructions compared, differences by exempt opcode, other differences) of one cubin."""
    cubin = load(path)
    table = live_ranges(cubin)
    exempt: Counter[str] = Counter()
    different: list[str] = []
    count = 0
    if not table:
        return 0, exempt, different
    for name, listing in kernel.disassemble(cubin).items():
        for line, word in zip(listing.lines, cubin.kernels[name].words, strict=True):
            if line.offset not in table.get(name, {}):
                continue
            effects = effects_of(line, word, cubin.sm)
            reads = {access.resource for access in effects.reads if access.slot != "old"}
            writes = {access.resource for access in effects.writes}
            count += 1
            expected = table[name][line.offset]
            if (reads, writes) == expected:
                continue
            base = line.opcode.split(".", 1)[0]
            if base in EXCEPTIONS or (cubin.sm >= 100 and effects.info.name == "UNKNOWN"):
                exempt[base] += 1
                continue
            different.append(
                f"{path.name} {line.offset:#x} {line.text}: {_names(reads, writes)}"
                f" not {_names(*expected)}"
            )
    return count, exempt, different


def _names(*groups: set[int]) -> list[list[str]]:
    return [sorted(map(resource_name, group)) for group in groups]


def test_equal_nvdisasm(corpus: list[Path]) -> None:
    rows = [compare(path) for path in corpus[::3]]  # nvdisasm takes long
    count = sum(row[0] for row in rows)
    compared = sum(row[0] > 0 for row in rows)
    exempt = sum((row[1] for row in rows), Counter[str]())
    different = [text for row in rows for text in row[2]]
    print(f"{count} instructions of {compared} cubins compared, exempt: {dict(exempt)}")
    assert not different, "\n".join(different[:20])
    assert compared >= 6
    assert count >= 4000
    assert exempt.total() < count / 20


def effect(opcode: str, operands: str, guard: str = "", sm: int = 90) -> tuple[set[str], set[str]]:
    """Names read and written by an instruction given as text."""
    found = effects_of(Line(0, guard, opcode, operands, None), (0x3F << 32, 0x3F), sm)
    return (
        {resource_name(access.resource) for access in found.reads},
        {resource_name(access.resource) for access in found.writes},
    )


@pytest.mark.parametrize(
    ("opcode", "operands", "reads", "writes"),
    [
        ("FFMA", "R0, R1.reuse, R2, R3", "R1 R2 R3", "R0"),
        ("IMAD.WIDE", "R4, R6, 0x4, R8", "R6 R8 R9", "R4 R5"),
        ("LDG.E.128", "R4, desc[UR6][R2.64+0x10]", "UR6 UR7 R2 R3", "R4 R5 R6 R7"),
        ("STS.64", "[R9+0x8], R4", "R9 R4 R5", ""),
        ("ISETP.GE.AND", "P0, PT, R1, R2, P3", "R1 R2 P3", "P0"),
        ("HMMA.16816.F32", "R4, R8, R12, R4", "R8 R9 R10 R11 R12 R13 R4 R5 R6 R7", "R4 R5 R6 R7"),
        ("DFMA", "R2, R4, R6, R8", "R4 R5 R6 R7 R8 R9", "R2 R3"),
        ("IADD3", "R0, P1, R2, R3, RZ", "R2 R3", "R0 P1"),
        ("FADD", "RZ, R1, RZ", "R1", ""),
        ("UTMALDG.2D", "[UR8], [UR14]", "UR8 UR9 UR10 UR11 UR14 UR15", ""),
        ("UTMALDG.2D.MULTICAST", "[UR8], [UR14], UR4", "UR4 UR8 UR9 UR10 UR11 UR14 UR15", ""),
    ],
)
def test_forms(opcode: str, operands: str, reads: str, writes: str) -> None:
    assert effect(opcode, operands) == (set(reads.split()), set(writes.split()))


def test_a_guarded_write_keeps_the_old_value() -> None:
    reads, writes = effect("MOV", "R1, R2", "!P0")
    assert reads == {"P0", "R1", "R2"}
    assert writes == {"R1"}


def test_a_never_executed_load_writes_nothing() -> None:
    assert effect("LDS", "RZ, [RZ]", "!PT") == (set(), set())


def test_an_unknown_opcode_touches_all_it_names() -> None:
    reads, writes = effect("FROBNICATE.X", "R4, UR2, P1")
    assert reads == writes == {"R4", "R5", "R6", "R7", "UR2", "UR3", "UR4", "UR5", "P1"}
