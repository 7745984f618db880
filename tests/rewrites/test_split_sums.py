"""Sums in parts through memory: two programs that mean the textbook."""

from dataclasses import replace

import numpy as np
import pytest
from tests.rewrites.test_rules import arrays_of
from tests.rewrites.textbooks import attention, matmul

from warploom.errors import CheckFailed
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.rewrites.accumulators import swap_operands
from warploom.rewrites.check import check_meaning
from warploom.rewrites.replay import NotApplicable
from warploom.rewrites.split_sums import split_sums
from warploom.tile import verify

TILE = (8, 32)


def arrays_for(program, parts, **sizes):
    found = arrays_of(program, 3, **sizes)
    return found | {"parts": np.full((parts, sizes["m"], sizes["n"]), np.nan)}


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "activation": "gelu"}, {"residual": True}], ids=str
)
@pytest.mark.parametrize("shape", [(64, 64, 128), (100, 130, 70), (1, 9, 33)], ids=str)
@pytest.mark.parametrize("parts", [2, 5])
def test_two_programs_mean_the_textbook(options, shape, parts) -> None:
    program = matmul(**options)
    sizes = dict(zip("mnk", shape, strict=True))
    split = split_sums(program, parts, TILE)
    for one in (split.first, split.second):
        verify(one)
    arrays = arrays_for(program, parts, **sizes)
    check_meaning(program, [split.first, split.second], arrays)
    check_meaning(program, [swap_operands(split.first), split.second], arrays)
    assert [one.name for one in split.first.arrays] == ["a", "b", "parts"]
    assert "a" not in [one.name for one in split.second.arrays]


def test_a_part_that_no_task_stored_is_seen() -> None:
    """A planted fault: the second program adds up one part more than there are."""
    program = matmul()
    whole, less = split_sums(program, 3, TILE), split_sums(program, 2, TILE)
    arrays = arrays_for(program, 3, m=64, n=64, k=128)
    with pytest.raises(CheckFailed, match="difference of"):
        check_meaning(program, [less.first, whole.second], arrays)


def test_programs_that_have_no_place_for_it_say_so() -> None:
    with pytest.raises(NotApplicable, match="at least 2 parts"):
        split_sums(matmul(), 1, TILE)
    with pytest.raises(NotApplicable, match="in a loop that should add up products"):
        split_sums(attention(), 2, TILE)
    with pytest.raises(NotApplicable, match="its grid has batch_tile"):
        split_sums(gemm(GemmConfig(batched=True)), 2, TILE)


def test_sums_of_gemm_in_memory_are_of_its_textbook() -> None:
    config = GemmConfig(slices=4, bias=True)
    textbook = gemm(replace(config, slices=1))
    assert gemm(config) == split_sums(textbook, 4, TILE).first
