"""Candidates that are right by construction, from facts that no rule had a part in (`facts`).

More cycles, more waits and less operand cache can change no result. Neighbours that share no
register and reach no memory may change places once the stalls around them are raised to the most
there is. Nothing here knows a latency: where a distance matters, none becomes shorter than the
compiler made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from tests.sass.facts import (
    NONE,
    READ,
    REUSE,
    STALL,
    STAY,
    WAIT,
    WRITE,
    Code,
    Make,
    Mutant,
    Mutator,
    address,
    fixed,
    free,
    read_by,
    registers,
    tied,
    written_by,
)

from warploom.sass.decode.kernel import Block, Instruction

LONGEST_STALL: Final = 15
LONGEST_STAYING: Final = 11
WINDOW: Final = 16  # cycles after which the result of plain arithmetic is there for any reader
HOPS: Final = 12
LOADS: Final = frozenset(("LDG", "LDS", "LDSM", "LDC", "LDL"))
FAR: Final = 4  # blocks to look at beyond an edge
APART: Final = 2  # cycles that a warp keeps a unit of sixteen lanes
UNITS: Final = (
    frozenset("IADD3 LOP3 SHF SEL LEA PRMT FSEL FMNMX ISETP FSETP MOV".split()),
    frozenset(("IMAD",)),
    frozenset(("FFMA", "FADD", "FMUL")),
)
STORED: Final = frozenset(("STG", "STS", "STL"))
WIDTHS: Final = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def longer_stall(code: Code) -> Iterator[Mutant]:
    """An instruction stalls two cycles longer."""
    for item in code.items:
        stall = code.field(item.index, STALL) + 2
        if stall > LONGEST_STALL:
            continue
        edits = [(item.index, STALL, stall)]
        if stall > LONGEST_STAYING:
            edits += [(item.index, STAY, 0), (item.index, REUSE, 0)]
        yield Mutant(code.changed(*edits), code.name(item.index))


def longest_stall(code: Code) -> Iterator[Mutant]:
    """An instruction stalls for as long as it can."""
    for item in code.items:
        edits = ((STALL, LONGEST_STALL), (STAY, 0), (REUSE, 0))
        if code.field(item.index, STALL) < LONGEST_STALL:
            changed = code.changed(*((item.index, *edit) for edit in edits))
            yield Mutant(changed, code.name(item.index))


def one_more_wait(code: Code) -> Iterator[Mutant]:
    """An instruction waits for one scoreboard more, which the one before it did not just set."""
    for before, item in pairwise(code.items):
        board = item.index % 6
        sets = (code.field(before.index, WRITE), code.field(before.index, READ))
        mask = code.field(item.index, WAIT)
        takes = not item.line.opcode.startswith("WARPGROUP.DEPBAR")
        if takes and board not in sets and not mask >> board & 1:
            yield Mutant(code.changed((item.index, WAIT, mask | 1 << board)), code.name(item.index))


def cache_forgotten(code: Code) -> Iterator[Mutant]:
    """An instruction asks to keep none of its operands."""
    for item in code.items:
        if code.field(item.index, REUSE):
            yield Mutant(code.changed((item.index, REUSE, 0)), code.name(item.index))


def warp_switched(code: Code) -> Iterator[Mutant]:
    """The scheduler may take another warp after an instruction."""
    for item in code.items:
        if code.field(item.index, STAY) and code.field(item.index, STALL):
            edits = ((item.index, STAY, 0), (item.index, REUSE, 0))
            yield Mutant(code.changed(*edits), code.name(item.index))


def arithmetic_swapped(code: Code) -> Iterator[Mutant]:
    """Two arithmetic neighbours that share no register they write change places."""
    for first, second in code.neighbours():
        if _silent(code, first) and _silent(code, second) and not tied(first, second):
            data = code.moved(second.index, first.index)
            yield Mutant(data, code.name(first.index, second.index))


def arithmetic_moved(code: Code) -> Iterator[Mutant]:
    """An arithmetic instruction crosses several that it shares no written register with."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            if not _silent(code, item):
                continue
            for step in (1, -1):
                to = item.index
                for hop in range(1, HOPS + 1):
                    place = item.index + step * hop
                    if not block.start <= place < block.end:
                        break
                    other = code.items[place]
                    if not _quiet(code, other) or tied(item, other) or tied(other, item):
                        break
                    to = place
                if abs(to - item.index) > 1:
                    yield Mutant(code.moved(item.index, to), code.name(item.index, to))


def loads_swapped(code: Code) -> Iterator[Mutant]:
    """Two loads, each with a scoreboard of its own for its result, change places. Nothing counts
    down how many of them are still to come."""
    if any(item.base == "DEPBAR" for item in code.items):
        return
    for first, second in code.neighbours():
        loads = all(_plain_load(code, item) for item in (first, second))
        if loads and not tied(first, second) and not tied(second, first):
            data = code.moved(second.index, first.index)
            yield Mutant(data, code.name(first.index, second.index))


