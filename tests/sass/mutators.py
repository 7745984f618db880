"""Wrong candidates by construction, from facts that `constraints.py` had no part in (`facts`).

A mutator yields whole files that are wrong for one reason. Around the fault the stalls are raised
to the most there is, so that a broken distance cannot hide a missing check of order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from tests.sass.facts import (
    GLOBAL,
    LEAST_RESULT,
    MEMORY,
    NONE,
    NOT_MEASURED,
    READ,
    REUSE,
    SHARED,
    STALL,
    STAY,
    STORES,
    UNIFORM,
    WAIT,
    WRITE,
    Code,
    Make,
    Mutant,
    Mutator,
    address,
    disjoint,
    fixed,
    free,
    read_by,
    read_late,
    registers,
    tied,
    written_by,
)

from warploom.sass.decode import nvinfo
from warploom.sass.decode.kernel import Block, Instruction
from warploom.sass.edit.edit import Editor

# --- order of registers -----------------------------------------------------------------------


def swap_raw(code: Code) -> Iterator[Mutant]:
    """A reader changes places with the writer just before it: it reads the old value."""
    for first, second in code.neighbours():
        if written_by(first) & read_by(second) and first.identity != second.identity:
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
                    if code.items[earlier].identity == item.identity:
                        continue
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
    two between that opcode and itself, and the hardware was not measured to keep them apart."""
    for first, second in code.neighbours():
        known = code.kernel.sm == 90 and first.base not in NOT_MEASURED
        same = first.line.opcode == second.line.opcode
        if same and not known and code.closest.get(first.line.opcode, 0) >= 2:
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
                        apart = item.base in STORES and address(item) == address(other)
                        bound = any(tied(code.items[index], other) for index in passed)
                        if not bound and not apart:
                            pointers = {item.base, other.base} == {"LDG", "STG"}
                            yield Mutant(
                                code.moved(place, item.index),
                                code.name(item.index, place),
                                pointers and ".STRONG" not in item.line.opcode,
                            )
                        break
                    passed.add(place)


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
        if first.base == second.base and first.base in STORES and not tied(first, second):
            one, other = (address(item) for item in (first, second))
            if one != other:
                name = code.name(first.index)
                yield Mutant(code.moved(second.index, first.index), name, first.base == "STG")


def load_above_store(code: Code) -> Iterator[Mutant]:
    """A load of the space changes sides of a store, whose address is not known to differ."""
    for store, loads in (("STS", ("LDS", "LDSM")), ("STG", ("LDG",))):
        yield from _across(code, lambda item, base=store: item.base == base, frozenset(loads))


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
                bound = any(tied(before, other) for before in passed)
                if held & part(other) and free(other) and not bound and other.base != "HGMMA":
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


# --- more of each -----------------------------------------------------------------------------


def uniform_read_early(code: Code) -> Iterator[Mutant]:
    """A result of the uniform datapath is read by an arithmetic unit in the next cycle; even the
    datapath itself takes two (arXiv 2503.20481: uniform results come later than vector ones)."""
    for block in code.kernel.blocks:
        for first, second in pairwise(code.items[block.start : block.end]):
            reads = written_by(first) & read_by(second)
            plain = first.base in UNIFORM and not first.line.guard and not second.line.guard
            if plain and reads and fixed(code, second) and code.field(first.index, STALL) > 1:
                edits = ((first.index, STALL, 1), (first.index, STAY, 1))
                yield Mutant(code.changed(*edits), code.name(first.index, second.index))


def carry_in_next_cycle(code: Code) -> Iterator[Mutant]:
    """Two additions of the uniform datapath that make a carry, in consecutive cycles: on an H200
    the second gave a wrong result."""
    for first, second in code.neighbours():
        carries = all(
            item.base == "UIADD3" and "UP" in item.line.operands for item in (first, second)
        )
        if carries and not tied(first, second) and code.field(first.index, STALL) > 1:
            edits = ((first.index, STALL, 1), (first.index, STAY, 1))
            yield Mutant(code.changed(*edits), code.name(first.index, second.index))


