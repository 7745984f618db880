"""Wrong candidates by construction, from facts that `constraints.py` had no part in.

Facts used: the words, the control fields taken apart here by hand, basic blocks, and the registers
each instruction reads and writes (checked elsewhere against nvdisasm). A mutator yields whole
files that are wrong for one reason. Around the fault the stalls are raised to the most there is,
so that a broken distance cannot hide a missing check of order.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.edit.edit import Editor

STALL, STAY, WRITE, READ, WAIT, REUSE = (41, 4), (45, 1), (46, 3), (49, 3), (52, 6), (58, 4)
CONTROL = ((1 << 21) - 1) << 41
NONE = 7

# Fixed-latency arithmetic: a result takes at least four cycles on Ampere and Hopper
# (arXiv 2503.20481, table 2; arXiv 2402.13499), so a reader three cycles later reads too early.
ARITHMETIC = frozenset("FFMA FADD FMUL IADD3 LOP3 IMAD SHF SEL LEA PRMT FSEL FMNMX".split())
LEAST_RESULT = 4
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


@dataclass(frozen=True)
class Mutant:
    """A wrong candidate and what is wrong with it."""

    data: bytes
    why: str


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

    def ordered(self, order: list[int], low: int, high: int) -> bytes:
        """The file with another order, offsets in `.nv.info` following, stalls of 15 around it."""
        words = [self.words[index] for index in order]
        for place in range(max(0, low - 1), min(len(words), high + 1)):
            words[place] = put(put(put(words[place], STALL, 15), STAY, 0), REUSE, 0)
        place_of = {old: new for new, old in enumerate(order)}
        info = nvinfo.rewrite(
            self.kernel.info,
            lambda at: place_of[at // 16] * 16 if at // 16 in place_of and at % 16 == 0 else at,
        )
        return self.file(words, info)

    def moved(self, index: int, to: int) -> bytes:
        """The file with instruction `index` standing at place `to`."""
        order = list(range(len(self.items)))
        order.insert(to, order.pop(index))
        return self.ordered(order, min(index, to), max(index, to))

    def changed(self, *edits: tuple[int, tuple[int, int], int]) -> bytes:
        """The file with control fields replaced: (instruction, field, value)."""
        words = list(self.words)
        for index, part, value in edits:
            words[index] = put(words[index], part, value)
        return self.file(words)

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


# --- order of registers -----------------------------------------------------------------------


def swap_raw(code: Code) -> Iterator[Mutant]:
    """A reader changes places with the writer just before it: it reads the old value."""
    for first, second in code.neighbours():
        if written_by(first) & read_by(second):
            yield Mutant(code.moved(second.index, first.index), code.name(first.index))


def swap_war(code: Code) -> Iterator[Mutant]:
    """A writer changes places with the reader just before it: the new value is read."""
    for first, second in code.neighbours():
        if read_by(first) & written_by(second) and not written_by(first) & read_by(second):
            yield Mutant(code.moved(second.index, first.index), code.name(first.index))


def swap_waw(code: Code) -> Iterator[Mutant]:
    """A write goes before an earlier write of the register; a later reader gets the older value."""
    for block in code.kernel.blocks:
        last: dict[int, int] = {}
        for item in code.items[block.start : block.end]:
            for resource in sorted(registers(written_by(item))):
                earlier = last.get(resource)
                if earlier is not None and free(item) and free(code.items[earlier]):
                    used = _read_before_overwritten(code, block, item.index, resource)
                    if used and not disjoint(code.items[earlier], item):
                        yield Mutant(code.moved(item.index, earlier), code.name(earlier))
                        break
            last |= dict.fromkeys(written_by(item), item.index)


def _read_before_overwritten(code: Code, block: Block, index: int, resource: int) -> bool:
    for item in code.items[index + 1 : block.end]:
        if resource in read_by(item):
            return True
        if resource in written_by(item):
            return False
    return False


# --- distances --------------------------------------------------------------------------------


def _early_reads(code: Code, across: bool) -> Iterator[tuple[int, int]]:
    """(writer, reader) of an arithmetic result, at most eight apart, nothing waiting between."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            if not fixed(code, item) or item.line.guard:
                continue
            wanted = registers(written_by(item))
            for other in code.items[item.index + 1 : item.index + 9]:
                inside = other.index < block.end
                if not inside and block.index + 1 not in block.successors:
                    break
                if wanted & read_by(other) and other.line.guard != "!PT":
                    if wanted & read_late(other):
                        break
                    if inside != across:
                        yield item.index, other.index
                    break
                if wanted & written_by(other):
                    break


