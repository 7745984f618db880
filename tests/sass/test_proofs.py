"""Each rule of the three proofs by itself, asked of the functions that hold it.

The proofs decode both files, so a fault planted in bytes is often caught by several rules at once:
one of them could be lost without anybody seeing it. Here each is asked about a case that no other
decides. What should come out is worked out beside it, from what the rule means.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.resources import PREDICATE_BASE, Access
from warploom.sass.flow.dependence import Dependence, Hazard, dependences
from warploom.sass.flow.latency import LONGEST, LatencyTable
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.mining import fixed_latency, key_of
from warploom.sass.flow.scoreboard import protected_sources
from warploom.sass.rewrites.renaming import verify as renaming
from warploom.sass.rewrites.rotation import verify as rotation
from warploom.sass.rewrites.rotation.rotate import Rotation
from warploom.sass.rewrites.scoreboards import verify as scoreboards
from warploom.sass.rules.fresh import change_outside

SMALL = "cuda_reduce_sm90a"
COPIES = "cuda_mma_gemm_sm90a"
MATRIX = "cuda_wgmma_gemm_sm90a"
Kernels = Callable[[str], list[Kernel]]


def control(kernel: Kernel, index: int, **fields: int) -> Kernel:
    """A kernel with control fields of one instruction replaced."""
    item = kernel.instructions[index]
    return put(kernel, replace(item, control=replace(item.control, **fields)))


def put(kernel: Kernel, item: Instruction) -> Kernel:
    """A kernel with one instruction replaced."""
    items = list(kernel.instructions)
    items[item.index] = item
    return replace(kernel, instructions=tuple(items))


def with_accesses(item: Instruction, **accesses: tuple[Access, ...]) -> Instruction:
    """An instruction that reads or writes something else."""
    return replace(item, effects=replace(item.effects, **accesses))


# --- scoreboards given out anew ------------------------------------------------------------------


def test_every_bit_of_a_word_outside_the_control_field_is_compared(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    item = kernel.instructions[3]
    for bit in (0, 20, 63, 64, 80, 104):
        low, high = item.low ^ (1 << bit if bit < 64 else 0), item.high ^ (1 << bit >> 64)
        found = list(scoreboards._words(kernel, put(kernel, replace(item, low=low, high=high))))
        assert [row.offset for row in found] == [item.offset], bit
    assert list(scoreboards._words(kernel, kernel)) == []


def test_what_takes_no_wait_gets_none(kernels_of: Kernels) -> None:
    kernel = kernels_of(MATRIX)[0]
    items = [i for i in kernel.instructions if i.line.opcode.startswith("WARPGROUP.DEPBAR")]
    assert items
    for item in items:
        found = scoreboards._words(kernel, control(kernel, item.index, wait=2))
        assert [row.reason for row in found] == ["the instruction takes no wait"]


def test_waits_for_a_scoreboard_that_a_depbar_names_stay(kernels_of: Kernels) -> None:
    kernel = kernels_of(COPIES)[0]
    named = scoreboards.named_scoreboards(kernel)
    assert named
    plain = kernel.instructions[5]
    for item in (plain, *(i for i in kernel.instructions if i.control.wait & named)):
        for number in (n for n in range(6) if named >> n & 1):
            other = control(kernel, item.index, wait=item.control.wait ^ 1 << number)
            assert [row.offset for row in scoreboards._named(kernel, other)] == [item.offset]
        free = next(n for n in range(6) if not named >> n & 1)
        other = control(kernel, item.index, wait=item.control.wait ^ 1 << free)
        assert list(scoreboards._named(kernel, other)) == []


def test_a_loop_waits_for_every_scoreboard_that_it_sets(kernels_of: Kernels) -> None:
    asked = 0
    for name in (SMALL, COPIES):
        for kernel in kernels_of(name):
            for loop in natural_loops(kernel):
                spans = [kernel.blocks[number] for number in loop.blocks]
                items = [i for b in spans for i in kernel.instructions[b.start : b.end]]
                waited = {n for item in items for n in item.control.waits()}
                waited |= {int(i.line.operands[2]) for i in items if i.base == "DEPBAR"}
                assert list(scoreboards._loops(kernel, kernel)) == []
                for item in (i for i in items if i.control.write_sb in waited):
                    for number in range(6):
                        other = control(kernel, item.index, write_sb=number)
                        found = {row.offset for row in scoreboards._loops(kernel, other)}
                        assert (item.offset in found) == (number not in waited)
                        asked += number not in waited
    assert asked


def test_nothing_may_touch_what_a_late_event_settles(kernels_of: Kernels) -> None:
    """For every instruction and event: a result may be neither read nor written, a source not be
    written; of operations that the event alone tells of."""
    seen: set[tuple[bool, bool, bool]] = set()
    for kernel in kernels_of(SMALL):
        relation = scoreboards.Relation(kernel)
        for event, (results, sources) in relation.settles.items():
            setter = kernel.instructions[event // 2]
            own = {access.resource for access in setter.effects.writes}
            assert results >= own if not event & 1 else not results & own - sources
            for item in kernel.instructions:
                reads = {access.resource for access in item.effects.reads}
                writes = {access.resource for access in item.effects.writes}
                touches = (bool(results & reads), bool(results & writes), bool(sources & writes))
                if any(touches):
                    assert relation.relies(item, event), (str(item), str(setter))
                    seen.add(touches)
    # A result overwritten and not read, a source overwritten and nothing else: both were there.
    assert {(False, True, False), (False, False, True), (True, False, False)} <= seen


def test_an_event_tells_that_what_its_pipe_issued_before_is_done_too(kernels_of: Kernels) -> None:
    """Of the instructions of a block with no scoreboard of their own: a pipe completes in order."""
    asked = {"sources": 0, "results": 0}
    for kernel in (*kernels_of(SMALL), *kernels_of(COPIES)):
        settles = scoreboards.Relation(kernel).settles
        for block in kernel.blocks:
            items = kernel.instructions[block.start : block.end]
            for (place, item), setter in itertools.product(enumerate(items), items):
                between = items[place + 1 : setter.index - block.start + 1]
                told = {event for event in scoreboards.events(setter) if setter in between}
                info, own = item.effects.info, (item.control.write_sb, item.control.read_sb)
                alone = info.variable and set(own) == {NO_SCOREBOARD}
                unawaited = not any(each.control.wait for each in between)
                if not alone or not unawaited or setter.effects.info.pipe is not info.pipe:
                    continue
                gone = {access.resource for each in between for access in each.effects.writes}
                for event in told:
                    results, sources = settles[event]
                    assert sources >= set(protected_sources(item)) - gone, (str(item), str(setter))
                    asked["sources"] += 1
                    if not event & 1:
                        assert results >= {a.resource for a in item.effects.writes} - gone
                        asked["results"] += 1
    assert all(asked.values())


def test_where_distance_alone_protects_nothing_may_be_late(kernels_of: Kernels) -> None:
    kernel = next(k for k in kernels_of(SMALL) if k.name == "reduce_sum")
    planted = 0
    for item in kernel.instructions:
        if not item.control.wait or item.effects.info.order.name != "FREE":
            continue
        relation = scoreboards.Relation(control(kernel, item.index, wait=0))
        if item.index not in relation.alone:
            continue
        planted += 1
        for event in relation.settles:
            assert relation.relies(relation.kernel.instructions[item.index], event)
    assert planted


def test_only_the_code_of_the_kernel_may_change(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SMALL)
    for name in cubin.kernels:
        text = cubin.kernel(name).text
        end = text.offset + text.size
        for place in (0, text.offset - 1, text.offset, end - 1, end, len(cubin.data) - 1):
            data = bytearray(cubin.data)
            data[place] ^= 1
            found = change_outside(cubin, replace(cubin, data=bytes(data)), name)
            assert (found is None) == (text.offset <= place < end), place
        for data in (cubin.data + b"0", cubin.data[:end] + b"0" + cubin.data[end:]):
            assert change_outside(cubin, replace(cubin, data=data), name)


# --- values in other registers -------------------------------------------------------------------

writes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


def related(rows: list[tuple[int, int]], kernel: Kernel) -> renaming._Relation:
    """The relation after a program wrote these registers (in the one, in the other)."""
    item = kernel.instructions[0]
    state = renaming._EQUAL
    for one, other in rows:
        first = with_accesses(item, writes=(Access(one, "d0"),))
        state = renaming._after(state, first, with_accesses(item, writes=(Access(other, "d0"),)))
    return state


def values(rows: list[tuple[int, int]]) -> tuple[dict[int, int], dict[int, int]]:
    """What stands in both register files after that, every write a value of its own."""
    one, other = ({register: -1 - register for register in range(5)} for _ in range(2))
    for value, (first, second) in enumerate(rows):
        one[first] = other[second] = value
    return one, other


@given(rows=writes, others=writes)
@settings(max_examples=150, deadline=None)
def test_registers_are_related_just_where_their_values_are_equal(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], kernels_of: Kernels
) -> None:
    kernel = kernels_of(SMALL)[0]
    states = [related(each, kernel) for each in (rows, others)]
    both = states[0].meet(states[1])
    files = [values(each) for each in (rows, others)]
    for first in range(5):
        for second in range(5):
            equal = [one[first] == other[second] for one, other in files]
            assert [state.holds(first, second) for state in states] == equal
            assert both.holds(first, second) == all(equal)


@given(shifts=st.lists(st.integers(-8, 8), min_size=1, max_size=4), start=st.integers(2, 20))
@settings(max_examples=100, deadline=None)
def test_tuples_move_as_a_whole_and_stay_aligned(
    shifts: list[int], start: int, kernels_of: Kernels
) -> None:
    item = kernels_of(SMALL)[0].instructions[0]
    mine = tuple(Access(start + n, f"a{n}") for n in range(len(shifts)))
    theirs = tuple(Access(40 + start + n + by, f"a{n}") for n, by in enumerate(shifts))
    step = {1: 1, 2: 2}.get(len(shifts), 4)
    whole = len(set(shifts)) == 1 and (40 + shifts[0]) % step == 0
    pair = [with_accesses(item, reads=each, writes=()) for each in (mine, theirs)]
    assert (list(renaming._alignment(*pair)) == []) == whole


def test_a_new_dependence_keeps_its_distance_to_the_cycle(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    asked = 0
    for block in kernel.blocks:
        for row in dependences(kernel.instructions[block.start : block.end]):
            key = key_of(row, kernel.instructions[row.earlier], kernel.instructions[row.later])
            if key is None or row.hazard is not Hazard.RAW or _guarded(kernel, row):
                continue
            known = LatencyTable(90, "", {key: 7}, {}, {}, {}, {}, {})
            assert [bool(renaming._too_close(kernel, row, n, known)) for n in (6, 7)] == [
                True,
                False,
            ]
            # A kind of pair that was never seen: as long as anything may take.
            none = replace(known, gaps={})
            cycles = (1, LONGEST - 1, LONGEST)
            found = [bool(renaming._too_close(kernel, row, n, none)) for n in cycles]
            assert found == [True, True, False]
            asked += 1
    assert asked > 10


def _guarded(kernel: Kernel, row: Dependence) -> bool:
    return any(kernel.instructions[index].line.guard for index in (row.earlier, row.later))


def test_dependences_over_block_edges_are_new_ones_too(kernels_of: Kernels) -> None:
    """A reader in the next block is pointed at a register that the block before writes last."""
    kernel = kernels_of(SMALL)[0]
    table, free = LatencyTable(90, "", {}, {}, {}, {}, {}, {}), 200
    plain = {i.index for i in kernel.instructions if not i.effects.info.variable}
    found = 0
    for block in kernel.blocks:
        lasts = [index for index in range(block.start, block.end) if index in plain]
        for successor in (kernel.blocks[n] for n in block.successors if n != block.index):
            firsts = [index for index in range(successor.start, successor.end) if index in plain]
            if not lasts or not firsts:
                continue
            last, first = kernel.instructions[lasts[-1]], kernel.instructions[firsts[0]]
            writer = with_accesses(last, writes=(Access(free, "d0"),))
            reader = with_accesses(first, reads=(Access(free, "a"),))
            rows = renaming._distances(kernel, put(put(kernel, writer), reader), table)
            found += any(row.offset == first.offset for row in rows)
    assert found


def test_a_bit_that_no_text_shows_does_not_change(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    item = kernel.instructions[2]
    found = renaming._same_shape(kernel, item, replace(item, low=item.low ^ 1 << 40))
    assert found is not None and found.rule == "INSTRUCTION"


def test_what_waits_for_a_matrix_group_names_the_same_registers(
    kernels_of: Kernels, cubin_of: Callable[[str], Cubin], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels_of(MATRIX)[0]
    named = [
        item
        for item in kernel.instructions
        if any(access.slot == GROUP_SLOT for access in item.effects.reads)
    ]
    assert named
    for item in named:
        moved = tuple(
            replace(access, resource=access.resource ^ 1) if access.slot == GROUP_SLOT else access
            for access in item.effects.reads
        )
        other = put(kernel, with_accesses(item, reads=moved))
        found = renaming._groups(kernel, other)
        assert [(row.rule, row.offset) for row in found] == [("ASYNCHRONOUS", item.offset)]
    assert renaming._groups(kernel, kernel) == []
    # The whole proof asks for it where everything before it holds.
    cubin, read = cubin_of(MATRIX), iter((kernel, other))
    monkeypatch.setattr(renaming, "decode_anew", lambda *_: next(read))
    monkeypatch.setattr(renaming, "_limits", lambda *_: [])
    monkeypatch.setattr(renaming, "_lockstep", lambda *_: [])
    found = renaming.verify_renaming(cubin, cubin, kernel.name)
    assert item.offset in [row.offset for row in found if row.rule == "ASYNCHRONOUS"]


# --- instructions over a back edge ---------------------------------------------------------------


def claims(kernel: Kernel) -> list[Rotation]:
    """Every instruction of every loop, as if it alone moved over the back edge."""
    return [
        Rotation(index, 1, kernel.blocks[loop.blocks[-1]].end - 1)
        for loop in natural_loops(kernel)
        for index in range(kernel.blocks[loop.header].start, kernel.blocks[loop.header].end - 1)
    ]


def test_what_crosses_a_back_edge_computes_registers_that_nobody_needs(kernels_of: Kernels) -> None:
    decides = needed = 0
    for kernel in (*kernels_of(SMALL), *kernels_of(COPIES)):
        for claim in claims(kernel):
            item, latch = kernel.instructions[claim.header], kernel.instructions[claim.latch]
            written = {access.resource for access in item.effects.writes}
            said = {row.reason for row in rotation._silent(kernel, claim)}
            if written & {access.resource for access in latch.effects.reads}:
                assert any("which the latch reads" in reason for reason in said), str(item)
                decides += 1
            for resource in _read_next(kernel, claim.latch + 1):
                other = put(kernel, with_accesses(item, writes=(Access(resource, "d0"),)))
                said = {row.reason for row in rotation._silent(other, claim)}
                assert any("read after the loop" in reason for reason in said), str(item)
                needed += 1
    assert decides and needed


def _read_next(kernel: Kernel, start: int) -> set[int]:
    """What the block after a loop reads before it writes it."""
    if start >= len(kernel.instructions):
        return set()
    block = kernel.blocks[kernel.block_of[start]]
    found: set[int] = set()
    done: set[int] = set()
    for item in kernel.instructions[start : block.end]:
        found |= {access.resource for access in item.effects.reads} - done
        done |= {access.resource for access in item.effects.writes}
    return found


def test_only_opcodes_that_compute_registers_cross_a_back_edge(kernels_of: Kernels) -> None:
    kernel = kernels_of(MATRIX)[0]
    last = kernel.blocks[-2].end - 1
    asked = 0
    for item in kernel.instructions[: last - 1]:
        plain = not item.effects.info.variable and not item.pinned
        settled = item.control.write_sb == NO_SCOREBOARD == item.control.read_sb
        if plain and settled and item.base in ("WARPGROUP", "HGMMA", "VOTE", "R2UR", "ELECT"):
            found = rotation._silent(kernel, Rotation(item.index, 1, last))
            assert "SIDE_EFFECT" in {row.rule for row in found}, str(item)
            asked += 1
    assert asked


def test_only_padding_is_dropped(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    last, other = kernel.instructions[-1], kernel.instructions[2]
    assert last.base == "NOP" and other.base != "NOP"
    claim = Rotation(4, 1, 8)
    block = kernel.blocks[kernel.block_of[last.index]]
    assert block.start < last.index and not block.predecessors
    head = replace(block, end=last.index)
    alone = replace(block, start=last.index, index=block.index + 1)
    for line, tail, dropped in (
        (last.line, (block,), False),
        (other.line, (block,), True),
        (last.line, (head, alone), False),
        (last.line, (head, replace(alone, predecessors=(0,))), True),
        (last.line, (replace(block, predecessors=(0,)),), True),
    ):
        one = put(kernel, replace(last, line=line))
        blocks = (*kernel.blocks[: block.index], *tail)
        found = {
            row.offset
            for row in rotation._stream(replace(one, blocks=blocks), kernel, claim)
            if row.rule == "PADDING"
        }
        assert found == ({last.offset} if dropped else set())


def test_a_dependence_keeps_its_distance_in_the_loop_to_the_cycle(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    same = list(range(len(kernel.instructions)))
    unknown = LatencyTable(90, "", {}, {}, {}, {}, {}, {})
    assert list(rotation._distances(kernel, kernel, same, unknown)) == []
    asked = 0
    for block in kernel.blocks:
        for row in dependences(kernel.instructions[block.start : block.end]):
            earlier, later = kernel.instructions[row.earlier], kernel.instructions[row.later]
            key = key_of(row, earlier, later)
            if key is None or row.hazard is not Hazard.RAW or _guarded(kernel, row):
                continue
            if earlier.control.stall < 2:
                continue
            closer = control(kernel, earlier.index, stall=earlier.control.stall - 1)
            found = rotation._distances(kernel, closer, same, unknown)
            assert later.offset in {finding.offset for finding in found}
            asked += 1
    assert asked


def test_no_branch_lands_among_what_moves(kernels_of: Kernels) -> None:
    asked = 0
    for kernel in kernels_of(SMALL):
        last = len(kernel.instructions) - 4
        for item in kernel.instructions:
            target = rotation._target(kernel, item)
            if item.base != "BRA" or target is None or not 4 < target < last - 4:
                continue
            for header in range(target - 3, target + 2):
                found = rotation._loop(kernel, Rotation(header, 3, last))
                said = {row.offset for row in found if "lands among what moves" in row.reason}
                assert (item.offset in said) == (header <= target < header + 3), str(item)
            asked += 1
    assert asked


def test_a_write_under_a_guard_leaves_the_old_value_needed(kernels_of: Kernels) -> None:
    kernel = next(k for k in kernels_of(SMALL) if k.blocks[0].size > 8)
    free, (writer, reader) = 200, kernel.instructions[4:6]
    other = put(kernel, with_accesses(reader, reads=(Access(free, "a"),)))
    assert free in rotation._needed(other, 0)
    for partial in (False, True):
        effects = replace(writer.effects, writes=(Access(free, "d0"),), partial=partial)
        known = put(other, replace(writer, effects=effects))
        assert (free in rotation._needed(known, 0)) is partial


def test_a_loop_is_entered_by_falling_into_it(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    last = len(kernel.instructions) - 3
    leaving = next(item for item in kernel.instructions if item.base == "EXIT")
    for place in range(3, 8):
        other = put(kernel, replace(kernel.instructions[place], line=leaving.line))
        for header in range(3, 9):
            found = list(rotation._loop(other, Rotation(header, 1, last)))
            said = [row.offset for row in found if row.reason == "does not fall into the loop"]
            assert said == ([kernel.instructions[place].offset] if header - 1 == place else [])


def test_what_is_needed_after_the_loop_is_read_on_a_way_from_behind_its_latch(
    kernels_of: Kernels,
) -> None:
    """A register that the loop's first instruction writes is read in one block and nowhere else."""
    free, asked = 200, set[tuple[bool, bool]]()
    for kernel in kernels_of(SMALL):
        for claim in claims(kernel):
            item, behind = kernel.instructions[claim.header], kernel.block_of[claim.latch] + 1
            for block in kernel.blocks:
                if block.start == claim.header:
                    continue
                reader = with_accesses(kernel.instructions[block.start], reads=(Access(free, "a"),))
                writer = with_accesses(item, writes=(Access(free, "d0"),))
                found = rotation._silent(put(put(kernel, reader), writer), claim)
                needed = any("read after the loop" in row.reason for row in found)
                assert needed == (block.index in _reached(kernel, behind)), block
                asked.add((block.index == behind, needed))
    assert asked == {(True, True), (False, True), (False, False)}


