"""`sass lint`: silent on what compilers make, loud on every planted fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.sass.decode.control import NO_SCOREBOARD, Control
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel, decode, decode_all
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.resources import PREDICATE_BASE, UNIFORM_BASE, Access
from warploom.sass.flow.dependence import Hazard, dependences
from warploom.sass.flow.distances import exclusive
from warploom.sass.flow.inflight import group_registers, is_asynchronous, touched_registers
from warploom.sass.flow.outstanding import Unsettled, conflicts
from warploom.sass.rules.lint import ERROR, RULES, LintFinding, lint

ATTENTION = "triton_attention_128x64_w8_s3_sm90"
MANY = (
    ATTENTION,
    "triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm90",
    "triton_softmax_1x4096_w8_s1_sm80",
    "triton_skinny_gemm_32x256_w4_s4_sm80",
    "prebuilt_feed_forward_sm90a",
    "cuda_sgemm_sm90a",
)
Kernels = Callable[[str], list[Kernel]]


def errors(kernel: Kernel) -> list[LintFinding]:
    """The findings of severity error."""
    return [finding for finding in lint(kernel) if finding.severity == ERROR]


def edited(kernel: Kernel, index: int, **fields: int | bool) -> Kernel:
    """The kernel with control fields of one instruction replaced."""
    items = list(kernel.instructions)
    items[index] = replace(items[index], control=replace(items[index].control, **fields))
    return replace(kernel, instructions=tuple(items))


def reordered(kernel: Kernel, order: list[int]) -> Kernel:
    """The kernel with its instructions in another order."""
    items = tuple(replace(kernel.instructions[old], index=new) for new, old in enumerate(order))
    return replace(kernel, instructions=items)


def moved(kernel: Kernel, start: int, end: int) -> Kernel:
    """The kernel with instruction `start` moved to just after `end`."""
    order = list(range(len(kernel.instructions)))
    order.insert(end, order.pop(start))
    return reordered(kernel, order)


def patched(cubin: Cubin, kernel: Kernel, index: int, low: int) -> Kernel:
    """The kernel decoded from bytes in which the low word of one instruction is `low`."""
    words = list(kernel.code.words)
    words[index] = (low, words[index][1])
    return decode(cubin.replace(kernel.code, words), kernel.name)


def with_destination(item: Instruction, register: int) -> int:
    """The low word with another destination register (bits 16-23)."""
    return item.low & ~(0xFF << 16) | register << 16


def test_no_error_on_any_cubin_of_the_corpus(corpus: list[Path]) -> None:
    assert len(corpus) >= 45
    with ThreadPoolExecutor(2) as pool:
        for path, kernels in zip(
            corpus, pool.map(lambda path: decode_all(load(path)), corpus), strict=True
        ):
            for kernel in kernels.values():
                assert errors(kernel) == [], path.name


def test_every_rule_is_described() -> None:
    assert all(rule.means and rule.basis for rule in RULES.values())
    assert {rule.severity for rule in RULES.values()} == {ERROR, "note"}


# --- scoreboards ---------------------------------------------------------------------------


def needed_waits(kernel: Kernel) -> list[tuple[int, int]]:
    """(instruction, scoreboard) where the wait guards a result the instruction itself reads:
    the producer stands earlier in the block and nothing waits in between."""
    found: list[tuple[int, int]] = []
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        for dependence in dependences(items):
            producer = kernel.instructions[dependence.earlier]
            consumer = kernel.instructions[dependence.later]
            number = producer.control.write_sb
            between = kernel.instructions[dependence.earlier + 1 : dependence.later]
            if (
                dependence.hazard is Hazard.RAW
                and dependence.later_slot not in ("old", "group")
                and producer.effects.info.variable
                and number != NO_SCOREBOARD
                and consumer.control.wait >> number & 1
                and not any(item.control.wait >> number & 1 for item in between)
                and consumer.effects.info.name != "UNKNOWN"
                and not any(item.base == "DEPBAR" for item in between)
                and not exclusive(producer, consumer)
            ):
                found.append((consumer.index, number))
    return sorted(set(found))


@pytest.mark.parametrize("name", MANY)
def test_every_dropped_wait_is_found(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    waits = needed_waits(kernel)
    assert len(waits) >= 10
    for index, number in waits[:: -(-len(waits) // 12)]:  # from its beginning to its end
        wait = kernel.instructions[index].control.wait & ~(1 << number)
        found = errors(edited(kernel, index, wait=wait))
        missed = [finding.reason for finding in found if finding.rule == "SCOREBOARD_WAIT"]
        assert any(re.search(rf"scoreboard .*\b{number}\b", reason) for reason in missed), index


def test_an_inherited_wait_is_found_on_the_path_that_lost_it(kernels_of: Kernels) -> None:
    """Only the first consumer carries the wait; the finding names a later one too."""
    kernel = kernels_of(ATTENTION)[0]
    index = next(item.index for item in kernel.instructions if item.line.opcode == "SHF.R.U32.HI")
    assert kernel.instructions[index].control.wait
    found = errors(edited(kernel, index, wait=0))
    assert len({finding.offset for finding in found if finding.rule == "SCOREBOARD_WAIT"}) > 3


@pytest.mark.parametrize("name", MANY)
def test_a_wait_in_the_cycle_after_is_found(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    planted = 0
    for first, second in zip(kernel.instructions, kernel.instructions[1:], strict=False):
        sets = {first.control.write_sb, first.control.read_sb} - {NO_SCOREBOARD}
        if sets & set(second.control.waits()) and first.control.stall > 1 and planted < 5:
            found = errors(edited(kernel, first.index, stall=1))
            assert any(finding.rule == "SCOREBOARD_VISIBLE" for finding in found)
            planted += 1


# --- distances and control fields ------------------------------------------------------------


@pytest.mark.parametrize("name", MANY)
def test_a_result_used_in_the_next_cycle_is_found(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    planted = 0
    for dependence in (
        one
        for block in kernel.blocks
        for one in dependences(kernel.instructions[block.start : block.end])
    ):
        first = kernel.instructions[dependence.earlier]
        second = kernel.instructions[dependence.later]
        if (
            second.index == first.index + 1
            and dependence.hazard is Hazard.RAW
            and dependence.later_slot not in ("old", "group")
            and first.effects.info.pipe in (Pipe.ALU, Pipe.FMA, Pipe.IMAD)
            and second.effects.info.pipe in (Pipe.ALU, Pipe.FMA, Pipe.IMAD)
            and not exclusive(first, second)
            and planted < 20
        ):
            found = errors(edited(kernel, first.index, stall=1))
            assert any(finding.rule == "LATENCY" for finding in found), str(first)
            planted += 1
    assert planted >= 3


@pytest.mark.parametrize(
    "fields",
    [
        {"stay": True, "stall": 12},
        {"stay": True, "stall": 0},
        {"stay": False, "reuse": 1},
        {"write_sb": 6},
        {"read_sb": 6},
        {"reuse": 8, "stay": True, "stall": 2},
    ],
)
def test_undefined_control_fields_are_found(
    fields: dict[str, int | bool], kernels_of: Kernels
) -> None:
    kernel = kernels_of("cuda_sgemm_sm90a")[0]
    index = next(item.index for item in kernel.instructions if item.base == "FFMA")
    found = errors(edited(kernel, index, **fields))
    assert [finding.rule for finding in found][:1] == ["CONTROL"]
    assert found[0].offset == index * 16


def test_reuse_where_there_is_no_register_is_found(kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    load_ = next(item for item in kernel.instructions if item.base == "LDSM")
    found = errors(edited(kernel, load_.index, reuse=1, stay=True, stall=2))
    assert any(finding.rule == "REUSE_OPERAND" for finding in found)


def test_an_operand_kept_past_its_rewrite_is_found(
    cubin_of: Callable[[str], Cubin], kernels_of: Kernels
) -> None:
    """FFMA keeps `a` in slot a for the FFMA after it; let the first overwrite that register."""
    name = "cuda_sgemm_sm90a"
    kernel = kernels_of(name)[0]
    item = next(
        first
        for first, second in zip(kernel.instructions, kernel.instructions[1:], strict=False)
        if first.base == second.base == "FFMA"
        and first.control.reuse & 1
        and first.low >> 24 & 0xFF == second.low >> 24 & 0xFF
    )
    kept = item.low >> 24 & 0xFF
    spoiled = patched(cubin_of(name), kernel, item.index, with_destination(item, kept))
    found = errors(spoiled)
    assert any(
        finding.rule == "STALE_REUSE" and finding.registers == (f"R{kept}",) for finding in found
    )


# --- asynchronous registers ------------------------------------------------------------------


def in_flight(kernel: Kernel) -> tuple[Instruction, Instruction]:
    """A register-operand HGMMA and an arithmetic instruction right behind it in its block."""
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        for place, item in enumerate(items):
            if is_asynchronous(item) and group_registers(item).sources:
                for later in items[place + 1 :]:
                    if later.base == "WARPGROUP":
                        break
                    if later.base in ("FFMA", "FADD", "IADD3") and not later.line.guard:
                        return item, later
    raise AssertionError("the kernel has no register-operand HGMMA")


def test_a_write_to_a_register_an_hgmma_reads_is_found(
    cubin_of: Callable[[str], Cubin], kernels_of: Kernels
) -> None:
    kernel = kernels_of(ATTENTION)[0]
    matrix, victim = in_flight(kernel)
    register = min(group_registers(matrix).sources)
    low = with_destination(victim, register)
    found = errors(patched(cubin_of(ATTENTION), kernel, victim.index, low))
    hit = [one for one in found if one.rule == "ASYNC_SOURCE" and one.offset == victim.offset]
    assert hit
    assert f"R{register}" in hit[0].registers
    assert "WARPGROUP.DEPBAR" in hit[0].reason
    assert str(matrix) in {one.other for one in hit}


def test_a_touched_accumulator_is_found(
    cubin_of: Callable[[str], Cubin], kernels_of: Kernels
) -> None:
    kernel = kernels_of(ATTENTION)[0]
    matrix, victim = in_flight(kernel)
    register = max(group_registers(matrix).accumulators)
    low = with_destination(victim, register)
    found = errors(patched(cubin_of(ATTENTION), kernel, victim.index, low))
    assert any(one.rule == "ASYNC_ACCUMULATOR" and one.offset == victim.offset for one in found)


def test_a_move_into_the_window_is_found(kernels_of: Kernels) -> None:
    """The instruction that makes an A register, moved behind the HGMMA that reads it."""
    kernel = kernels_of(ATTENTION)[0]
    padding = next(one for one in reversed(kernel.instructions) if one.base == "NOP")
    planted = 0
    for matrix in (one for one in kernel.instructions if is_asynchronous(one)):
        sources = group_registers(matrix).sources
        writers = [
            one
            for one in kernel.instructions[: matrix.index]
            if one.base == "F2FP" and sources & {access.resource for access in one.effects.writes}
        ]
        for writer in writers[-4:]:
            items = list(kernel.instructions)
            items[writer.index] = replace(padding, index=writer.index)
            items[matrix.index + 1] = replace(writer, index=matrix.index + 1)
            found = errors(replace(kernel, instructions=tuple(items)))
            assert any(
                one.rule == "ASYNC_SOURCE" and one.offset == (matrix.index + 1) * 16
                for one in found
            ), str(writer)
            planted += 1
    assert planted >= 8


def test_a_write_moved_past_the_fence_is_found(kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    fence = [one for one in kernel.instructions if one.line.opcode == "WARPGROUP.ARRIVE"][-1]
    pack = next(
        one
        for one in reversed(kernel.instructions[: fence.index])
        if one.base == "F2FP" and one.line.operands.startswith("R103")
    )
    found = errors(moved(kernel, pack.index, fence.index))
    assert "ASYNC_FENCE" in {one.rule for one in found}


@pytest.mark.parametrize(
    "name",
    [
        ATTENTION,
        "prebuilt_attention_sm90a",
        "triton_feed_forward_128x128x64_w8_s3_sm90",
        "triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm90",
        "triton_batched_gemm_128x128x64_w8_s4_sm90",
        "cuda_wgmma_gemm_sm90a",
        "cuda_fp8_wgmma_sm90a",
    ],
)
def test_a_lost_group_wait_is_found(name: str, kernels_of: Kernels) -> None:
    """Without its last WARPGROUP.DEPBAR the results are read while in flight."""
    kernel = kernels_of(name)[0]
    waits = [one for one in kernel.instructions if one.line.opcode.startswith("WARPGROUP.DEPBAR")]
    padding = next(one for one in reversed(kernel.instructions) if one.base == "NOP")
    items = list(kernel.instructions)
    for wait in waits:
        items[wait.index] = replace(padding, index=wait.index)
    found = errors(replace(kernel, instructions=tuple(items)))
    assert "ASYNC_ACCUMULATOR" in {one.rule for one in found}


def test_a_group_wait_that_allows_one_group_more_is_found(kernels_of: Kernels) -> None:
    """Counting matters: the read after the loop needs 0 groups left, not 1."""
    kernel = kernels_of("triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm90")[0]
    waits = [one for one in kernel.instructions if one.line.opcode.startswith("WARPGROUP.DEPBAR")]
    loose, last = waits[0], waits[-1]
    assert loose.effects.operands[-1].text == "0x1"
    items = list(kernel.instructions)
    items[last.index] = replace(loose, index=last.index)
    found = errors(replace(kernel, instructions=tuple(items)))
    hits = [one for one in found if one.rule == "ASYNC_ACCUMULATOR"]
    assert hits
    assert all("gsb0, 0x0" in one.reason for one in hits)


@pytest.mark.parametrize(
    ("guards", "between", "apart", "found"),
    [
        (("", ""), False, False, True),
        (("P4", "P4"), False, False, True),
        (("P4", "!P4"), False, False, False),
        (("P4", "!P4"), True, False, True),  # both execute when the predicate changes in between
        (("P4", "!P4"), False, True, True),  # in another block, where nobody looked in between
    ],
)
def test_of_a_guard_and_its_opposite_one_executes_while_the_predicate_stays(
    guards: tuple[str, str], between: bool, apart: bool, found: bool, kernels_of: Kernels
) -> None:
    """A load's register is read with no wait, two instructions later."""
    kernel = kernels_of("cuda_reduce_sm90a")[0]
    free, decides = 200, (Access(PREDICATE_BASE + 4, "guard"),)
    first, end = kernel.blocks[0].start, kernel.blocks[0].end
    places = (end - 2, end - 1, end) if apart else (first, first + 1, first + 2)
    items = list(kernel.instructions)
    for place, guard, reads, writes in (
        (places[0], guards[0], decides, (Access(free, "d0"),)),
        (places[1], "", (), decides if between else ()),
        (places[2], guards[1], (Access(free, "a"), *decides), ()),
    ):
        item = items[place]
        effects = replace(item.effects, reads=reads, writes=writes)
        items[place] = replace(item, line=replace(item.line, guard=guard), effects=effects)
    kernel = replace(kernel, instructions=tuple(items))
    load = Unsettled(places[0], free, written=True, mask=0, joins=True)
    item = replace(items[places[2]], control=replace(items[places[2]].control, wait=0))
    info = replace(item.effects.info, pipe=Pipe.MMA)
    item = replace(item, effects=replace(item.effects, info=info))
    assert bool(list(conflicts(kernel, frozenset({load}), item))) == found