def _at_three(code: Code, across: bool) -> Iterator[Mutant]:
    for writer, reader in _early_reads(code, across):
        count = reader - writer
        distance = code.times[reader] - code.times[writer]
        if count > LEAST_RESULT - 1 or distance < LEAST_RESULT:
            continue
        edits = [(index, STALL, 1) for index in range(writer, reader)]
        edits[0] = (writer, STALL, LEAST_RESULT - count)
        stays = [(index, STAY, 1) for index in range(writer, reader)]
        yield Mutant(code.changed(*edits, *stays), code.name(writer, reader))


def read_three_cycles_later(code: Code) -> Iterator[Mutant]:
    """An arithmetic result is read three cycles after its issue; it takes four or more."""
    yield from _at_three(code, across=False)


def read_too_early_in_next_block(code: Code) -> Iterator[Mutant]:
    """As above, the reader being in the block that control falls through to."""
    yield from _at_three(code, across=True)


def zero_stall(code: Code) -> Iterator[Mutant]:
    """A writer and its reader issue in the same cycle."""
    for writer, reader in _early_reads(code, across=False):
        if reader == writer + 1:
            yield Mutant(code.changed((writer, STALL, 0), (writer, STAY, 0)), code.name(writer))


def crowded_pipe(code: Code) -> Iterator[Mutant]:
    """Two neighbours of one opcode in consecutive cycles, where no compiler output has fewer than
    two between that opcode and itself."""
    for first, second in code.neighbours():
        if first.line.opcode == second.line.opcode and code.closest.get(first.line.opcode, 0) >= 2:
            edits = ((first.index, STALL, 1), (first.index, STAY, 1))
            yield Mutant(code.changed(*edits), code.name(first.index, second.index))


def shared_access_after_barrier(code: Code) -> Iterator[Mutant]:
    """A shared access in the cycle after a BAR; compilers leave six or more (H200: stale data)."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end - 1]:
            after = code.items[item.index + 1]
            if item.base == "BAR" and after.base in SHARED and code.field(item.index, STALL) > 1:
                yield Mutant(code.changed((item.index, STALL, 1)), code.name(item.index))


# --- scoreboards ------------------------------------------------------------------------------


def _only_waits(code: Code, part: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """(producer, consumer, scoreboard): the consumer's one wait is the first of any since.

    `part` WRITE: the consumer reads or overwrites a result; READ: it overwrites a source.
    """
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            board = code.field(item.index, part)
            if board == NONE or item.line.guard == "!PT":
                continue
            held = registers(written_by(item) if part == WRITE else read_by(item))
            for other in code.items[item.index + 1 : block.end]:
                touched = written_by(other) | (read_by(other) if part == WRITE else set())
                mask = code.waited(other.index)
                if held & touched and mask == 1 << board == code.field(other.index, WAIT):
                    if not disjoint(item, other):
                        yield item.index, other.index, board
                    break
                if mask or held & touched:
                    break


def drop_result_wait(code: Code) -> Iterator[Mutant]:
    """The only wait between a load and the use of its result is dropped."""
    for producer, consumer, _ in _only_waits(code, WRITE):
        yield Mutant(code.changed((consumer, WAIT, 0)), code.name(producer, consumer))


def drop_source_wait(code: Code) -> Iterator[Mutant]:
    """The only wait between an instruction that reads late and the overwriting of its source."""
    for producer, consumer, _ in _only_waits(code, READ):
        yield Mutant(code.changed((consumer, WAIT, 0)), code.name(producer, consumer))


def other_scoreboard_set(code: Code) -> Iterator[Mutant]:
    """The producer sets another scoreboard than the one its consumer waits for."""
    for producer, consumer, board in _only_waits(code, WRITE):
        edit = (producer, WRITE, (board + 1) % 6)
        yield Mutant(code.changed(edit), code.name(producer, consumer))


def other_scoreboard_awaited(code: Code) -> Iterator[Mutant]:
    """The consumer waits for another scoreboard than the one its producer sets."""
    for producer, consumer, board in _only_waits(code, WRITE):
        edit = (consumer, WAIT, 1 << (board + 1) % 6)
        yield Mutant(code.changed(edit), code.name(producer, consumer))


def no_scoreboard_set(code: Code) -> Iterator[Mutant]:
    """The producer sets none."""
    for producer, consumer, _ in _only_waits(code, WRITE):
        yield Mutant(code.changed((producer, WRITE, NONE)), code.name(producer, consumer))


def waited_in_next_cycle(code: Code) -> Iterator[Mutant]:
    """The consumer waits one cycle after the producer issued: the count is not up yet."""
    for producer, consumer, _ in _only_waits(code, WRITE):
        if consumer == producer + 1 and code.field(producer, STALL) > 1:
            edits = ((producer, STALL, 1), (producer, STAY, 1))
            yield Mutant(code.changed(*edits), code.name(producer, consumer))


def _inherited(code: Code) -> Iterator[tuple[int, int, int]]:
    """(producer, waiter, user): the producer's block ends with no wait for its scoreboard; the
    next block's first wait of any kind is for it, and a result is used there at once or later."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            board = code.field(item.index, WRITE)
            rest = code.items[item.index + 1 : block.end]
            results = registers(written_by(item))
            if board == NONE or not results or item.line.guard == "!PT":
                continue
            if any(code.waited(o.index) or results & written_by(o) for o in rest):
                continue
            for successor in block.successors:
                following = code.kernel.blocks[successor]
                if successor == block.index:
                    continue
                waiter = None
                for other in code.items[following.start : following.end]:
                    mask = code.waited(other.index)
                    if waiter is None and mask:
                        if mask != 1 << board or code.field(other.index, WAIT) != mask:
                            break
                        waiter = other.index
                    if waiter is not None and results & read_by(other):
                        yield item.index, waiter, other.index
                    if results & written_by(other):
                        break


