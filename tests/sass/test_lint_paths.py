"""`sass lint` beside a search through all paths, on kernels with random fields and registers.

The dataflow of `lint` goes to a fixed point with sets that are joined where paths meet. Here every
path is walked by itself, and each pair of instructions on it is judged by what the rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.opcodes import UNKNOWN, Order, Pipe
from warploom.sass.decode.operand_slots import SLOT_NAMES, slot_words
from warploom.sass.decode.resources import Access, resource_name
from warploom.sass.flow.dependence import Dependence, Hazard
from warploom.sass.flow.distances import exclusive, key_of
from warploom.sass.flow.latency import table_for
from warploom.sass.flow.minima import least
from warploom.sass.flow.paths import Place, following
from warploom.sass.flow.scoreboard import protected_sources, waited_scoreboards
from warploom.sass.rules.lint import lint

NO_BOARD = 7
KERNELS = 12
PLAIN = ("FFMA", "FADD", "FMUL", "IADD3", "MOV", "F2FP")
Found = set[tuple[str, int, str, str]]


@pytest.fixture(scope="module")
def bases(kernels_of: Callable[[str], list[Kernel]]) -> list[Kernel]:
    names = ("cuda_reduce_sm90a", "cuda_cluster_sm90a")
    found = [kernel for name in names for kernel in kernels_of(name)]
    return [kernel for kernel in found if len(kernel.blocks) > 3 and len(ways(kernel)) < 40]


def ways(kernel: Kernel) -> list[tuple[int, ...]]:
    """The instructions of every path that goes to each place at most twice, in order."""
    found: list[tuple[int, ...]] = []

    def walk(path: tuple[Place, ...]) -> None:
        if len(found) > 100:
            return
        further = [place for place in following(kernel, path[-1]) if path.count(place) < 2]
        for place in further:
            walk((*path, place))
        if not further:
            blocks = [kernel.blocks[place.block] for place in path]
            found.append(tuple(i for b in blocks for i in range(b.start, b.end)))

    walk((Place(0),))
    return found


def scrambled(kernel: Kernel, seed: int, few: int) -> Kernel:
    """The kernel with random scoreboards, waits and kept operands, on registers of which there are
    `few`."""
    random, items = Random(f"{kernel.name} {seed}"), []
    for item in kernel.instructions:
        control = item.control
        if random.random() < 0.5:
            control = replace(
                control,
                write_sb=random.choice((0, 1, 2, NO_BOARD)),
                read_sb=random.choice((0, 1, 2, NO_BOARD, NO_BOARD)),
                wait=random.choice((0, 0, 0, 1, 2, 4, 3)),
                stall=random.randrange(1, 4),
                stay=True,
                reuse=random.choice((0, 0, 1, 2, 4)),
            )

        def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
            return tuple(
                replace(access, resource=access.resource % few)
                if access.resource < 255 and access.slot != GROUP_SLOT
                else access
                for access in accesses
            )

        effects = item.effects
        if random.random() < 0.7:
            effects = replace(effects, reads=moved(effects.reads), writes=moved(effects.writes))
        items.append(replace(item, control=control, effects=effects))
    return replace(kernel, instructions=tuple(items))


def random_kernels(bases: list[Kernel]) -> Iterator[Kernel]:
    for base in bases:
        yield from (scrambled(base, seed, 3 + 3 * (seed % 4)) for seed in range(KERNELS))


def found_by_lint(kernel: Kernel, *rules: str) -> Found:
    return {
        (row.rule, row.offset, row.other, name)
        for row in lint(kernel)
        if row.rule in rules
        for name in row.registers
    }


# --- scoreboards ---------------------------------------------------------------------------------


def opened(item: Instruction) -> Iterator[tuple[int, bool, set[int], bool]]:
    """(register, whether it is written, scoreboards that tell, whether those of its pipe do)."""
    if item.line.guard == "!PT":
        return
    if item.effects.info.pipe is Pipe.ASYNC or item.effects.info.order is Order.FIXED:
        return
    writes, reads = ({item.control.write_sb} - {NO_BOARD}, {item.control.read_sb} - {NO_BOARD})
    if writes or item.effects.info.variable:
        for access in item.effects.writes:
            yield access.resource, True, writes, not writes
    if reads or item.effects.info.variable:
        for resource in protected_sources(item):
            yield resource, False, reads | writes, not reads


def unsettled(kernel: Kernel) -> Found:
    found: Found = set()
    for way in ways(kernel):
        for at, index in enumerate(way):
            producer = kernel.instructions[index]
            for resource, written, telling, joins in opened(producer):
                known = set(telling)
                for later in way[at + 1 :]:
                    item = kernel.instructions[later]
                    if any(waited_scoreboards(item) >> number & 1 for number in known):
                        break
                    found |= _clash(producer, item, resource, written)
                    same = item.effects.info.pipe is producer.effects.info.pipe
                    if joins and same:
                        known |= {item.control.write_sb} - {NO_BOARD}
                        known |= set() if written else {item.control.read_sb} - {NO_BOARD}
                    gone = {access.resource for access in item.effects.writes}
                    if resource in gone and not item.effects.partial:
                        break
    return found


def _clash(producer: Instruction, item: Instruction, resource: int, written: bool) -> Found:
    if exclusive(producer, item) or item.effects.info.name == UNKNOWN.name:
        return set()
    values = ("old", GROUP_SLOT)
    read = {access.resource for access in item.effects.reads if access.slot not in values}
    overwritten = {access.resource for access in item.effects.writes if access.slot != GROUP_SLOT}
    same = producer.effects.info.pipe is item.effects.info.pipe
    in_order = same and not producer.effects.info.variable
    told = item.offset, str(producer), resource_name(resource)
    if written and resource in read:
        return set() if in_order else {("SCOREBOARD_WAIT", *told)}
    if resource in overwritten and not same:
        alone = not written and producer.control.read_sb == NO_BOARD
        return {("DISTANCE_ALONE" if alone else "SCOREBOARD_WAIT", *told)}
    return set()


def test_an_open_register_is_touched_on_some_path(bases: list[Kernel]) -> None:
    counts: dict[str, int] = {}
    for kernel in random_kernels(bases):
        want = unsettled(kernel)
        assert found_by_lint(kernel, "SCOREBOARD_WAIT", "DISTANCE_ALONE") == want
        for rule, *_ in want:
            counts[rule] = counts.get(rule, 0) + 1
    assert min(counts["SCOREBOARD_WAIT"], counts["DISTANCE_ALONE"]) > 10


def test_a_scoreboard_is_not_awaited_in_the_cycle_after_it_was_set(bases: list[Kernel]) -> None:
    seen = 0
    for kernel in random_kernels(bases):
        items, want = kernel.instructions, set()
        for first, second in pairwise(items):
            numbers = {first.control.write_sb, first.control.read_sb} - {NO_BOARD}
            if first.control.stall == 1 and any(second.control.wait >> n & 1 for n in numbers):
                want.add((second.offset, str(first)))
        found = {(r.offset, r.other) for r in lint(kernel) if r.rule == "SCOREBOARD_VISIBLE"}
        assert found == want
        seen += len(want)
    assert seen


# --- kept operands -------------------------------------------------------------------------------


def reads_of(item: Instruction) -> set[tuple[int, int]]:
    return {(slot, word) for slot, words in slot_words(item).items() for word in words}


def written_by(item: Instruction) -> set[int]:
    return {access.resource for access in item.effects.writes if access.slot != GROUP_SLOT}


def stale(kernel: Kernel) -> Found:
    """A kept word that something writes and that is then read through its slot, with no read of
    its slot and bank in between."""
    found: Found = set()
    for way in ways(kernel):
        for at, index in enumerate(way):
            holder = kernel.instructions[index]
            known = holder.effects.info.name != UNKNOWN.name and holder.control.stay
            for slot, word in reads_of(holder):
                if not known or not holder.control.reuse >> slot & 1:
                    continue
                rewritten = word in written_by(holder)
                for later in way[at + 1 :]:
                    item = kernel.instructions[later]
                    if rewritten and (slot, word) in reads_of(item):
                        told = item.offset, str(holder), f"R{word}"
                        found.add(("STALE_REUSE", *told))
                    if any(s == slot and w % 2 == word % 2 for s, w in reads_of(item)):
                        break
                    rewritten = rewritten or word in written_by(item)
    return found


def with_slots(kernel: Kernel, seed: int) -> Kernel:
    """The kernel with each instruction's words of random registers, so that reads of a slot are of
    few: kept operands are taken from the words, not from `effects.reads`."""
    random, items = Random(seed), []
    for item in kernel.instructions:
        writes = tuple(
            replace(access, resource=random.randrange(12)) if access.resource < 255 else access
            for access in item.effects.writes
        )
        control = replace(item.control, stay=True, reuse=random.choice((0, 1, 2, 4, 7)))
        effects = replace(item.effects, writes=writes)
        items.append(replace(item, effects=effects, control=control))
    return replace(kernel, instructions=tuple(items))


def test_a_kept_operand_is_read_after_its_rewrite_on_some_path(bases: list[Kernel]) -> None:
    seen = 0
    for base in bases:
        for seed in range(KERNELS):
            kernel = with_slots(base, seed)
            want = stale(kernel)
            assert found_by_lint(kernel, "STALE_REUSE") == want
            seen += len(want)
            empty = {
                (item.offset, slot)
                for item in kernel.instructions
                for slot in range(3)
                if item.control.reuse >> slot & 1
                and item.effects.info.name != UNKNOWN.name
                and slot not in slot_words(item)
            }
            names = {f"slot {SLOT_NAMES[slot]} holds no register": slot for slot in range(3)}
            found = {
                (row.offset, names[row.reason])
                for row in lint(kernel)
                if row.rule == "REUSE_OPERAND"
            }
            assert found == empty
    assert seen > 10


def test_an_instruction_overwrites_what_it_keeps_itself(bases: list[Kernel]) -> None:
    """The very first one, too: the next one reads the old value through the slot."""
    met = 0
    for kernel in bases:
        donors = [i for i in kernel.instructions if slot_words(i) and i.effects.writes]
        for donor in donors[:5]:
            ((slot, words), *_) = slot_words(donor).items()
            writes = (Access(words[0], "d0"),)
            control = replace(donor.control, stay=True, reuse=1 << slot)
            made = replace(donor, effects=replace(donor.effects, writes=writes), control=control)
            for place in (0, 3):
                items = list(kernel.instructions)
                items[place : place + 2] = [replace(made, index=place + n) for n in (0, 1)]
                other = replace(kernel, instructions=tuple(items))
                want = stale(other)
                assert found_by_lint(other, "STALE_REUSE") == want
                met += any(offset == items[place + 1].offset for _, offset, *_ in want)
    assert met > 5


# --- distances -----------------------------------------------------------------------------------


def test_a_result_is_read_no_earlier_than_any_compiler_reads_it(bases: list[Kernel]) -> None:
    """Of the last writer of each register in its block; the least that the table knows."""
    seen, minima = 0, table_for(90).minima
    for kernel in random_kernels(bases):
        want: Found = set()
        for block in kernel.blocks:
            items = kernel.instructions[block.start : block.end]
            for place, later in enumerate(items):
                for access in later.effects.reads:
                    writers = [
                        (item, write)
                        for item in items[:place]
                        for write in item.effects.writes
                        if write.resource == access.resource
                    ]
                    if not writers or exclusive(writers[-1][0], later):
                        continue
                    earlier, write = writers[-1]
                    row = Dependence(
                        earlier.index,
                        later.index,
                        Hazard.RAW,
                        access.resource,
                        write.slot,
                        access.slot,
                    )
                    key = key_of(row, earlier, later)
                    between = kernel.instructions[earlier.index : later.index]
                    now = sum(item.control.stall for item in between)
                    behind = kernel.instructions[earlier.index + 1 : later.index + 1]
                    awaited = any(
                        waited_scoreboards(second) >> first.control.write_sb & 1
                        for number, first in enumerate(behind)
                        for second in behind[number + 1 :]
                        if first.control.write_sb != NO_SCOREBOARD
                    )
                    if key is not None and now < least(minima, key) and not awaited:
                        name = resource_name(access.resource)
                        want.add(("LATENCY", later.offset, str(earlier), name))
        assert found_by_lint(kernel, "LATENCY") == want
        seen += len(want)
    assert seen > 20


# --- matrix instructions in flight ---------------------------------------------------------------


@pytest.fixture(scope="module")
def matrices(kernels_of: Callable[[str], list[Kernel]]) -> list[Kernel]:
    names = ("cuda_wgmma_gemm_sm90a", "triton_attention_128x64_w8_s3_sm90")
    found = [kernel for name in names for kernel in kernels_of(name)]
    return [kernel for kernel in found if len(ways(kernel)) < 60]


def loosened(kernel: Kernel, seed: int) -> Kernel:
    """The kernel with some waits and fences of groups gone, some waits for other counts, more
    groups, and arithmetic on registers of matrix instructions."""
    random = Random(f"{kernel.name} {seed}")
    padding = next(item for item in reversed(kernel.instructions) if item.base == "NOP")
    groups = [item for item in kernel.instructions if _commits(item)]
    waits = [i for i in kernel.instructions if i.line.opcode.startswith("WARPGROUP.DEPBAR")]
    used = sorted({r for item in kernel.instructions if _runs(item) for r in _registers(item)})
    items: list[Instruction] = []
    for original in kernel.instructions:
        item = original
        if item.base == "WARPGROUP" and random.random() < 0.3:
            items.append(replace(padding, index=item.index))
            continue
        if item.base in PLAIN and random.random() < 0.03:
            item = random.choice((*groups, *waits))
        effects = item.effects
        if item in waits and random.random() < 0.5:
            count = replace(effects.operands[-1], text=hex(random.randrange(4)))
            effects = replace(effects, operands=(*effects.operands[:-1], count))
        elif item.base in PLAIN and random.random() < 0.1:
            one = (Access(random.choice(used), "d0"),)
            writes = random.random() < 0.5
            effects = replace(effects, **{"writes" if writes else "reads": one})
        items.append(replace(item, index=len(items), effects=effects))
    return replace(kernel, instructions=tuple(items))


def _runs(item: Instruction) -> bool:
    return item.effects.info.pipe is Pipe.ASYNC and item.line.guard != "!PT"


def _vector(accesses: tuple[Access, ...], but: str) -> set[int]:
    return {a.resource for a in accesses if a.resource < 255 and a.slot != but}


def _registers(item: Instruction) -> set[int]:
    return _vector((*item.effects.reads, *item.effects.writes), "guard")


def _sources(item: Instruction) -> set[int]:
    return {a.resource for a in item.effects.reads if a.resource < 255 and a.slot[0] == "a"}


def collisions(kernel: Kernel) -> Found:
    """What touches registers of a matrix instruction before a wait that leaves fewer groups running
    than were committed since, its own included."""
    found: Found = set()
    for way in ways(kernel):
        for at, index in enumerate(way):
            matrix = kernel.instructions[index]
            if not _runs(matrix):
                continue
            sources = _sources(matrix)
            sums = _registers(matrix) - sources
            groups = int(_commits(matrix))
            for later in way[at + 1 :]:
                item = kernel.instructions[later]
                if item.line.opcode.startswith("WARPGROUP.DEPBAR"):
                    if groups > int(item.effects.operands[-1].text, 16):
                        break
                    continue
                found |= _touched(matrix, item, sources, sums)
                groups += _commits(item)
    return found


def _commits(item: Instruction) -> bool:
    return _runs(item) and "gsb0" in item.line.operands


def _touched(matrix: Instruction, item: Instruction, sources: set[int], sums: set[int]) -> Found:
    if exclusive(item, matrix) or item.base == "WARPGROUP":
        return set()
    reads, writes = (
        _vector(accesses, GROUP_SLOT) for accesses in (item.effects.reads, item.effects.writes)
    )
    if _runs(item):
        own = _registers(item) - _sources(item)
        reads, writes = _sources(item), (set[int]() if own == sums else own)
    told = item.offset, str(matrix)
    return {("ASYNC_SOURCE", *told, f"R{r}") for r in writes & sources} | {
        ("ASYNC_ACCUMULATOR", *told, f"R{r}") for r in (reads | writes) & sums
    }


def unfenced(kernel: Kernel) -> set[int]:
    """Matrix instructions some of whose registers were written since the last fence."""
    found: set[int] = set()
    for way in ways(kernel):
        fresh: set[int] = set()
        for index in way:
            item = kernel.instructions[index]
            if item.line.opcode.startswith("WARPGROUP.ARRIVE"):
                fresh = set()
            elif _runs(item) and fresh & _registers(item):
                found.add(item.offset)
            elif not _runs(item) and item.base != "WARPGROUP":
                fresh |= _vector(item.effects.writes, "")
    return found


def test_registers_of_a_matrix_instruction_are_touched_in_flight(matrices: list[Kernel]) -> None:
    assert matrices
    counts: dict[str, int] = {}
    for base in matrices:
        for seed in range(8):
            kernel = loosened(base, seed)
            want = collisions(kernel)
            assert found_by_lint(kernel, "ASYNC_SOURCE", "ASYNC_ACCUMULATOR") == want
            fences = {row.offset for row in lint(kernel) if row.rule == "ASYNC_FENCE"}
            assert fences == unfenced(kernel)
            for rule, *_ in want:
                counts[rule] = counts.get(rule, 0) + 1
            counts["fence"] = counts.get("fence", 0) + len(fences)
    assert (
        min(counts.get(name, 0) for name in ("ASYNC_SOURCE", "ASYNC_ACCUMULATOR", "fence")) > 5
    ), counts


# --- registers given back ------------------------------------------------------------------------


def test_a_register_is_touched_that_the_warp_gave_back_on_some_path(bases: list[Kernel]) -> None:
    seen = 0
    for base in bases:
        for seed in range(KERNELS):
            random, items = Random(seed), list(base.instructions)
            operand = next(i.effects.operands[-1] for i in items if i.effects.operands)
            for index in random.sample(range(len(items)), 4):
                line = replace(items[index].line, opcode="USETMAXREG.DEALLOC.CTAPOOL", guard="")
                few = replace(operand, text=hex(random.randrange(2, 24)))
                effects = replace(items[index].effects, operands=(few,), reads=(), writes=())
                if not items[index].pinned and items[index].effects.info.order is not Order.FIXED:
                    items[index] = replace(items[index], line=line, effects=effects)
            kernel = replace(base, instructions=tuple(items))
            want: set[int] = set()
            for way in ways(kernel):
                left = kernel.code.registers
                for index in way:
                    item = kernel.instructions[index]
                    touched = _vector((*item.effects.reads, *item.effects.writes), GROUP_SLOT)
                    if max(touched, default=-1) >= left and any(
                        i.base == "USETMAXREG" for i in items
                    ):
                        want.add(item.offset)
                    if item.base == "USETMAXREG":
                        left = int(item.effects.operands[-1].text, 16)
            found = {row.offset for row in lint(kernel) if row.rule == "REGISTER_POOL"}
            assert found == want
            seen += len(want)
    assert seen > 20
