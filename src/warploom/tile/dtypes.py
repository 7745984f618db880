"""Element types and the rounding the hardware does when a value is converted to one.

The interpreter keeps every floating tile as float32 numpy data whose values are representable in
the tile's type; `round_to` is the only place where that is brought about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError


@dataclass(frozen=True)
class DType:
    """An element type.

    `mantissa` is the number of stored fraction bits, `least` the exponent of the smallest normal
    number, `largest` the largest finite value. `saturate` says what a conversion does above it:
    clamp (the fp8 types: `cvt.rn.satfinite`, PTX ISA 9.7.9) or infinity (IEEE).
    """

    name: str
    bits: int
    kind: str
    mantissa: int = 0
    least: int = 0
    largest: float = 0.0
    saturate: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating type."""
        return self.kind == "float"

    def __str__(self) -> str:
        return self.name


FP32 = DType("fp32", 32, "float", 23, -126, float(np.finfo(np.float32).max))
BF16 = DType("bf16", 16, "float", 7, -126, 3.3895313892515355e38)
FP16 = DType("fp16", 16, "float", 10, -14, 65504.0)
E4M3 = DType("e4m3", 8, "float", 3, -6, 448.0, saturate=True)
E5M2 = DType("e5m2", 8, "float", 2, -14, 57344.0, saturate=True)
# Not a type of programs: the interpreter's own, for results without rounding (`tile.widen`).
FP64 = DType("fp64", 64, "float", 52, -1022, float(np.finfo(np.float64).max))
INT32 = DType("int32", 32, "int")
BOOL = DType("bool", 8, "bool")

DTYPES = {t.name: t for t in (FP32, BF16, FP16, E4M3, E5M2, INT32, BOOL)}


def dtype(name: str | DType) -> DType:
    """The type of that name; raises `InputError` listing the known ones."""
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not known, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def storage_of(kind: DType) -> type[np.generic]:
    """The numpy type that holds such a tile in the interpreter."""
    if kind is FP64:
        return np.float64
    return {"float": np.float32, "int": np.int32, "bool": np.bool_}[kind.kind]


def round_to(kind: DType, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Convert `values` to `kind`, rounding to nearest even once; keeps the shape.

    NaN stays NaN, infinities stay infinite except in a saturating type, where they become the
    largest finite value of their sign. Conversion to int32 truncates toward zero and saturates
    (`cvt.rzi.s32.f32`), with NaN giving 0.
    """
    if kind.kind == "bool":
        return values.astype(np.bool_)
    if kind.kind == "int":
        return _to_int32(values)
    if kind is FP64:
        return values.astype(np.float64, copy=False)
    if kind is FP32:
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    return _round_float(kind, values.astype(np.float64))


def _to_int32(values: NDArray[np.generic]) -> NDArray[np.generic]:
    if values.dtype.kind in "iub":
        return values.astype(np.int32)
    info = np.iinfo(np.int32)
    whole = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0, posinf=2e10, neginf=-2e10)
    return np.clip(whole, info.min, info.max).astype(np.int32)


def spacing(kind: DType, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance between neighbouring numbers of a floating type at finite `values`.

    It is 2^(max(exponent(x), least) - mantissa); twice the unit roundoff, relative to a power of 2.
    """
    _, exponent = np.frexp(values)
    exponent = np.where(values == 0, kind.least, np.maximum(exponent - 1, kind.least))
    return np.ldexp(1.0, exponent - kind.mantissa)


def _round_float(kind: DType, exact: NDArray[np.float64]) -> NDArray[np.generic]:
    # Dividing by a power of two is exact and rint rounds half to even: one correct rounding.
    finite = np.isfinite(exact)
    magnitude = np.where(finite, exact, 0.0)
    step = spacing(kind, magnitude)
    rounded = np.where(finite, np.rint(magnitude / step) * step, exact)
    over = np.abs(rounded) > kind.largest
    limit = kind.largest if kind.saturate else np.inf
    rounded = np.where(over, np.copysign(limit, rounded), rounded)
    rounded = np.where(np.isnan(exact), np.nan, rounded)
    # A value that underflows keeps its sign, as the hardware's does.
    return np.copysign(rounded, exact).astype(np.float32)
