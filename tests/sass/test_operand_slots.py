"""Reuse slots against nvdisasm: what it refuses, and which operand it marks."""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from warploom import toolchain
from warploom.sass.decode import operand_slots
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import RELATIVE, Instruction, Kernel, decode_all
from warploom.sass.decode.opcodes import UNKNOWN
from warploom.sass.decode.operand_slots import SLOTS, slot_registers, slot_words

IMAGES = {80: "SM80", 90: "SM90a"}
VARIED = ("cuda_", "triton_attention_128x64", "triton_scan")
_REFUSED = re.compile(r"at address (0x[0-9a-f]+)")
_ROW = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", re.MULTILINE)
_MARKED = re.compile(r"\b(R\d+|RZ)\b[^,\s]*\.reuse")


def forms(kernels: list[Kernel]) -> list[Instruction]:
    """One instruction of each opcode with its modifiers and kinds of operands."""
    found: dict[object, Instruction] = {}
    for kernel in kernels:
        for item in kernel.instructions:
            operands = item.effects.operands
            absent = tuple(bool(o.registers) and o.registers[0].index < 0 for o in operands)
            key = (item.line.opcode, tuple(o.kind for o in operands), absent)
            if item.base not in RELATIVE and item.effects.info.name != UNKNOWN.name:
                found.setdefault(key, item)
    return list(found.values())


def word(item: Instruction, reuse: int) -> bytes:
    """The instruction with nothing but reuse hints in its control field."""
    control = Control(2, True, 7, 7, 0, reuse)
    return struct.pack("<QQ", item.low, control.encode(item.high))


def marked(items: list[Instruction], slot: int, image: str) -> dict[int, str | None]:
    """What nvdisasm marks when one reuse bit is set, by place: a register, `RZ`, None for no mark.
    What it refuses is left out."""
    tool = toolchain.find("nvdisasm")
    words = [word(item, 1 << slot) for item in items]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "words.bin"
        path.write_bytes(b"".join(words))
        refused = {int(at, 16) // 16 for at in _REFUSED.findall(tool.run("-b", image, path).stderr)}
        kept = [place for place in range(len(items)) if place not in refused]
        path.write_bytes(b"".join(words[place] for place in kept))
        rows = _ROW.findall(tool.run("-b", image, path).stdout)
    assert len(rows) == len(kept)
    marks = (_MARKED.search(row) for row in rows)
    return {place: mark and mark.group(1) for place, mark in zip(kept, marks, strict=True)}


@pytest.fixture(scope="module")
def items_of(corpus: list[Path]) -> Callable[[int], list[Instruction]]:
    """Every form of an architecture's part of the corpus."""

    @cache
    def find(sm: int) -> list[Instruction]:
        cubins = [load(path) for path in corpus if path.name.startswith(VARIED)]
        cubins = [cubin for cubin in cubins if cubin.sm == sm]
        return forms([kernel for cubin in cubins for kernel in decode_all(cubin).values()])

    return find


@pytest.mark.parametrize("sm", IMAGES)
def test_slots_are_nvdisasms(items_of: Callable[[int], list[Instruction]], sm: int) -> None:
    items = items_of(sm)
    different: list[str] = []
    slots = 0
    for slot in range(SLOTS):
        marks = marked(items, slot, IMAGES[sm])
        for place, item in enumerate(items):
            register = slot_registers(item).get(slot)
            ours = None if register is None else f"R{register}"
            theirs = marks.get(place)
            slots += ours is not None
            if ours != (None if theirs == "RZ" else theirs):
                different.append(f"slot {slot} of {item.line.text}: {ours}, nvdisasm {theirs}")
    assert not different, "\n".join(different[:20])
    assert len(items) > 200 and slots > 150


def test_a_slot_left_out_is_found(
    items_of: Callable[[int], list[Instruction]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operand_slots, "_EXCEPTIONS", {})
    with pytest.raises(AssertionError, match="MOV"):
        test_slots_are_nvdisasms(items_of, 90)


def test_wide_operands_have_all_their_words(items_of: Callable[[int], list[Instruction]]) -> None:
    words = {item.line.opcode: slot_words(item) for item in items_of(90)}
    assert [len(words["HMMA.16816.F32"][slot]) for slot in (0, 1)] == [4, 2]
    assert {len(one) for one in words["DFMA"].values()} == {2}
    assert {len(one) for one in words["FFMA"].values()} == {1}
