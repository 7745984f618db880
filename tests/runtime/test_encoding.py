"""Rounding to narrow types is exact, against numpy's own fp16 and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.runtime.encoding import bits_type, decode, encode
from warploom.tile.dtypes import MEMORY, DType, dtype

FLOATS = [dtype for dtype in MEMORY.values() if dtype.kind == "float"]
NARROW = ["bf16", "fp16", "e4m3", "e5m2"]


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_fp16_agrees_with_numpy(values: list[float]) -> None:
    array = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        expected = array.astype(np.float16)
    ours = encode(array, MEMORY["fp16"])
    nan = np.isnan(array)
    assert np.array_equal(ours[~nan], expected.view(np.uint16)[~nan])
    assert np.all(np.isnan(decode(ours[nan], MEMORY["fp16"])))


@pytest.mark.parametrize("name", NARROW)
@given(value=st.floats(-1e6, 1e6, width=32))
def test_rounding_picks_the_nearest_code(name: str, value: float) -> None:
    kind = MEMORY[name]
    codes = np.arange(1 << (8 * kind.bytes), dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        table = decode(codes.astype(np.uint8 if kind.bytes == 1 else np.uint16), kind)
    finite = table[np.isfinite(table)]
    got = decode(encode(np.array([value], np.float32), kind), kind)[0]
    if abs(value) > finite.max():
        assert not np.isfinite(got) or abs(got) == finite.max()
        return
    assert (
        abs(got - np.float64(np.float32(value)))
        == np.abs(finite - np.float64(np.float32(value))).min()
    )


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_every_code_survives_decode_and_encode(kind: DType) -> None:
    if kind.bytes > 2:
        codes = encode(np.random.default_rng(0).standard_normal(1000).astype(np.float32), kind)
    else:
        width = np.uint8 if kind.bytes == 1 else np.uint16
        codes = np.arange(1 << (8 * kind.bytes)).astype(width)
    values = decode(codes, kind)
    keep = ~np.isnan(values)
    again = encode(values[keep].astype(np.float32), kind)
    assert np.array_equal(again, codes[keep])


@pytest.mark.parametrize(("name", "nan"), [("e4m3", 0x7F), ("e5m2", 0x7F), ("bf16", 0x7FFF)])
def test_nan_and_overflow(name: str, nan: int) -> None:
    kind = MEMORY[name]
    assert encode(np.array([np.nan], np.float32), kind)[0] & nan == nan
    top = decode(encode(np.array([np.inf, 3e38], np.float32), kind), kind)
    assert np.all(np.isinf(top) if kind.has_infinity and name != "bf16" else ~np.isfinite(top[:1]))


def test_poison_is_nan_in_every_float_type() -> None:
    for kind in FLOATS:
        raw = np.frombuffer(b"\xff" * kind.bytes, bits_type(kind))
        assert np.isnan(decode(raw, kind)).all()


def test_integers_decode_signed_and_unsigned() -> None:
    raw = np.array([0xFF], np.uint8)
    assert decode(raw, MEMORY["i8"])[0] == -1
    assert decode(raw, MEMORY["u8"])[0] == 255
    with pytest.raises(InputError, match="needs a float dtype"):
        encode(np.zeros(1, np.float32), MEMORY["i8"])


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"dtype 'half' is not known.*bf16"):
        dtype("half", MEMORY)
