"""Shared-memory layouts: what TMA writes is what wgmma reads and what stmatrix wrote."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codegen.hardware import hardware_address

from warploom.codegen.ir.layout import (
    CORE_ROWS,
    MAX_BOX,
    MAX_ROWS,
    Operand,
    SharedTile,
    boxes,
    shared_tile,
    swizzle,
)
from warploom.errors import InputError
from warploom.tile import BF16, E4M3, FP32, TileType

WIDTHS = (128, 64, 32)


@pytest.mark.parametrize("width", WIDTHS)
def test_swizzle_is_its_own_inverse_and_stays_in_eight_rows(width):
    size = 8 * width
    seen = {swizzle(address, width) for address in range(size)}
    assert seen == set(range(size))
    assert all(swizzle(swizzle(a, width), width) == a for a in range(4 * size))


def test_a_column_of_chunks_touches_every_bank_once():
    banks = [swizzle(row * 128 + 32, 128) % 128 // 16 for row in range(8)]
    assert sorted(banks) == list(range(8))


@given(
    rows=st.sampled_from([8, 64, 128, 176, 256]),
    cols=st.sampled_from([32, 64, 96, 128, 256]),
    kind=st.sampled_from([BF16, E4M3, FP32]),
)
def test_every_element_has_its_own_address(rows, cols, kind):
    tile = shared_tile(TileType(kind, (("r", rows), ("c", cols))))
    step = 16 // kind.bytes
    addresses = {tile.address(r, c) for r in range(rows) for c in range(0, cols, step)}
    assert len(addresses) == rows * cols // step
    assert max(addresses) < tile.bytes == rows * cols * kind.bytes


def _instruction(operand, step, first, mn, element):
    """Addresses that an instruction reads: descriptor words, hardware rule, 32 bytes of K."""
    low, high = operand.words()
    start = operand.offset(step, first)
    assert start % 16 == 0
    depth = 32 // element
    return {
        (m, k): hardware_address(low + start // 16, high, operand.k_major, m, k, element)
        for m in range(mn)
        for k in range(depth)
    }


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("element", [1, 2])
def test_k_major_descriptors_read_what_tma_wrote(rows, cols, element):
    kind = {1: E4M3, 2: BF16}[element]
    tile = shared_tile(TileType(kind, (("m", rows), ("k", cols))))
    operand = Operand(tile, k_major=True)
    for step, first in itertools.product(range(operand.steps), (0, rows - 64)):
        for (m, k), at in _instruction(operand, step, first, 64, element).items():
            assert at == tile.address(first + m, step * (32 // element) + k)


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [16, 64, 176])
def test_mn_major_descriptors_read_what_tma_wrote(rows, cols):
    tile = shared_tile(TileType(BF16, (("k", rows), ("n", cols))))
    operand = Operand(tile, k_major=False)
    firsts = {0, cols // 2 if cols // 2 % tile.panel_cols == 0 else 0}
    for step, first in itertools.product(range(operand.steps), firsts):
        for (n, k), at in _instruction(operand, step, first, cols - first, 2).items():
            assert at == tile.address(step * 16 + k, first + n)


def test_a_wrong_stride_is_noticed():
    tile = shared_tile(TileType(BF16, (("k", 64), ("n", 128))))
    low, high = Operand(tile, k_major=False).words()
    broken = hardware_address(low + (1 << 16), high, False, 64, 0, 2)
    assert broken != tile.address(0, 64)


@pytest.mark.parametrize("width", WIDTHS)
def test_stmatrix_addresses_are_those_tma_reads(width):
    # The emitted expression: row * width + chunk * 16, XORed with its own bits.
    tile = SharedTile(64, width // 2, 2, width)
    for warp, lane, j in itertools.product(range(4), range(32), range(0, width // 16, 2)):
        row, chunk = warp * 16 + lane % 16, j + lane // 16
        at = row * width + chunk * 16
        mask = {128: 0x70, 64: 0x30, 32: 0x10}[width]
        assert at ^ (at >> 3 & mask) == tile.address(row, chunk * 8)


def test_tall_tiles_are_copied_in_boxes_of_whole_core_matrices():
    for rows in range(CORE_ROWS, MAX_ROWS + 1, CORE_ROWS):
        high = rows // boxes(rows)
        assert high * boxes(rows) == rows and high <= MAX_BOX and high % CORE_ROWS == 0
    assert boxes(256) == 1 and boxes(320) == 2


def test_what_cannot_go_through_shared_memory_is_refused():
    with pytest.raises(InputError, match="multiple of 32 B"):
        shared_tile(TileType(BF16, (("m", 64), ("k", 20))))
    with pytest.raises(InputError, match="at most 512"):
        shared_tile(TileType(BF16, (("m", 520), ("k", 64))))
    with pytest.raises(InputError, match="two-dimensional"):
        shared_tile(TileType(BF16, (("m", 64),)))