def guard_in_next_cycles(code: Code) -> Iterator[Mutant]:
    """A predicate guards an instruction less than four cycles after the comparison that makes it,
    which takes as long as any arithmetic result."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            if item.base not in ("ISETP", "FSETP") or item.line.guard:
                continue
            made = written_by(item)
            for other in code.items[item.index + 1 : min(item.index + LEAST_RESULT, block.end)]:
                guards = {a.resource for a in other.effects.reads if a.slot == "guard"}
                distance = code.times[other.index] - code.times[item.index]
                if made & guards and distance >= LEAST_RESULT:
                    span = range(item.index, other.index)
                    edits = [(index, STALL, 1) for index in span]
                    stays = [(index, STAY, 1) for index in span]
                    yield Mutant(code.changed(*edits, *stays), code.name(item.index, other.index))
                if made & guards:
                    break


def matrix_chain_early(code: Code) -> Iterator[Mutant]:
    """A matrix product adds to the accumulator of the one just before after at most eight cycles;
    the chain takes 24 and more (published for HMMA of Ampere and Hopper)."""
    for block in code.kernel.blocks:
        items = code.items[block.start : block.end]
        for first in items:
            if first.base != "HMMA":
                continue
            for second in code.items[first.index + 1 : min(first.index + 8, block.end)]:
                if second.base == "HMMA" and written_by(first) & read_by(second):
                    span = range(first.index, second.index)
                    if any(code.field(index, STALL) > 1 for index in span):
                        edits = [(index, STALL, 1) for index in span]
                        stays = [(index, STAY, 1) for index in span]
                        name = code.name(first.index, second.index)
                        yield Mutant(code.changed(*edits, *stays), name)
                    break


def use_above_wait(code: Code) -> Iterator[Mutant]:
    """An instruction that uses a load without a wait of its own goes above the one that waits."""
    for block in code.kernel.blocks:
        for item in code.items[block.start : block.end]:
            board, results = code.field(item.index, WRITE), registers(written_by(item))
            if board == NONE or not results or item.line.guard == "!PT":
                continue
            waiter: int | None = None
            for other in code.items[item.index + 1 : block.end]:
                mask = code.waited(other.index)
                if waiter is None and mask:
                    if not mask >> board & 1:
                        continue
                    waiter = other.index
                elif waiter is not None and results & read_by(other):
                    between = code.items[waiter : other.index]
                    if not mask and _passes(code, other.index, between):
                        data = code.moved(other.index, waiter)
                        yield Mutant(data, code.name(item.index, waiter, other.index))
                    break
                if results & written_by(other):
                    break


def sync_loses_wait(code: Code) -> Iterator[Mutant]:
    """A barrier or fence no longer waits for the loads and stores before it."""
    for item in code.items:
        if item.base in ("BAR", "MEMBAR", "FENCE", "ERRBAR") and code.field(item.index, WAIT):
            yield Mutant(code.changed((item.index, WAIT, 0)), code.name(item.index))


def wait_above_its_commit(code: Code) -> Iterator[Mutant]:
    """The wait for groups of copies goes above the commit of the last one: it counts one fewer."""
    for block in code.kernel.blocks:
        commit: int | None = None
        for item in code.items[block.start : block.end]:
            if item.base == "LDGDEPBAR":
                commit = item.index
            elif item.base == "DEPBAR" and commit is not None:
                yield Mutant(code.moved(item.index, commit), code.name(commit, item.index))
                commit = None


def setter_above_earlier_wait(code: Code) -> Iterator[Mutant]:
    """A load goes above the instruction that waits for the load before it on the same scoreboard
    with one wait for both, so that a use of its own result is behind no wait any more."""
    for producer, consumer, _ in _only_waits(code, WRITE):
        if consumer == producer + 1 and free(code.items[producer]) and free(code.items[consumer]):
            data = code.moved(consumer, producer)
            yield Mutant(data, code.name(producer, consumer))


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


def _asks_to_keep(code: Code, item: Instruction) -> Make:
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
            one, other = above[-1].index, below[0].index
            yield Mutant(code.exchanged(one, other), code.name(one, other))


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
            yield Mutant(code.replaced(item.index, word), f"bit {bit} of {item}")


def repeat_instruction(code: Code) -> Iterator[Mutant]:
    """An instruction is replaced by a copy of its neighbour."""
    for first, second in code.neighbours():
        if first.identity != second.identity:
            copied = code.replaced(second.index, code.words[first.index])
            yield Mutant(copied, code.name(first.index, second.index))


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
        yield Mutant(partial(bytes, data), f"byte {spot:#x}")


def stale_info(code: Code) -> Iterator[Mutant]:
    """An instruction `.nv.info` names moves (legally) and the table keeps the old place."""
    editor = Editor(code.cubin, code.kernel.name)
    for offset in sorted(nvinfo.rewritten_offsets(code.kernel.info)):
        index = offset // 16
        for to in {*editor.window(index, 1)} - {editor.position(index)[1]}:
            yield Mutant(partial(_moved, code, editor, index, to), code.name(index))


def _moved(code: Code, editor: Editor, index: int, to: int) -> bytes:
    """The file after one move, without what the move changes in `.nv.info`."""
    block, _ = editor.position(index)
    before = editor.states[block], editor.controls(block)
    editor.move(index, to)
    assert editor.info() != code.kernel.info
    made = code.file(editor.words())
    editor.restore(block, *before)
    return made


def damaged_info(code: Code) -> Iterator[Mutant]:
    """A byte of the kernel's `.nv.info` changes."""
    info = bytearray(code.kernel.info)
    for spot in range(4, len(info), 11):
        info[spot] ^= 0x10
        yield Mutant(partial(code.file, code.words, bytes(info)), f".nv.info byte {spot}")
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
    uniform_read_early: _TIME,
    carry_in_next_cycle: frozenset(("PIPE_SPACING", "LATENCY", "OWN_STALL")),
    guard_in_next_cycles: _TIME,
    matrix_chain_early: _TIME,
    use_above_wait: _WAITS,
    sync_loses_wait: _WAITS,
    wait_above_its_commit: _SYNC | frozenset(("PINNED", "SCOREBOARD_ORDER")),
    setter_above_earlier_wait: _ORDER,
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