def test_what_is_touched_of_vector_registers_is_told_without_a_groups_wait(
    kernels_of: Kernels,
) -> None:
    item = kernels_of(ATTENTION)[0].instructions[3]
    accesses = tuple(
        Access(resource, slot)
        for resource in (0, UNIFORM_BASE - 1, UNIFORM_BASE, UNIFORM_BASE + 1)
        for slot in ("a", GROUP_SLOT)
    )
    for kind in ("reads", "writes"):
        effects = replace(item.effects, **{"reads": (), "writes": (), kind: accesses})
        touched = dict(
            zip(("reads", "writes"), touched_registers(replace(item, effects=effects)), strict=True)
        )
        assert touched.pop(kind) == {access.resource for access in accesses[:3]}
        assert touched.popitem()[1] == set()


def test_findings_are_about_general_registers(kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    matrix = next(one for one in kernel.instructions if is_asynchronous(one))
    used = group_registers(matrix)
    assert all(number < UNIFORM_BASE for number in used.sources | used.accumulators)


def test_control_round_trip_of_the_helper(kernels_of: Kernels) -> None:
    """`edited` changes what it says and nothing else."""
    kernel = kernels_of(ATTENTION)[0]
    changed = edited(kernel, 3, stall=9)
    assert changed.instructions[3].control == replace(kernel.instructions[3].control, stall=9)
    assert isinstance(changed.instructions[3].control, Control)