def drop_inherited_wait(code: Code) -> Iterator[Mutant]:
    """The wait for a load of the block before is dropped, and nothing waits before the use."""
    for producer, waiter, user in _inherited(code):
        if all(not code.waited(index) for index in range(waiter + 1, user + 1)):
            yield Mutant(code.changed((waiter, WAIT, 0)), code.name(producer, waiter, user))


def use_above_inherited_wait(code: Code) -> Iterator[Mutant]:
    """A use of the block before's load and the instruction that waits for it change their order."""
    for producer, waiter, user in _inherited(code):
        if user == waiter or code.waited(user):
            continue
        name = code.name(producer, waiter, user)
        if _passes(code, user, code.items[waiter:user]):
            yield Mutant(code.moved(user, waiter), name)
        if _passes(code, waiter, code.items[waiter + 1 : user + 1]):
            yield Mutant(code.moved(waiter, user), name)


def _passes(code: Code, index: int, others: Sequence[Instruction]) -> bool:
    """Whether registers let an instruction change places with all of these."""
    here = code.items[index]
    return free(here) and not any(
        written_by(o) & (read_by(here) | written_by(here)) or read_by(o) & written_by(here)
        for o in others
    )


# --- memory and synchronisation ---------------------------------------------------------------


def _across(
    code: Code, wall: Callable[[Instruction], bool], movers: frozenset[str]
) -> Iterator[Mutant]:
    """Moves of the nearest memory operation to the other side of a wall, registers allowing."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            if not wall(item):
                continue
            for step, stop in ((1, block.end), (-1, block.start - 1)):
                passed = {item.index}
                for place in range(item.index + step, stop, step):
                    other = code.items[place]
                    if other.base in movers and free(other):
                        apart = item.base in STORES and _address(item) == _address(other)
                        tied = any(_tied(code.items[index], other) for index in passed)
                        if not tied and not apart:
                            yield Mutant(
                                code.moved(place, item.index), code.name(item.index, place)
                            )
                        break
                    passed.add(place)


def _tied(one: Instruction, other: Instruction) -> bool:
    return bool(
        written_by(one) & (read_by(other) | written_by(other)) or read_by(one) & written_by(other)
    )


def shared_across_barrier(code: Code) -> Iterator[Mutant]:
    """A shared-memory access changes sides of a BAR."""
    yield from _across(code, lambda item: item.base == "BAR", SHARED)


def copy_across_its_commit(code: Code) -> Iterator[Mutant]:
    """An LDGSTS leaves its group by crossing LDGDEPBAR, or its wait by crossing DEPBAR."""
    wall = frozenset(("LDGDEPBAR", "DEPBAR"))
    yield from _across(code, lambda item: item.base in wall, frozenset(("LDGSTS",)))


def global_across_atomic(code: Code) -> Iterator[Mutant]:
    """A global access changes sides of an atomic, a fence or a strong access."""
    yield from _across(
        code,
        lambda item: (
            item.base in ("MEMBAR", "ATOMG", "RED", "ATOM") or ".STRONG" in item.line.opcode
        ),
        GLOBAL,
    )


def copy_across_pad(code: Code) -> Iterator[Mutant]:
    """An LDGSTS crosses the never-executed load the compiler puts before it."""
    yield from _across(
        code,
        lambda item: item.line.guard == "!PT" and item.base.startswith("LD"),
        frozenset(("LDGSTS",)),
    )


def swap_copies(code: Code) -> Iterator[Mutant]:
    """Two LDGSTS change places: which of them lands last in shared memory changes."""
    yield from _across(code, lambda item: item.base == "LDGSTS", frozenset(("LDGSTS",)))


def swap_stores(code: Code) -> Iterator[Mutant]:
    """Two stores to one space whose addresses come from different registers, or overlap."""
    for first, second in code.neighbours():
        if first.base == second.base and first.base in STORES and not _tied(first, second):
            one, other = (_address(item) for item in (first, second))
            if one != other:
                yield Mutant(code.moved(second.index, first.index), code.name(first.index))


def load_above_store(code: Code) -> Iterator[Mutant]:
    """A load of the space changes sides of a store, whose address is not known to differ."""
    for store, loads in (("STS", ("LDS", "LDSM")), ("STG", ("LDG",))):
        yield from _across(code, lambda item, base=store: item.base == base, frozenset(loads))


def _address(item: Instruction) -> set[int]:
    return {a.resource for a in item.effects.reads if a.slot.startswith(("addr", "uaddr", "desc"))}


def _group_uses(code: Code, part: Callable[[Instruction], set[int]]) -> Iterator[tuple[int, int]]:
    """(DEPBAR of no groups left, first later instruction whose `part` names a group register)."""
    for block in code.kernel.blocks:
        items = code.items[block.start : block.end]
        for item in items:
            if not item.line.opcode.startswith("WARPGROUP.DEPBAR"):
                continue
            if not item.line.operands.endswith("0x0"):
                continue
            held = {
                access.resource
                for other in code.items
                if other.base in ("HGMMA", "QGMMA") and other.index < item.index
                for access in (*other.effects.reads, *other.effects.writes)
                if access.resource < 256
            }
            found = 0
            passed: list[Instruction] = []
            for other in items[item.index - block.start + 1 :]:
                tied = any(_tied(before, other) for before in passed)
                if held & part(other) and free(other) and not tied and other.base != "HGMMA":
                    yield item.index, other.index
                    found += 1
                passed.append(other)
                if found == 3:
                    break


def result_read_in_flight(code: Code) -> Iterator[Mutant]:
    """An accumulator is read above the WARPGROUP.DEPBAR that retires its HGMMA."""
    for wait, user in _group_uses(code, read_by):
        yield Mutant(code.moved(user, wait), code.name(wait, user))


def group_register_written_in_flight(code: Code) -> Iterator[Mutant]:
    """A register of an HGMMA (A operand or accumulator) is written above its DEPBAR."""
    for wait, user in _group_uses(code, written_by):
        yield Mutant(code.moved(user, wait), code.name(wait, user))


# --- encoding and file ------------------------------------------------------------------------


def wait_where_none_is_defined(code: Code) -> Iterator[Mutant]:
    """A WARPGROUP.DEPBAR gets a wait mask; nvdisasm refuses such a word."""
    for item in code.items:
        if item.line.opcode.startswith("WARPGROUP.DEPBAR"):
            yield Mutant(code.changed((item.index, WAIT, 2)), code.name(item.index))


def reuse_without_stay(code: Code) -> Iterator[Mutant]:
    """A reuse hint while the warp may be switched (rule L2)."""
    for item in code.items:
        if code.field(item.index, REUSE) and code.field(item.index, STAY):
            yield Mutant(code.changed((item.index, STAY, 0)), code.name(item.index))


def long_stall_staying(code: Code) -> Iterator[Mutant]:
    """A stall of 12 with stay (rule L1)."""
    for item in code.items:
        if code.field(item.index, STAY) and free(item):
            yield Mutant(code.changed((item.index, STALL, 12)), code.name(item.index))


def reuse_of_rewritten(code: Code) -> Iterator[Mutant]:
    """The operand cache keeps a register that is rewritten before the cache is asked for it.

    The first reads R in its first slot and asks to keep it, a later one writes R, another reads R
    in that slot; nothing between them reads a register of R's bank in that slot (which would
    displace it: arXiv 2503.20481, section 5.3).
    """
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            register = _first_slot(code, item)
            if register is None or register in written_by(item) or not free(item):
                continue
            rewritten = False
            for other in code.items[item.index + 1 : min(item.index + 8, block.end)]:
                asked = _first_slot(code, other)
                if rewritten and asked == register:
                    stall = min(max(1, code.field(item.index, STALL)), 11)
                    edits = ((REUSE, 1), (STAY, 1), (STALL, stall))
                    changed = code.changed(*((item.index, *edit) for edit in edits))
                    yield Mutant(changed, code.name(item.index, other.index))
                if not fixed(code, other) or (asked is not None and asked % 2 == register % 2):
                    break
                rewritten = rewritten or register in written_by(other)


def _asks_to_keep(code: Code, item: Instruction) -> bytes:
    """The file in which `item` keeps its first source."""
    stall = min(max(1, code.field(item.index, STALL)), 11)
    edits = ((REUSE, 1), (STAY, 1), (STALL, stall))
    return code.changed(*((item.index, *edit) for edit in edits))


def reuse_of_own_result(code: Code) -> Iterator[Mutant]:
    """An instruction keeps the register it overwrites, and the next to ask for it gets the old."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            register = _first_slot(code, item)
            kept = code.field(item.index, REUSE) & 1
            if not kept and register is not None and register in written_by(item) and free(item):
                yield Mutant(_asks_to_keep(code, item), code.name(item.index))


