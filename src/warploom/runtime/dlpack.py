"""Reading a DLPack capsule: the C structures of the protocol, versions 0 and 1, by ctypes.

Layout: dlpack.h of https://github.com/dmlc/dlpack (v1.1); the capsule's rules: the array API's
`__dlpack__`. The capsule stays unconsumed, so its own destructor returns the producer's memory; the
caller of a launch keeps the tensor, as with any kernel launch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from warploom.errors import InputError

GPU_PLACES = (2, 13)  # kDLCUDA, kDLCUDAManaged
READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
# (DLDataTypeCode, bits) -> name
NAMES = {
    (0, 8): "int8",
    (0, 32): "int32",
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class Described:
    """A capsule's content; `strides` in elements, None for row-major."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    read_only: bool


def _pointer(capsule: Any, kind: bytes) -> int | None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.restype = ctypes.c_int
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    if not api.PyCapsule_IsValid(capsule, kind):
        return None
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, kind)


def read(capsule: Any, name: str) -> Described:
    """The tensor a capsule describes; raises `InputError` for what is no unused DLPack capsule."""
    flags = 0
    if (at := _pointer(capsule, b"dltensor_versioned")) is not None:
        versioned = _Versioned.from_address(at)
        if versioned.major != 1:
            raise InputError(
                f"array {name}: DLPack version {versioned.major}.{versioned.minor}, expected 1.x"
            )
        tensor, flags = versioned.tensor, int(versioned.flags)
    elif (at := _pointer(capsule, b"dltensor")) is not None:
        tensor = _Tensor.from_address(at)
    else:
        raise InputError(f"array {name}: __dlpack__ gave {capsule!r}, no unused DLPack capsule")
    rank = int(tensor.ndim)
    kind = (int(tensor.code), int(tensor.bits))
    if int(tensor.lanes) != 1:
        raise InputError(f"array {name}: elements of {tensor.lanes} lanes, expected 1")
    return Described(
        int(tensor.data or 0) + int(tensor.byte_offset),
        tuple(tensor.shape[d] for d in range(rank)),
        tuple(tensor.strides[d] for d in range(rank)) if tensor.strides else None,
        NAMES.get(kind, f"DLPack type code {kind[0]} with {kind[1]} bits"),
        bool(flags & READ_ONLY),
    )