def _reached(kernel: Kernel, start: int) -> set[int]:
    """Blocks that control may reach from one."""
    found, pending = {start}, [start]
    while pending:
        new = set(kernel.blocks[pending.pop()].successors) - found
        found |= new
        pending += new
    return found


def test_every_bit_of_a_branch_counts(kernels_of: Kernels) -> None:
    """Those of its displacement by where it goes, the others as they are."""
    asked = set[str]()
    for kernel in kernels_of(SMALL):
        claim = Rotation(1, 1, len(kernel.instructions) - 3)
        for item in kernel.instructions[: claim.latch]:
            if rotation._target(kernel, item) is None or item.base in asked:
                continue
            asked.add(item.base)
            for bit in range(105):
                low = item.low ^ (1 << bit if bit < 64 else 0)
                other = put(kernel, replace(item, low=low, high=item.high ^ 1 << bit >> 64))
                found = {row.offset: row.rule for row in rotation._stream(kernel, other, claim)}
                assert found.get(item.offset) in ("INSTRUCTION", "BRANCH"), (str(item), bit)
    assert {"BRA", "BSSY"} <= asked


def test_no_byte_outside_the_code_and_its_table_changes(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SMALL)
    name = next(iter(cubin.kernels))
    code = cubin.kernel(name)
    assert code.info is not None
    spans = [range(s.offset, s.offset + s.size) for s in (code.text, code.info)]
    places = {at + by for span in spans for at in (span.start, span.stop) for by in (-1, 0)}
    for place in sorted({0, len(cubin.data) - 1} | places):
        data = bytearray(cubin.data)
        data[place] ^= 1
        found = rotation._container(cubin, replace(cubin, data=bytes(data)), name)
        assert (found is None) == any(place in span for span in spans), place
    assert rotation._container(cubin, replace(cubin, data=cubin.data + b"0"), name)