def separate_stores_swapped(code: Code) -> Iterator[Mutant]:
    """Two stores behind the same registers, to bytes that do not overlap, change places."""
    for first, second in code.neighbours():
        if first.base != second.base or first.base not in STORED:
            continue
        if address(first) != address(second) or not address(first):
            continue
        waits = code.field(first.index, WAIT) | code.field(second.index, WAIT)
        if waits or ".STRONG" in first.line.opcode or first.line.guard != second.line.guard:
            continue
        one, two = (code.field(item.index, READ) for item in (first, second))
        covered = (one == NONE) == (two == NONE)  # else the one relies on the other's scoreboard
        if covered and not set(_bytes(first)) & set(_bytes(second)):
            data = code.moved(second.index, first.index)
            yield Mutant(data, code.name(first.index, second.index))


def swapped_at_pace(code: Code) -> Iterator[Mutant]:
    """Two arithmetic neighbours change places and nothing slows down.

    Every two instructions that share a register stay as far apart as they were, or further than any
    result takes, over block edges too; two of one unit stay two cycles apart, which is how long
    sixteen lanes take for a warp.
    """
    for block in code.kernel.blocks:
        before, after = _around(code, block.index, False), _around(code, block.index, True)
        for first, second in pairwise(code.items[block.start : block.end]):
            independent = not tied(first, second) and not tied(second, first)
            both = all(_silent(code, item) and not item.line.guard for item in (first, second))
            head = code.times[first.index] - code.times[block.start]
            tail = code.times[block.end - 1] - code.times[second.index]
            edges = (head < WINDOW and _touches(second, before)) or (
                tail < WINDOW and _touches(first, after)
            )
            if edges or not (both and independent):
                continue
            data = _at_pace(code, block, first, second)
            if data is not None:
                yield Mutant(data, code.name(first.index, second.index))


def _around(code: Code, index: int, forward: bool) -> set[int]:
    """What the blocks before or after a block touch, a few blocks far."""
    found: set[int] = set()
    here, seen = {index}, {index}
    for _ in range(FAR):
        blocks = [code.kernel.blocks[number] for number in here]
        here = {n for b in blocks for n in (b.successors if forward else b.predecessors)}
        for number in here:
            block = code.kernel.blocks[number]
            for item in code.items[block.start : block.end]:
                found |= read_by(item) | written_by(item)
        here -= seen
        seen |= here
    return found


def _touches(item: Instruction, resources: set[int]) -> bool:
    return bool((read_by(item) | written_by(item)) & resources)


def _at_pace(code: Code, block: Block, first: Instruction, second: Instruction) -> Make | None:
    """The file with the two swapped, in the cycles of before; None where something comes closer."""
    start = code.times[first.index]
    total = code.field(first.index, STALL) + code.field(second.index, STALL)
    for ahead in range(1, total):
        now = {second.index: start, first.index: start + ahead}
        stalls = (ahead, total - ahead)
        if max(stalls) <= LONGEST_STAYING and not _comes_closer(code, block, now):
            return code.swapped(first.index, stalls)
    return None


def _comes_closer(code: Code, block: Block, now: dict[int, int]) -> bool:
    """Whether one of the two comes closer to something inside the block than it may."""
    times = code.times
    one, two = now
    if _one_unit(code.items[one], code.items[two]) and abs(now[one] - now[two]) < APART:
        return True
    for index, when in now.items():
        item = code.items[index]
        for other in code.items[block.start : block.end]:
            if other.index in now:
                continue
            was, will = abs(times[other.index] - times[index]), abs(times[other.index] - when)
            if will >= was or will >= WINDOW:
                continue
            crowded = _one_unit(item, other) and will < APART
            if crowded or tied(item, other) or tied(other, item):
                return True
    return False


def _one_unit(item: Instruction, other: Instruction) -> bool:
    """Whether the two may use one arithmetic unit: all do, whose units are not known to differ."""
    one, two = (next((unit for unit in UNITS if i.base in unit), None) for i in (item, other))
    if one is None or two is None:
        return item.base[0] != "U" and other.base[0] != "U"
    return one is two


def _silent(code: Code, item: Instruction) -> bool:
    """Arithmetic that waits for nothing and sets nothing."""
    return fixed(code, item) and free(item) and _quiet(code, item)


def _quiet(code: Code, item: Instruction) -> bool:
    """Arithmetic, or anything else that keeps no wait, no scoreboard and no place."""
    idle = not code.waited(item.index) and code.field(item.index, WRITE) == NONE
    return idle and code.field(item.index, READ) == NONE and fixed(code, item) and free(item)


def _plain_load(code: Code, item: Instruction) -> bool:
    own = code.field(item.index, WRITE)
    plain = ".STRONG" not in item.line.opcode and not code.field(item.index, WAIT)
    return item.base in LOADS and own != NONE and plain and free(item) and bool(_result(item))


def _result(item: Instruction) -> set[int]:
    return registers({access.resource for access in item.effects.writes})


def _bytes(item: Instruction) -> range:
    words = item.line.opcode.split(".")[1:]
    size = next((WIDTHS[word] for word in words if word in WIDTHS), 4)
    memory = [operand for operand in item.effects.operands if operand.kind.name == "MEMORY"]
    return range(memory[0].offset, memory[0].offset + size)


LEGAL: Final[tuple[Mutator, ...]] = (
    longer_stall,
    longest_stall,
    one_more_wait,
    cache_forgotten,
    warp_switched,
    arithmetic_swapped,
    arithmetic_moved,
    loads_swapped,
    separate_stores_swapped,
    swapped_at_pace,
)
