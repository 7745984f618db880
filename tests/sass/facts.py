"""Facts of a kernel that no rule had a part in, and files with other words.

The words, the control fields taken apart here by hand, basic blocks, and the registers each
instruction reads and writes (checked elsewhere against nvdisasm).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel

STALL, STAY, WRITE, READ, WAIT, REUSE = (41, 4), (45, 1), (46, 3), (49, 3), (52, 6), (58, 4)
CONTROL = ((1 << 21) - 1) << 41
NONE = 7

# Fixed-latency arithmetic: a result takes at least four cycles on Ampere and Hopper
# (arXiv 2503.20481, table 2; arXiv 2402.13499), so a reader three cycles later reads too early.
ARITHMETIC = frozenset("FFMA FADD FMUL IADD3 LOP3 IMAD SHF SEL LEA PRMT FSEL FMNMX".split())
LEAST_RESULT = 4
# Of the other opcodes with a pair below, an H200 itself keeps neighbours apart
# (bench/results/raw/spacing-h200.json).
NOT_MEASURED = frozenset("DFMA DADD DMUL DMMA HFMA2 HADD2 HMMA LDGSTS LDS LDSM LDL STL".split())
UNIFORM = frozenset("UIADD3 UIMAD ULOP3 USHF ULEA USEL UISETP".split())
SHARED = frozenset("LDS STS LDSM STSM".split())
GLOBAL = frozenset("LDG STG".split())
MEMORY = SHARED | GLOBAL
STORES = frozenset("STG STS STSM".split())

Word = tuple[int, int]


def get(high: int, part: tuple[int, int]) -> int:
    """One control field of a high word."""
    return high >> part[0] & (1 << part[1]) - 1


def put(word: Word, part: tuple[int, int], value: int) -> Word:
    """A word with one control field replaced."""
    mask = (1 << part[1]) - 1 << part[0]
    return word[0], word[1] & ~mask | value << part[0]


Make = Callable[[], bytes]


@dataclass(frozen=True)
class Mutant:
    """A changed file, made when it is asked for, and what was changed. `aliasing`: it is wrong only
    where two pointers of the kernel may lead to the same bytes."""

    make: Make
    why: str
    aliasing: bool = False

    @property
    def data(self) -> bytes:
        """The file."""
        return self.make()


@dataclass(frozen=True)
class Code:
    """One kernel's facts, and files made from changed words."""

    cubin: Cubin
    kernel: Kernel
    closest: Mapping[str, int]  # least stall between neighbours of one opcode, over the corpus

    @property
    def items(self) -> tuple[Instruction, ...]:
        """The instructions."""
        return self.kernel.instructions

    @cached_property
    def words(self) -> list[Word]:
        """The words of the original."""
        return [(item.low, item.high) for item in self.items]

    @cached_property
    def times(self) -> list[int]:
        """Issue cycles, stalls only, from the kernel's start."""
        now, times = 0, []
        for _, high in self.words:
            times.append(now)
            now += get(high, STALL)
        return times

    def field(self, index: int, part: tuple[int, int]) -> int:
        """A control field of an original instruction."""
        return get(self.words[index][1], part)

    def waited(self, index: int) -> int:
        """Scoreboards waited for: the mask, and what a DEPBAR counts down."""
        found = self.field(index, WAIT)
        item = self.items[index]
        if item.base == "DEPBAR":
            _, named, board = item.line.operands.partition("SB")
            found |= 1 << int(board[0]) if named else (1 << 6) - 1
        return found

    def file(self, words: list[Word], info: bytes | None = None) -> bytes:
        """The original file with other words (and `.nv.info` bytes)."""
        data = bytearray(self.cubin.data)
        section = self.kernel.code.text
        flat = [half for word in words for half in word]
        struct.pack_into(f"<{len(flat)}Q", data, section.offset, *flat)
        part = self.kernel.code.info
        if info is not None and part is not None:
            data[part.offset : part.offset + part.size] = info
        return bytes(data)

    def reordered(self, order: list[int], words: list[Word]) -> bytes:
        """The file with these words, which stand in another order; `.nv.info` follows."""
        place_of = {old: new for new, old in enumerate(order)}
        info = nvinfo.rewrite(
            self.kernel.info,
            lambda at: place_of[at // 16] * 16 if at // 16 in place_of and at % 16 == 0 else at,
        )
        return self.file(words, info)

    def ordered(self, order: list[int], low: int, high: int) -> bytes:
        """The file with another order, stalls of 15 around what moved."""
        words = [self.words[index] for index in order]
        for place in range(max(0, low - 1), min(len(words), high + 1)):
            words[place] = put(put(put(words[place], STALL, 15), STAY, 0), REUSE, 0)
        return self.reordered(order, words)

    def moved(self, index: int, to: int) -> Make:
        """The file with instruction `index` standing at place `to`."""

        def make() -> bytes:
            order = list(range(len(self.items)))
            order.insert(to, order.pop(index))
            return self.ordered(order, min(index, to), max(index, to))

        return make

    def exchanged(self, one: int, other: int) -> Make:
        """The file with two instructions in each other's place."""

        def make() -> bytes:
            order = list(range(len(self.items)))
            order[one], order[other] = other, one
            return self.ordered(order, one, other)

        return make

    def swapped(self, first: int, stalls: tuple[int, int]) -> Make:
        """The file with two neighbours in each other's place and these stalls, no stall raised."""

        def make() -> bytes:
            order = list(range(len(self.items)))
            order[first], order[first + 1] = first + 1, first
            words = [self.words[index] for index in order]
            for place, stall in zip((first, first + 1), stalls, strict=True):
                words[place] = put(put(words[place], STALL, stall), REUSE, 0)
            if first:
                words[first - 1] = put(words[first - 1], REUSE, 0)
            return self.reordered(order, words)

        return make

    def replaced(self, index: int, word: Word) -> Make:
        """The file with another word in one place."""

        def make() -> bytes:
            words = list(self.words)
            words[index] = word
            return self.file(words)

        return make

    def changed(self, *edits: tuple[int, tuple[int, int], int]) -> Make:
        """The file with control fields replaced: (instruction, field, value)."""

        def make() -> bytes:
            words = list(self.words)
            for index, part, value in edits:
                words[index] = put(words[index], part, value)
            return self.file(words)

        return make

    def name(self, *indices: int) -> str:
        """Instructions in words."""
        return " / ".join(str(self.items[index]) for index in indices)

    def neighbours(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Instructions that follow each other in one block, both free to move and executed."""
        for block in self.kernel.blocks:
            for first, second in pairwise(self.items[block.start : block.end]):
                if free(first) and free(second) and not disjoint(first, second):
                    yield first, second


def free(item: Instruction) -> bool:
    """Not pinned and executed at all."""
    return not item.pinned and item.line.guard != "!PT"


def disjoint(first: Instruction, second: Instruction) -> bool:
    """Complementary guards: no thread executes both."""
    one, other = first.line.guard, second.line.guard
    return bool(one and other and one != other and one.lstrip("!") == other.lstrip("!"))


def read_by(item: Instruction) -> set[int]:
    """What an instruction reads for its own sake (not to keep an old value under a guard)."""
    return {access.resource for access in item.effects.reads if access.slot not in ("old", "group")}


def read_late(item: Instruction) -> set[int]:
    """The high word of a 64-bit addend, which a product reads two cycles after the rest."""
    wide = item.line.opcode.startswith(("IMAD.WIDE", "UIMAD.WIDE"))
    return {access.resource for access in item.effects.reads if wide and access.slot == "c1"}


def written_by(item: Instruction) -> set[int]:
    """What an instruction writes."""
    return {access.resource for access in item.effects.writes if access.slot != "group"}


def registers(resources: set[int]) -> set[int]:
    """General registers only."""
    return {resource for resource in resources if resource < 256}


def fixed(code: Code, item: Instruction) -> bool:
    """Plain arithmetic whose result only distance covers."""
    return (
        item.base in ARITHMETIC
        and ".WIDE" not in item.line.opcode
        and code.field(item.index, WRITE) == NONE
    )


Mutator = Callable[[Code], Iterator[Mutant]]


def tied(one: Instruction, other: Instruction) -> bool:
    """Whether the two must keep their order for a register's sake."""
    return bool(
        written_by(one) & (read_by(other) | written_by(other)) or read_by(one) & written_by(other)
    )


def address(item: Instruction) -> set[int]:
    """The registers an address is made of."""
    return {a.resource for a in item.effects.reads if a.slot.startswith(("addr", "uaddr", "desc"))}


def spread(rows: list[Mutant], count: int) -> list[Mutant]:
    """`count` of the rows, evenly spread."""
    if len(rows) <= count:
        return rows
    return [rows[place * len(rows) // count] for place in range(count)]


def closest_neighbours(kernels: list[Kernel]) -> dict[str, int]:
    """The least stall between two neighbours of one opcode, with twenty or more pairs seen."""
    seen: dict[str, Counter[int]] = {}
    for kernel in kernels:
        for block in kernel.blocks:
            for first, second in pairwise(kernel.instructions[block.start : block.end]):
                if first.line.opcode == second.line.opcode:
                    counts = seen.setdefault(first.line.opcode, Counter())
                    counts[get(first.high, STALL)] += 1
    return {opcode: min(c) for opcode, c in seen.items() if c.total() >= 20}
