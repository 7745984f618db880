"""Elements as bits: exact rounding of fp32 values to every element type, and back.

The rounding is written in integers so that the GPU's fill kernel (`helpers.py`) and this module
give the same bits for every value: inputs made on a device can be made again on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.tile.dtypes import DType

F32_MANTISSA = 23
F32_BIAS = 127

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bits = npt.NDArray[np.unsignedinteger]


def bits_type(dtype: DType) -> type[np.unsignedinteger]:
    """The unsigned numpy type as wide as one element."""
    return _BITS[dtype.bytes]


def encode(values: npt.NDArray[np.float32], dtype: DType) -> Bits:
    """The bits of fp32 `values` in a float `dtype`, rounded to nearest, ties to even.

    Overflow gives infinity, or NaN where the type has none. Values below half the smallest
    subnormal give a signed zero.
    """
    if dtype.kind != "float":
        raise InputError(f"encode needs a float dtype, {dtype.name} is {dtype.kind}")
    if dtype.name == "fp64":
        return values.astype(np.float64).view(np.uint64)
    if dtype.name == "fp32":
        return values.astype(np.float32).view(np.uint32)
    word = values.astype(np.float32).view(np.uint32).astype(np.int64)
    sign, magnitude = word >> 31, word & 0x7FFFFFFF
    to_nan = magnitude > 0x7F800000
    wide = dtype.exponent == 8
    code = _bf16_code(magnitude) if wide else _narrow_code(magnitude, dtype)
    nan = (1 << (dtype.exponent + dtype.mantissa)) - 1
    code = np.where(to_nan, nan, code)
    code |= sign << (dtype.exponent + dtype.mantissa)
    return code.astype(bits_type(dtype))


def _bf16_code(magnitude: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16


def _narrow_code(magnitude: npt.NDArray[np.int64], dtype: DType) -> npt.NDArray[np.int64]:
    """Exponent and mantissa fields of a type narrower than fp32 in both."""
    mantissa = dtype.mantissa
    biased = (magnitude >> F32_MANTISSA) - F32_BIAS + (1 << (dtype.exponent - 1)) - 1
    significand = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = np.minimum(np.maximum(1 - biased, 0), 25 - F32_MANTISSA + mantissa)
    shift = F32_MANTISSA - mantissa + subnormal
    rounded = (significand + (np.int64(1) << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> (
        shift
    )
    code = np.where(biased >= 1, ((biased - 1) << mantissa) + rounded, rounded)
    code = np.where(magnitude < 0x800000, 0, code)
    infinity = ((1 << dtype.exponent) - 1) << mantissa
    if dtype.has_infinity:
        return np.minimum(code, infinity)
    return np.minimum(code, infinity | ((1 << mantissa) - 1))


def decode(bits: Bits, dtype: DType) -> npt.NDArray[np.float64]:
    """The values of `bits` as float64, exactly; integers too (64-bit ones are rounded)."""
    raw = bits.astype(bits_type(dtype), copy=False)
    if dtype.kind == "uint":
        return raw.astype(np.float64)
    if dtype.kind == "int":
        signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.bytes]
        return raw.view(signed).astype(np.float64)
    direct: dict[str, Callable[[], npt.NDArray[np.float64]]] = {
        "fp64": lambda: raw.view(np.float64),
        "fp32": lambda: raw.view(np.float32).astype(np.float64),
        "fp16": lambda: raw.view(np.float16).astype(np.float64),
        "bf16": lambda: (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64),
        # e5m2 is the upper half of fp16
        "e5m2": lambda: (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float64),
        "e4m3": lambda: _decode_e4m3(raw.astype(np.int64)),
    }
    with np.errstate(invalid="ignore"):  # signalling NaN codes are values here, not mistakes
        return direct[dtype.name]()


def _decode_e4m3(code: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    exponent, fraction = (code >> 3) & 15, (code & 7).astype(np.float64) / 8
    normal = np.ldexp(1 + fraction, (exponent - 7).astype(np.int32))
    value = np.where(exponent > 0, normal, np.ldexp(fraction, -6))
    value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value)