def reuse_over_edge(code: Code) -> Iterator[Mutant]:
    """The last to read a slot and bank in its block asks to keep the register: what comes after
    the block may have written it anew."""
    for block in code.kernel.blocks:
        for item in code.items[max(block.start, block.end - 6) : block.end]:
            register = _first_slot(code, item)
            if register is None or not free(item) or register in written_by(item):
                continue
            if code.field(item.index, REUSE) & 1:
                continue
            rest = code.items[item.index + 1 : block.end]
            asked = [_first_slot(code, other) for other in rest]
            displaced = any(one is not None and one % 2 == register % 2 for one in asked)
            unknown = any(not fixed(code, other) and not _opens_no_slot(other) for other in rest)
            if not displaced and not unknown:
                yield Mutant(_asks_to_keep(code, item), code.name(item.index))


def _opens_no_slot(item: Instruction) -> bool:
    return item.base in ("BRA", "EXIT", "WARPSYNC", "NOP", "BAR", *MEMORY)


def _first_slot(code: Code, item: Instruction) -> int | None:
    """The register an arithmetic instruction reads in its first source slot."""
    register = item.low >> 24 & 0xFF
    named = any(
        operand.registers[:1]
        and operand.registers[0].index == register
        and operand.registers[0].file == "R"
        for operand in item.effects.operands
    )
    return register if fixed(code, item) and named and register in read_by(item) else None


