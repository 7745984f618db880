"""TMA descriptors: what the hardware allows of a tensor, and the 128 bytes that describe it.

Rules of `cuTensorMapEncodeTiled` (CUDA driver API): address and pitches are multiples of 16 bytes,
the innermost dimension has stride 1, pitches are below 2^40. A tensor with a dimension of length 0
has no descriptor; one element of scratch memory stands in for it, zero where it is read, so that a
box on it gives what a box outside of any tensor gives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from warploom.errors import InputError
from warploom.runtime.tensors import View

PITCH = 16  # bytes
MOST_PITCH = 1 << 40
MAP_TYPES = {
    "bf16": ("BFLOAT16", 2),
    "fp16": ("FLOAT16", 2),
    "fp32": ("FLOAT32", 4),
    "int32": ("INT32", 4),
    "e4m3": ("UINT8", 1),
    "e5m2": ("UINT8", 1),
}
SECTOR = 32  # bytes: of device memory and of the L2
SCRATCH_BYTES = 512  # two halves: one read (stays zero), one written

Call = Callable[..., Any]


def pitches_of(of: View, element: int) -> list[int]:
    """Bytes from one index to the next of every dimension but the innermost, innermost first.

    A dimension of one element may have any stride in the tensor; it gets a legal one here.
    """
    result: list[int] = []
    for stride, extent in zip(reversed(of.strides[:-1]), reversed(of.shape[:-1]), strict=True):
        pitch = stride * element
        result.append(pitch if extent > 1 else max(PITCH, -(-pitch // PITCH) * PITCH))
    return result


def check(of: View, name: str, purpose: str = "TMA") -> None:
    """Raise `InputError`, with the numbers, for a tensor that no tensor map can describe."""
    if of.dtype not in MAP_TYPES:
        raise InputError(f"array {name}: element type {of.dtype} has no tensor map")
    if 0 in of.shape:
        return
    element = MAP_TYPES[of.dtype][1]
    pitches = pitches_of(of, element)
    if of.address % PITCH:
        raise InputError(
            f"array {name}: address {of.address:#x} must be a multiple of {PITCH} B for {purpose}, "
            f"it is {of.address % PITCH} B past one; start the view at a multiple of "
            f"{PITCH // element} elements"
        )
    if any(pitch % PITCH for pitch in pitches):
        raise InputError(
            f"array {name}: pitches {pitches} B must be multiples of {PITCH} B for {purpose}; pad "
            f"its last dimension of {of.shape[-1]} to a multiple of {PITCH // element} elements"
        )
    if any(not 0 < pitch < MOST_PITCH for pitch in pitches):
        raise InputError(
            f"array {name}: pitches {pitches} B must be between 1 and 2^40 - 1 for {purpose}; copy "
            "an expanded or reversed view first"
        )


def promotion(pitches: Sequence[int]) -> str:
    """How much the L2 fetches at a time; where rows straddle sectors, only what is asked for.

    Measured on an H200 (GEMM 128x256, random bf16): 2 to 4 % at 5000^3, 4000x6008x3000 and
    12345x1544x3080, whose pitches are odd multiples of 16 B; 12 to 16 % on zeros.
    """
    return "NONE" if any(pitch % SECTOR for pitch in pitches) else "L2_256B"


def encode(driver: Any, call: Call, parameter: Mapping[str, Any], of: View, scratch: int) -> bytes:
    """The descriptor of one parameter for one tensor; `check` has passed."""
    name, element = MAP_TYPES[of.dtype]
    rank = len(of.shape)
    address, shape, pitches = of.address, of.shape, pitches_of(of, element)
    if 0 in shape:
        address = scratch + (SCRATCH_BYTES // 2 if parameter.get("written") else 0)
        shape, pitches = (1,) * rank, [PITCH] * (rank - 1)
    encoded = call(
        "cuTensorMapEncodeTiled",
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        rank,
        address,
        [driver.cuuint64_t(extent) for extent in reversed(shape)],
        [driver.cuuint64_t(pitch) for pitch in pitches],
        [driver.cuuint32_t(extent) for extent in parameter["box"]],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{parameter['swizzle']}B"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion(pitches)}"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)
