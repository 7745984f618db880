"""Rounding: against the definition (nearest representable value, ties to even), value by value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.tile.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32, dtype, round_to, round_wide

SMALL = (E4M3, E5M2)


def representable(kind):
    """Every finite non-negative value of an 8-bit type, from its bit patterns."""
    values = []
    exponents = kind.bits - 1 - kind.mantissa
    bias = 1 - kind.least
    for code in range(1 << (kind.bits - 1)):
        exponent, fraction = code >> kind.mantissa, code & ((1 << kind.mantissa) - 1)
        if exponent == 0:
            value = fraction * 2.0 ** (kind.least - kind.mantissa)
        else:
            value = (1 + fraction / 2**kind.mantissa) * 2.0 ** (exponent - bias)
        if value <= kind.largest:
            values.append(value)
    assert exponents > 0
    return np.array(sorted(values))


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_representable_values_stay(kind):
    values = representable(kind)
    assert np.array_equal(round_to(kind, values), values.astype(np.float32))
    assert np.array_equal(round_to(kind, -values), -values.astype(np.float32))


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_midpoints_go_to_even_and_neighbours_to_the_nearest(kind):
    values = representable(kind)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    assert np.array_equal(round_to(kind, middle), even.astype(np.float32))
    assert np.array_equal(round_to(kind, np.nextafter(middle, 0)), low.astype(np.float32))
    assert np.array_equal(round_to(kind, np.nextafter(middle, np.inf)), high.astype(np.float32))


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_fp8_saturates_and_keeps_nan(kind):
    got = round_to(kind, np.array([1e9, -1e9, np.inf, np.nan]))
    # cvt.satfinite clamps infinities too; we keep that for finite values and infinities alike
    assert got[0] == kind.largest and got[1] == -kind.largest
    assert got[2] in (kind.largest, np.inf) and np.isnan(got[3])


@given(st.floats(width=32, allow_nan=False))
def test_fp16_agrees_with_numpy(value):
    with np.errstate(over="ignore"):
        want = np.float32(value).astype(np.float16).astype(np.float32)
    assert round_to(FP16, np.array([value]))[0] == want


@pytest.mark.parametrize("kind", [BF16, FP16], ids=str)
def test_words_of_fp32_are_rounded_as_wider_numbers_are(kind):
    """Beside every upper half of a word, lower halves at and next to the middle."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)) | lower
    values = words.view(np.float32)
    got, numbers = round_to(kind, values), ~np.isnan(values)
    want = round_wide(kind, np.where(numbers, values, 0.0).astype(np.float64))
    assert got.dtype == np.float32 and np.isnan(got[~numbers]).all()
    assert np.array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


@given(st.integers(0, 2**32 - 1))
def test_bf16_agrees_with_the_bit_trick(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    got = round_to(BF16, value)
    if np.isnan(value[0]):
        assert np.isnan(got[0])
        return
    raw = np.uint64(bits)
    rounded = (raw + np.uint64(0x7FFF) + ((raw >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    want = np.array([int(rounded) << 16], np.uint32).view(np.float32)
    assert got[0] == want[0] and np.signbit(got[0]) == np.signbit(want[0])


def test_int32_truncates_saturates_and_sends_nan_to_zero():
    got = round_to(INT32, np.array([1.9, -1.9, 1e20, -1e20, np.nan]))
    assert got.tolist() == [1, -1, 2**31 - 1, -(2**31), 0]


def test_fp32_is_the_identity_on_float32():
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    assert np.array_equal(round_to(FP32, values), values)


def test_unknown_dtype_is_refused():
    with pytest.raises(InputError, match=r"bf8.*expected one of.*bf16"):
        dtype("bf8")
