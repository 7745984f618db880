"""`sass show` and `stats`: reasons are true, loops are loops, the page stands alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from warploom.report.sass_html import show_html
from warploom.report.sass_tables import stats_lines
from warploom.report.sass_text import show, source_files
from warploom.report.sass_words import block_list, register_ranges
from warploom.sass.decode.control import MAX_STALL_STAYING
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.decode.words import instruction_words
from warploom.sass.flow.distances import issue_times
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.paths import block_edges
from warploom.sass.rules.verify import Verifier
from warploom.sass.show.explain import explain
from warploom.sass.show.stats import serialised_groups, stats

ATTENTION = "triton_attention_128x64_w8_s3_sm90"
NAMES = (
    ATTENTION,
    "triton_softmax_1x4096_w8_s1_sm80",
    "triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm90",
    "cuda_sgemm_sm90a",
    "cuda_mma_gemm_sm80",
)
Kernels = Callable[[str], list[Kernel]]


@pytest.mark.parametrize("name", NAMES)
def test_every_stall_above_one_has_a_reason(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    found = explain(kernel).stalls
    for item in kernel.instructions:
        assert (item.index in found) == (item.control.stall > 1), str(item)


@pytest.mark.parametrize("name", NAMES)
def test_a_stall_reason_covers_its_stall_and_adds_up(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    for index, reason in explain(kernel).stalls.items():
        assert reason.stall == kernel.instructions[index].control.stall
        assert 0 <= reason.spare <= reason.stall
        if reason.producer is None or reason.consumer is None:
            continue
        home = kernel.blocks[kernel.block_of[reason.producer]]
        if kernel.block_of[reason.consumer] == home.index and reason.rule.startswith("read"):
            assert reason.producer <= index < reason.consumer
            times = issue_times(kernel.instructions[home.start : home.end])
            distance = times[reason.consumer - home.start] - times[reason.producer - home.start]
            assert distance == reason.actual
            assert reason.needed <= distance


@pytest.mark.parametrize("name", NAMES)
def test_spare_cycles_are_exactly_what_the_verifier_allows(
    name: str, cubin_of: Callable[[str], Cubin], kernels_of: Kernels
) -> None:
    """A stall shortened by its spare cycles is legal; by one more it breaks a rule."""
    cubin, kernel = cubin_of(name), kernels_of(name)[0]
    verifier = Verifier(cubin)
    words = instruction_words(cubin, kernel.name)

    def legal(index: int, stall: int) -> bool:
        candidate = words.copy()
        item = kernel.instructions[index]
        stay = item.control.stay and 1 <= stall <= MAX_STALL_STAYING
        reuse = item.control.reuse if stay else 0
        control = replace(item.control, stall=stall, stay=stay, reuse=reuse)
        candidate[index, 1] = np.uint64(control.encode(item.high))
        return verifier.check_words(candidate).legal

    for index, reason in explain(kernel).stalls.items():
        least = reason.stall - reason.spare
        assert legal(index, least), str(kernel.instructions[index])
        assert least <= 1 or not legal(index, least - 1), str(kernel.instructions[index])


@pytest.mark.parametrize("name", NAMES)
def test_a_wait_reason_names_setters_of_that_scoreboard(name: str, kernels_of: Kernels) -> None:
    kernel = kernels_of(name)[0]
    waits = explain(kernel).waits
    for item in kernel.instructions:
        named = {wait.scoreboard for wait in waits.get(item.index, ())} - {None}
        if item.base != "DEPBAR":
            assert named == set(item.control.waits()), str(item)
    own = 0
    for reasons in waits.values():
        for wait in reasons:
            for setter in wait.setters if wait.scoreboard is not None else ():
                control = kernel.instructions[setter.instruction].control
                own += wait.scoreboard in (control.write_sb, control.read_sb)
    assert own >= 5


def test_a_known_wait_is_explained(kernels_of: Kernels) -> None:
    """`S2UR` writes a uniform register that the `USHF` carrying the wait shifts."""
    kernel = kernels_of(ATTENTION)[0]
    reader = next(item for item in kernel.instructions if item.base == "USHF")
    wait = explain(kernel).waits[reader.index][0]
    setter = kernel.instructions[wait.setters[0].instruction]
    assert setter.base == "S2UR"
    assert wait.setters[0].action == "writes"
    assert wait.consumers[0] == reader.index


def test_a_group_wait_names_the_matrix_instructions(kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    depbar = next(one for one in kernel.instructions if "DEPBAR.LE" in one.line.opcode[10:])
    wait = explain(kernel).waits[depbar.index][-1]
    assert wait.scoreboard is None
    assert {kernel.instructions[one.instruction].base for one in wait.setters} == {"HGMMA"}


def test_listing_has_every_instruction_and_block(kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    text = "\n".join(line.plain for line in show(kernel, explain(kernel), defuse=True))
    for item in kernel.instructions:
        assert f"{item.offset:#06x}" in text
    assert text.count("block ") >= len(kernel.blocks)
    assert "header of loop 2, depth 1" in text
    assert "def R" in text


def test_source_lines_are_shown(cubin_of: Callable[[str], Cubin]) -> None:
    kernel = decode(cubin_of(ATTENTION), None, with_source=True)
    text = "\n".join(
        line.plain
        for line in show(kernel, explain(kernel), 2, sources=source_files(kernel, Path()))
    )
    assert "attention.py:" in text
    assert "block 3" not in text


def test_html_stands_alone(cubin_of: Callable[[str], Cubin], kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    page = show_html(cubin_of(ATTENTION), kernel, explain(kernel))
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert page.count("<details") == len(kernel.blocks)
    assert page.count('class="row code') == len(kernel.instructions) + len(kernel.blocks)
    for item in kernel.instructions:
        assert f'id="i{item.offset:04x}"' in page


def test_a_page_lists_its_loops(cubin_of: Callable[[str], Cubin], kernels_of: Kernels) -> None:
    kernel = kernels_of(ATTENTION)[0]
    page = show_html(cubin_of(ATTENTION), kernel, explain(kernel))
    for loop in natural_loops(kernel):
        assert f'<a href="#b{loop.header}">' in page and f'id="b{loop.header}"' in page
        items = [item for block in loop.blocks for item in kernel.items(kernel.blocks[block])]
        assert f"<td>{len(items)}</td>" in page


def test_loops_are_natural(kernels_of: Kernels) -> None:
    """Slow paths that jump back are no loops; a real loop reaches its header from its latch."""
    for name in ("cuda_switch_sm90a", "cuda_calls_sm80", "triton_scan_sm90", ATTENTION):
        for kernel in kernels_of(name):
            edges = block_edges(kernel)
            for loop in natural_loops(kernel):
                assert all(loop.header in edges[latch] for latch in loop.latches)
                assert loop.depth >= 1
    assert [loop.header for loop in natural_loops(kernels_of(ATTENTION)[0])] == [2]


def test_statistics_count_what_is_there(
    cubin_of: Callable[[str], Cubin], kernels_of: Kernels
) -> None:
    name = "triton_feed_forward_128x128x64_w8_s3_sm80"
    kernel = kernels_of(name)[0]
    one = stats(cubin_of(name), kernel)
    assert one.registers == 255
    assert one.kinds["tensor"] == sum(item.base == "HMMA" for item in kernel.instructions)
    assert one.kinds["spill load"] == sum(item.base == "LDL" for item in kernel.instructions)
    assert sum(one.pipes.values()) == one.instructions
    loop = one.loops[0]
    assert loop.kinds["tensor"] == 128
    assert 0 < loop.shortest_cycles <= loop.longest_cycles
    text = "\n".join(line.plain for line in stats_lines(one))
    assert "issue cycles an iteration" in text
    assert "local-memory accesses" in text


def test_serialised_groups_are_counted(kernels_of: Kernels) -> None:
    """None in Triton's kernels; a drain planted between two matrix instructions is one."""
    kernel = kernels_of(ATTENTION)[0]
    assert serialised_groups(kernel) == 0
    matrices = [item for item in kernel.instructions if item.base == "HGMMA"]
    drain = next(one for one in kernel.instructions if "DEPBAR.LE" in one.line.opcode[10:])
    items = list(kernel.instructions)
    items[matrices[1].index - 1] = replace(drain, index=matrices[1].index - 1)
    assert serialised_groups(replace(kernel, instructions=tuple(items))) == 1


def test_short_forms() -> None:
    assert register_ranges(["R4", "R5", "R6", "R9", "UR4", "UR5", "P0"]) == "R4-R6,R9,UR4-UR5,P0"
    assert block_list([5, 1, 6, 7]) == "1, 5-7"
    assert block_list([]) == "-"