@pytest.mark.parametrize(
    ("guards", "variable", "between", "counts"),
    [
        (("", ""), False, False, True),
        (("", ""), True, False, False),  # a scoreboard's business
        (("P4", "P4"), False, False, True),
        (("P4", "!P4"), False, False, False),
        (("P4", "!P4"), False, True, True),  # both execute when the predicate changes in between
    ],
)
def test_distance_is_asked_where_both_execute_and_no_scoreboard_tells(
    guards: tuple[str, str], variable: bool, between: bool, counts: bool, kernels_of: Kernels
) -> None:
    """A writer and a reader with one instruction in between, a cycle closer than they were."""
    kernel = kernels_of(SMALL)[0]
    place = next(i.index for i in kernel.instructions if fixed_latency(i) and i.control.stall > 1)
    free, predicate, (writer, middle, reader) = (
        200,
        PREDICATE_BASE + 4,
        kernel.instructions[place : place + 3],
    )
    assert kernel.block_of[place] == kernel.block_of[place + 2]
    decides = (Access(predicate, "guard"),)
    writer = with_accesses(writer, reads=decides, writes=(Access(free, "d0"),))
    info = replace(writer.effects.info, variable=variable)
    writer = replace(writer, effects=replace(writer.effects, info=info))
    middle = with_accesses(middle, reads=(), writes=decides if between else ())
    reader = with_accesses(reader, reads=(Access(free, "a"), *decides), writes=())
    for item, guard in ((writer, guards[0]), (middle, ""), (reader, guards[1])):
        kernel = put(kernel, replace(item, line=replace(item.line, guard=guard)))
    unknown = LatencyTable(90, "", {}, {}, {}, {}, {}, {})
    closer = control(kernel, place, stall=writer.control.stall - 1)
    same = list(range(len(kernel.instructions)))
    found = {row.offset for row in rotation._distances(kernel, closer, same, unknown)}
    assert (reader.offset in found) == counts
    row = Dependence(place, place + 2, Hazard.RAW, free, "d0", "a")
    assert bool(renaming._too_close(kernel, row, 1, unknown)) == counts


def test_tables_of_offsets_follow_the_code_and_name_nothing_that_moves(kernels_of: Kernels) -> None:
    kernel = kernels_of(SMALL)[0]
    claim = Rotation(4, 2, 9)

    def with_table(attribute: int, *places: int) -> Kernel:
        words = struct.pack(f"<{len(places)}I", *(place * WORD_BYTES for place in places))
        head = struct.pack("<BBH", nvinfo.FORMAT_SIZED, attribute, len(words))
        return replace(kernel, info=head + words)

    for attribute in (*rotation.PLAIN_TABLES, *nvinfo.PINNED):
        for place in range(12):
            after = place if place < claim.latch else place + claim.count
            for other in (place, place + claim.count):
                tables = with_table(attribute, 1, place), with_table(attribute, 1, other)
                followed = attribute in rotation.PLAIN_TABLES and other == after
                moves = claim.header <= place < claim.header + claim.count
                found = list(rotation._tables(*tables, claim))
                assert (not found) == (followed and not moves), (attribute, place, other)
    one = with_table(rotation.PLAIN_TABLES[0], 1)
    assert list(rotation._tables(one, replace(one, info=b""), claim))
