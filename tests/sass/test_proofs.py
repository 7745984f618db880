"""Each rule of the proof of changed scoreboards by itself, asked of the functions that hold it.

The proof decodes both files, so a fault planted in bytes is often caught by several rules at once:
one of them could be lost without anybody seeing it. Here each is asked about a case that no other
decides. What should come out is worked out beside it, from what the rule means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.resources import Access
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.scoreboard import protected_sources
from warploom.sass.rules.fresh import change_outside
from warploom.sass.scoreboards import verify as scoreboards

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
            assert found is None or (found.rule, found.offset) == ("CONTAINER", 0)
        for data in (cubin.data + b"0", cubin.data[:end] + b"0" + cubin.data[end:]):
            assert change_outside(cubin, replace(cubin, data=data), name)
