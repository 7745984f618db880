"""Basic blocks and edges: branch targets from the words equal the labels nvdisasm prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from warploom.sass.decode.branches import relative_target
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import Kernel, decode_all, split_blocks
from warploom.sass.decode.nvinfo import labelled_offsets
from warploom.sass.decode.opcodes import TERMINATORS
from warploom.sass.flow.loops import depths, natural_loops


@pytest.fixture(scope="module")
def kernels(corpus: list[Path]) -> list[Kernel]:
    """Every kernel of the corpus."""
    return [kernel for path in corpus for kernel in decode_all(load(path)).values()]


def test_branch_targets_equal_the_labels(kernels: list[Kernel]) -> None:
    count = 0
    for kernel in kernels:
        at = {label: offset for offset, labels in kernel.labels.items() for label in labels}
        for item in kernel.instructions:
            match = re.search(r"`\((\.L_x?_?\d+)\)", item.line.operands)
            if item.base not in ("BRA", "BSSY") or not match:
                continue
            target = relative_target(
                item.line.opcode, item.offset, (item.low, item.high), kernel.sm
            )
            assert target == at[match.group(1)], f"{kernel.name} {item}"
            count += 1
    print(f"{count} branches")
    assert count >= 500


def test_blocks_partition_the_code(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.blocks[0].start == 0
        assert kernel.blocks[-1].end == len(kernel.instructions)
        for block, following in zip(kernel.blocks, kernel.blocks[1:], strict=False):
            assert block.end == following.start
        for block in kernel.blocks:
            assert block.size > 0
            inner = kernel.instructions[block.start : block.end - 1]
            assert not [item for item in inner if item.base in TERMINATORS]


def test_control_enters_blocks_only_at_their_start(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        starts = {block.start for block in kernel.blocks}
        for item in kernel.instructions:
            word = (item.low, item.high)
            target = relative_target(item.line.opcode, item.offset, word, kernel.sm)
            if target is not None and 0 <= target < 16 * len(kernel.instructions):
                assert target // 16 in starts
        # nvdisasm 13.5 also labels what .nv.info names; 13.1 does not, and blocks are the same.
        named = labelled_offsets(kernel.info, 16 * len(kernel.instructions))
        entered = [o for o in kernel.labels if o % 16 == 0 and o not in named]
        assert all(offset // 16 in starts for offset in entered)


def test_blocks_do_not_depend_on_labels_of_what_nv_info_names(kernels: list[Kernel]) -> None:
    seen = 0
    for kernel in kernels:
        named = labelled_offsets(kernel.info, 16 * len(kernel.instructions))
        bare = {o: text for o, text in kernel.labels.items() if o not in named}
        seen += len(kernel.labels) - len(bare)
        blocks = split_blocks(kernel.instructions, bare, kernel.info, kernel.sm)
        assert [b.start for b in blocks] == [b.start for b in kernel.blocks]
    print(f"{seen} labels of what .nv.info names")


def test_edges_agree_both_ways_and_branches_are_among_them(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        start_of = {block.start: block.index for block in kernel.blocks}
        for block in kernel.blocks:
            assert all(block.index in kernel.blocks[s].predecessors for s in block.successors)
            assert all(block.index in kernel.blocks[p].successors for p in block.predecessors)
            last = kernel.instructions[block.end - 1]
            if last.base == "BRA":
                word = (last.low, last.high)
                target = relative_target(last.line.opcode, last.offset, word, kernel.sm)
                assert target is not None
                assert start_of[target // 16] in block.successors
            if last.base not in TERMINATORS or last.line.guard:
                reached = block.index + 1 == len(kernel.blocks) or block.index + 1 in (
                    *block.successors,
                )
                assert reached, f"{kernel.name} {last}"


def test_a_loop_is_found_where_there_is_one(kernels_of: Callable[[str], list[Kernel]]) -> None:
    (gemm,) = kernels_of("triton_batched_gemm_128x128x64_w8_s4_sm90")
    loops = natural_loops(gemm)
    inside = [
        item.base
        for loop in loops
        for block in loop.blocks
        for item in gemm.instructions[gemm.blocks[block].start : gemm.blocks[block].end]
    ]
    assert "HGMMA" in inside
    deep = depths(gemm, loops)
    assert deep[0] == 0
    assert max(deep) >= 1


def test_control_flow_and_relative_instructions_are_pinned(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        for item in kernel.instructions:
            if item.base in TERMINATORS or item.base == "BSSY":
                assert item.pinned, str(item)