def swap_across_blocks(code: Code) -> Iterator[Mutant]:
    """The last movable instruction of a block changes places with the first of the next."""
    for block, following in pairwise(code.kernel.blocks):
        above = [i for i in code.items[block.start : block.end] if free(i)]
        below = [i for i in code.items[following.start : following.end] if free(i)]
        if above and below and above[-1].identity != below[0].identity:
            order = list(range(len(code.items)))
            one, other = above[-1].index, below[0].index
            order[one], order[other] = other, one
            yield Mutant(code.ordered(order, one, other), code.name(one, other))


def move_branch(code: Code) -> Iterator[Mutant]:
    """A branch, exit or other fixed instruction changes places with its neighbour."""
    for block in code.kernel.blocks:
        last = code.items[block.end - 1]
        before = code.items[block.end - 2]
        if block.size > 1 and last.base in ("BRA", "EXIT", "BSYNC", "RET") and free(before):
            yield Mutant(code.moved(last.index, before.index), code.name(before.index, last.index))


def flip_operand_bit(code: Code) -> Iterator[Mutant]:
    """One bit outside the control field changes: another instruction."""
    for item in code.items:
        if free(item):
            bit = item.index * 37 % 105
            low, high = item.low, item.high
            word = (low ^ 1 << bit, high) if bit < 64 else (low, high ^ 1 << bit - 64)
            words = list(code.words)
            words[item.index] = word
            yield Mutant(code.file(words), f"bit {bit} of {item}")


def repeat_instruction(code: Code) -> Iterator[Mutant]:
    """An instruction is replaced by a copy of its neighbour."""
    for first, second in code.neighbours():
        if first.identity != second.identity:
            words = list(code.words)
            words[second.index] = words[first.index]
            yield Mutant(code.file(words), code.name(first.index, second.index))


