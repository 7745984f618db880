"""Numpy values in device memory, with no framework: for checks and examples.

Not for speed: every array is a `cuMemAlloc` of its own and copies wait for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.runtime.driver import CudaDevice
from warploom.runtime.encoding import Bits, bits_type, decode, encode
from warploom.tile.dtypes import DType, dtype


class DeviceArray:
    """A row-major array of an element type on a device."""

    def __init__(self, device: CudaDevice, values: NDArray[Any], kind: DType | str) -> None:
        self.shape, self.kind = tuple(values.shape), dtype(kind)
        self._device = device
        codes = _encode(values, self.kind)
        self._count = codes.nbytes
        # A length of 0 has an address too, as every tensor library gives it one or 0.
        self.address = device.allocate(max(self._count, 16))
        if self._count:
            device.upload(self.address, codes.tobytes())

    @property
    def dtype(self) -> str:
        """The name tensor libraries give the element type."""
        return self.kind.library

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol; the type string says only the width."""
        return {
            "shape": self.shape,
            "typestr": f"<V{self.kind.bytes}",
            "data": (self.address, False),
            "version": 3,
        }

    def numpy(self) -> NDArray[Any]:
        """The values as float32, int32 or bool, once what the device queued before is done."""
        raw = self._device.download(self.address, self._count) if self._count else b""
        codes = np.frombuffer(raw, bits_type(self.kind)).reshape(self.shape)
        if not self.kind.is_float:
            return codes.view(self.kind.library)
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(codes, self.kind).astype(np.float32)

    def free(self) -> None:
        """Give the memory back; the array is not used again."""
        self._device.free(self.address)


def _encode(values: NDArray[Any], kind: DType) -> Bits:
    if kind.is_float:
        return encode(np.asarray(values, np.float32), kind)
    return np.ascontiguousarray(values, kind.library).view(bits_type(kind))
