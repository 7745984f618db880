"""Element types, of programs and of memory, and the rounding that converting to one does.

This is the one table of them: what a type is called elsewhere is derived from it. The interpreter
keeps every floating tile as float32 numpy data whose values are representable in the tile's type;
`round_to` is the only place where that is brought about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError


@dataclass(frozen=True)
class DType:
    """An element type.

    `kind` is 'float', 'int', 'uint' or 'bool'; `mantissa` is the number of stored fraction bits;
    `has_infinity` is false where the codes of infinity are numbers, but for one that is NaN.
    `saturate` says what a conversion does above the largest number: clamp (the fp8 types:
    `cvt.rn.satfinite`, PTX ISA 9.7.9) or infinity (IEEE). `library` is the name that numpy, torch
    and JAX give the type.
    """

    name: str
    bits: int
    kind: str
    library: str
    mantissa: int = 0
    has_infinity: bool = True
    saturate: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating type."""
        return self.kind == "float"

    @property
    def exponent(self) -> int:
        """The number of exponent bits; 0 of a type that does not float."""
        return self.bits - 1 - self.mantissa if self.is_float else 0

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        if self.has_infinity:
            return (2 - 2.0**-self.mantissa) * 2.0 ** (1 - self.least)
        return (2 - 2.0 ** (1 - self.mantissa)) * 2.0 ** (2 - self.least)

    @property
    def rate(self) -> str:
        """The name of its products' rate in machine data, where both 8-bit types have one."""
        return "fp8" if self.is_float and self.bits == 8 else self.name

    def __str__(self) -> str:
        return self.name


FP32 = DType("fp32", 32, "float", "float32", 23)
BF16 = DType("bf16", 16, "float", "bfloat16", 7)
FP16 = DType("fp16", 16, "float", "float16", 10)
E4M3 = DType("e4m3", 8, "float", "float8_e4m3fn", 3, has_infinity=False, saturate=True)
E5M2 = DType("e5m2", 8, "float", "float8_e5m2", 2, saturate=True)
# Not a type of programs: the interpreter's own, for results without rounding (`tile.widen`).
FP64 = DType("fp64", 64, "float", "float64", 52)
INT32 = DType("int32", 32, "int", "int32")
INT8 = DType("int8", 8, "int", "int8")  # loaded and cast, not computed with (`tile.typing`)
BOOL = DType("bool", 8, "bool", "bool")

# Types of programs.
DTYPES: Mapping[str, DType] = {t.name: t for t in (FP32, BF16, FP16, E4M3, E5M2, INT32, INT8, BOOL)}
# Names of the floating types of 16 and of 8 bits, which tensor cores multiply.
HALVES, FP8 = (
    tuple(t.name for t in DTYPES.values() if t.is_float and t.bits == bits) for bits in (16, 8)
)
# Types of a launch's buffers and scalars, where 32-bit integers also go by the name "i32".
MEMORY: Mapping[str, DType] = {
    **{t.name: t for t in (FP64, FP32, BF16, FP16, E4M3, E5M2, INT32, INT8)},
    **{
        f"{kind[0]}{bits}": DType(f"{kind[0]}{bits}", bits, kind, f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
        if (kind, bits) != ("int", 32)
    },
    "i32": INT32,
}


def dtype(name: str | DType, known: Mapping[str, DType] = DTYPES) -> DType:
    """The type of that name; raises `InputError` listing the known ones."""
    if isinstance(name, DType):
        return name
    if name not in known:
        raise InputError(f"dtype {name!r} is not known, expected one of {', '.join(known)}")
    return known[name]


def storage_of(kind: DType) -> type[np.generic]:
    """The numpy type that holds such a tile in the interpreter."""
    if kind is FP64:
        return np.float64
    return {"float": np.float32, "int": np.int32, "bool": np.bool_}[kind.kind]


def round_to(kind: DType, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy of `values` converted to `kind`, rounding to nearest even once; keeps the shape.

    NaN stays NaN, infinities stay infinite except in a saturating type, where they become the
    largest finite value of their sign. Conversion to an integer truncates toward zero and
    saturates (`cvt.rzi.s32.f32`), with NaN giving 0.
    """
    if kind.kind == "bool":
        return values.astype(np.bool_)
    if kind.kind == "int":
        return _to_int(values, kind.bits)
    if kind is FP64:
        return values.astype(np.float64)
    if kind is FP32 and values.dtype == np.float32:
        return values.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if kind is FP32:
            return values.astype(np.float32)
        if kind is FP16:
            return values.astype(np.float16).astype(np.float32)
        if kind is BF16 and values.dtype == np.float32:
            return _to_bf16(values)
    return round_wide(kind, values.astype(np.float64))


def _to_bf16(values: NDArray[np.generic]) -> NDArray[np.float32]:
    # The upper half of the words, which have half of the last place added, or just less to even.
    words = values.view(np.uint32)
    odd = words >> np.uint32(16) & np.uint32(1)
    rounded = (words + odd + np.uint32(0x7FFF) & np.uint32(0xFFFF0000)).view(np.float32)
    missing = np.isnan(values)
    return np.where(missing, np.copysign(np.float32(np.nan), values), rounded)


def _to_int(values: NDArray[np.generic], bits: int) -> NDArray[np.generic]:
    info = np.iinfo(f"int{bits}")
    if values.dtype.kind in "iub":
        return values.astype(info.dtype).astype(np.int32)
    whole = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0, posinf=2e10, neginf=-2e10)
    return np.clip(whole, info.min, info.max).astype(np.int32)


def spacing(kind: DType, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance between neighbouring numbers of a floating type at finite `values`.

    It is 2^(max(exponent(x), least) - mantissa); twice the unit roundoff, relative to a power of 2.
    """
    _, exponent = np.frexp(values)
    exponent = np.where(values == 0, kind.least, np.maximum(exponent - 1, kind.least))
    return np.ldexp(1.0, exponent - kind.mantissa)


def round_wide(kind: DType, exact: NDArray[np.float64]) -> NDArray[np.generic]:
    """`round_to` of any floating type, from numbers in float64."""
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