def flip_other_byte(code: Code) -> Iterator[Mutant]:
    """A byte outside code and `.nv.info` changes (header excepted: no longer a cubin)."""
    section = code.kernel.code.text
    spots = (section.offset - 1, section.offset + section.size, 64, len(code.cubin.data) - 9)
    part = code.kernel.code.info
    for spot in spots:
        if part is not None and part.offset <= spot < part.offset + part.size:
            continue
        data = bytearray(code.file(code.words))
        data[spot] ^= 0x40
        yield Mutant(bytes(data), f"byte {spot:#x}")


def stale_info(code: Code) -> Iterator[Mutant]:
    """An instruction `.nv.info` names moves (legally) and the table keeps the old place."""
    editor = Editor(code.cubin, code.kernel.name)
    for offset in sorted(nvinfo.rewritten_offsets(code.kernel.info)):
        index = offset // 16
        first, last = editor.window(index, 1)
        block, here = editor.position(index)
        for to in {first, last} - {here}:
            before = editor.states[block], editor.controls(block)
            editor.move(index, to)
            assert editor.info() != code.kernel.info
            yield Mutant(code.file(editor.words()), code.name(index))
            editor.restore(block, *before)


def damaged_info(code: Code) -> Iterator[Mutant]:
    """A byte of the kernel's `.nv.info` changes."""
    info = bytearray(code.kernel.info)
    for spot in range(4, len(info), 11):
        info[spot] ^= 0x10
        yield Mutant(code.file(code.words, bytes(info)), f".nv.info byte {spot}")
        info[spot] ^= 0x10


# Each mutator with the rules of which at least one must be among the findings. A refusal for
# another reason alone would hide that the rule itself is missing.
_ORDER = frozenset(("REGISTER_ORDER",))
_TIME = frozenset(("LATENCY", "OWN_STALL"))
_WAITS = frozenset(("WAIT", "INHERITED_WAIT", "WAIT_BEFORE_EXIT"))
_SYNC = frozenset(("SYNC_ORDER",))
_FILE = frozenset(("CONTAINER", "NV_INFO"))

MUTATORS: dict[Mutator, frozenset[str]] = {
    swap_raw: _ORDER,
    swap_war: _ORDER,
    swap_waw: _ORDER,
    read_three_cycles_later: _TIME,
    read_too_early_in_next_block: frozenset(
        ("LATENCY_ACROSS_BLOCKS", "BLOCK_DURATION", "OWN_STALL")
    ),
    zero_stall: _TIME,
    crowded_pipe: frozenset(("PIPE_SPACING", "LATENCY", "OWN_STALL")),
    shared_access_after_barrier: frozenset(("SYNC_DISTANCE",)),
    drop_result_wait: _WAITS,
    drop_source_wait: _WAITS,
    other_scoreboard_set: frozenset(("SCOREBOARD",)),
    other_scoreboard_awaited: _WAITS,
    no_scoreboard_set: frozenset(("SCOREBOARD",)),
    waited_in_next_cycle: frozenset(("SCOREBOARD_VISIBLE",)),
    drop_inherited_wait: _WAITS,
    use_above_inherited_wait: _WAITS,
    shared_across_barrier: _SYNC,
    copy_across_its_commit: _SYNC | frozenset(("PINNED",)),
    global_across_atomic: _SYNC,
    copy_across_pad: _SYNC,
    swap_copies: frozenset(("MEMORY_ORDER",)),
    swap_stores: frozenset(("MEMORY_ORDER",)),
    load_above_store: frozenset(("MEMORY_ORDER",)),
    result_read_in_flight: _ORDER,
    group_register_written_in_flight: _ORDER,
    wait_where_none_is_defined: frozenset(("CONTROL_WAIT",)),
    reuse_without_stay: frozenset(("CONTROL_L2",)),
    long_stall_staying: frozenset(("CONTROL_L1",)),
    reuse_of_rewritten: frozenset(("REUSE",)),
    reuse_of_own_result: frozenset(("REUSE",)),
    reuse_over_edge: frozenset(("REUSE",)),
    swap_across_blocks: frozenset(("MULTISET",)),
    move_branch: frozenset(("PINNED", "MULTISET")),
    flip_operand_bit: frozenset(("MULTISET",)),
    repeat_instruction: frozenset(("MULTISET",)),
    flip_other_byte: _FILE,
    stale_info: frozenset(("NV_INFO",)),
    damaged_info: frozenset(("NV_INFO", "CONTAINER")),
}


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
