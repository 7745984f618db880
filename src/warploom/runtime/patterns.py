"""Input patterns: what the buffers of a test are filled with, reproducible to the last bit.

Every element is a pure function of (seed, salt of the buffer, index), computed in integers and
exact fp32 steps, so that the device's fill kernel and `generate` below agree bit for bit on any
machine. A failing sample is replayed from its seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.runtime.encoding import Bits, bits_type, encode
from warploom.tile.dtypes import DType

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_SPECIALS = (float("nan"), float("inf"), float("-inf"), -0.0, 2.0**-130)


@dataclass(frozen=True)
class Pattern:
    """A way to fill a buffer; `code` is its number in the device kernel."""

    code: int
    name: str
    meaning: str


_TABLE = (
    Pattern(0, "randn", "sum of twelve uniforms: mean 0, variance 1, range +-6"),
    Pattern(1, "uniform", "uniform in [-1, 1)"),
    Pattern(2, "large", "uniform, scaled up by a power of two of the dtype's"),
    Pattern(3, "small", "uniform, scaled down by a power of two of the dtype's"),
    Pattern(4, "integers", "whole numbers -4..4: sums are exact, so a lost term shows"),
    Pattern(5, "one_hot", "one 1 in each row of the last axis, the rest 0: shows permutations"),
    Pattern(6, "alternating", "sign by parity, magnitude 0.5..1.5: sums cancel"),
    Pattern(7, "constant", "one value everywhere, 0.5..1.5: hides indices, shows counts"),
    Pattern(8, "ramp", "index modulo 4096, from -8 in steps of 1/256: shows wrong addresses"),
    Pattern(9, "strided", "randn at every seventh element, 0 between"),
    Pattern(10, "special", "randn with 5 in 64 of NaN, +inf, -inf, -0 and a subnormal"),
)
PATTERNS: dict[str, Pattern] = {pattern.name: pattern for pattern in _TABLE}
# Powers of two by which `large` and `small` scale: far from 1, but safely inside the type's range.
SCALES: dict[str, tuple[int, int]] = {"fp16": (7, -12), "e4m3": (6, -7), "e5m2": (10, -12)}
WIDE = (40, -40)
# NaN and infinity are for kernels that define them: only where asked.
DEFAULT_PATTERNS: tuple[str, ...] = tuple(name for name in PATTERNS if name != "special")


def check_patterns(names: tuple[str, ...]) -> None:
    """Raise `InputError` on an unknown pattern or none, or more than the device takes (16)."""
    for name in names:
        if name not in PATTERNS:
            raise InputError(f"unknown pattern {name!r}: expected some of {', '.join(PATTERNS)}")
    if not 1 <= len(names) <= 16:
        raise InputError(f"{len(names)} patterns given, expected 1 to 16")


def scales(dtype: DType) -> tuple[float, float]:
    """The factors of the patterns `large` and `small` in a type."""
    large, small = SCALES.get(dtype.name, WIDE)
    return 2.0**large, 2.0**small


def mix(value: int) -> int:
    """The splitmix64 finaliser on one 64-bit word."""
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, salt: int) -> int:
    """The key of one buffer's stream of random words; `salt` tells the buffers apart."""
    return mix((mix(seed & _MASK) + salt * GOLDEN) & _MASK)


def generate(
    dtype: DType,
    count: int,
    pattern: str,
    seed: int,
    salt: int = 0,
    inner: int = 1,
    span: tuple[int, int] = (0, 8),
) -> Bits:
    """`count` elements as raw bits: [count].

    `inner` is the length of the last axis (for `one_hot`). Integer types ignore the pattern and are
    uniform in the `span` [low, high): they are mostly indices, which must stay in range.
    """
    check_patterns((pattern,))
    key = stream_key(seed, salt)
    index = np.arange(count, dtype=np.uint64)
    if dtype.kind != "float":
        low, high = span
        value = (_words(key, index, 0) % np.uint64(high - low)).astype(np.int64) + low
        return value.astype(np.int64).view(np.uint64).astype(bits_type(dtype))
    return encode(_values(pattern, key, index, max(inner, 1), dtype), dtype)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_2)
    return value ^ (value >> np.uint64(31))


def _words(key: int, index: npt.NDArray[np.uint64], lane: int) -> npt.NDArray[np.uint64]:
    """The random word number 3 * index + lane of a stream."""
    counter = index * np.uint64(3) + np.uint64(lane + 1)
    return _mix(np.uint64(key) + counter * np.uint64(GOLDEN))


def _uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    whole = (words >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return whole.astype(np.float32) * np.float32(2.0**-23)


def _randn(key: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    total = np.zeros(index.shape, dtype=np.int64)
    for lane in range(3):
        word = _words(key, index, lane)
        for shift in (0, 16, 32, 48):
            total += ((word >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return (total - 393210).astype(np.float32) * np.float32(2.0**-16)


def _magnitude(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    return np.float32(1.0) + _uniform(words) * np.float32(0.5)


def _values(
    pattern: str, key: int, index: npt.NDArray[np.uint64], inner: int, dtype: DType
) -> npt.NDArray[np.float32]:
    first = _words(key, index, 0)
    if pattern == "randn":
        return _randn(key, index)
    if pattern == "uniform":
        return _uniform(first)
    if pattern in ("large", "small"):
        return _uniform(first) * np.float32(scales(dtype)[pattern == "small"])
    if pattern == "integers":
        whole = ((first >> np.uint64(32)) % np.uint64(9)).astype(np.int64) - 4
        return whole.astype(np.float32)
    if pattern == "one_hot":
        row, column = index // np.uint64(inner), index % np.uint64(inner)
        hot = _mix(np.uint64(key) + (row + np.uint64(1)) * np.uint64(MIX_1)) % np.uint64(inner)
        return (column == hot).astype(np.float32)
    if pattern == "alternating":
        odd = (index & np.uint64(1)).astype(bool)
        return np.where(odd, -_magnitude(first), _magnitude(first))
    if pattern == "constant":
        return np.broadcast_to(_magnitude(_words(key, np.zeros(1, np.uint64), 0)), index.shape)
    if pattern == "ramp":
        step = (index & np.uint64(0xFFF)).astype(np.int64).astype(np.float32)
        return step * np.float32(2.0**-8) - np.float32(8.0)
    if pattern == "strided":
        zero = np.float32(0.0)
        return np.where(index % np.uint64(7) == 0, _randn(key, index), zero)
    which = (_words(key, index, 2) >> np.uint64(32)) % np.uint64(64)
    table = np.array([*_SPECIALS, 0.0], dtype=np.float32)
    special = table[np.minimum(which, np.uint64(5)).astype(np.int64)]
    return np.where(which < 5, special, _randn(key, index))
