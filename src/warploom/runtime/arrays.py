"""Numpy values in device memory, with no framework: for checks and examples.

Not for speed: every array is a `cuMemAlloc` of its own and copies wait for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.errors import DeviceError
from warploom.runtime.bindings import import_binding
from warploom.runtime.dtypes import decode, dtype_named, encode
from warploom.runtime.tensors import ALIASES

_NAMES = {ours: theirs for theirs, ours in ALIASES.items()}
_TYPES = {"int32": np.int32, "bool": np.bool_}  # the others are floating types, kept as codes


class DeviceArray:
    """A row-major array of our element type `dtype` on the current device."""

    def __init__(self, values: NDArray[Any], dtype: str) -> None:
        self.shape, self.kind = tuple(values.shape), dtype
        self._driver = import_binding("driver")
        codes = _encode(values, dtype)
        self._count, self._bits = codes.nbytes, codes.dtype
        # A length of 0 has an address too, as every tensor library gives it one or 0.
        self.address = int(self._call("cuMemAlloc", max(self._count, 16)))
        if self._count:
            self._call("cuMemcpyHtoD", self.address, codes.ctypes.data, self._count)

    @property
    def dtype(self) -> str:
        """The name tensor libraries give the element type."""
        return _NAMES[self.kind]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol; the type string says only the width."""
        return {
            "shape": self.shape,
            "typestr": f"<V{self._bits.itemsize}",
            "data": (self.address, False),
            "version": 3,
        }

    def numpy(self) -> NDArray[Any]:
        """The values as float32, int32 or bool, once everything queued before is done."""
        self._call("cuCtxSynchronize")
        codes = np.empty(self.shape, self._bits)
        if self._count:
            self._call("cuMemcpyDtoH", codes.ctypes.data, self.address, self._count)
        if self.kind in _TYPES:
            return codes.view(_TYPES[self.kind])
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(codes, dtype_named(self.kind)).astype(np.float32)

    def free(self) -> None:
        """Give the memory back; the array is not used again."""
        self._call("cuMemFree", self.address)

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._driver, name)(*args)
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {result[0].name}")
        return result[1] if len(result) > 1 else None


def _encode(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype in _TYPES:
        kept = np.ascontiguousarray(values, _TYPES[dtype])
        return kept.view(np.uint32 if dtype == "int32" else np.uint8)
    return np.ascontiguousarray(encode(np.asarray(values, np.float32), dtype_named(dtype)))
