"""Numpy values in device memory, with a driver whose memory is the host's."""

import ctypes

import numpy as np
import pytest

from warploom.errors import DeviceError
from warploom.runtime import arrays
from warploom.runtime.arrays import DeviceArray
from warploom.runtime.tensors import view

real = pytest.importorskip("cuda.bindings.driver")


class HostMemory:
    """cuMemAlloc and its like on the heap; `full` refuses."""

    CUresult = real.CUresult

    def __init__(self, full=False):
        self.full, self.held = full, {}

    def cuMemAlloc(self, count):  # noqa: N802
        if self.full:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        buffer = ctypes.create_string_buffer(count)
        self.held[ctypes.addressof(buffer)] = buffer
        return real.CUresult.CUDA_SUCCESS, ctypes.addressof(buffer)

    def cuMemcpyHtoD(self, to, source, count):  # noqa: N802
        ctypes.memmove(to, source, count)
        return (real.CUresult.CUDA_SUCCESS,)

    cuMemcpyDtoH = cuMemcpyHtoD  # noqa: N815

    def cuCtxSynchronize(self):  # noqa: N802
        return (real.CUresult.CUDA_SUCCESS,)

    def cuMemFree(self, address):  # noqa: N802
        del self.held[address]
        return (real.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def memory(monkeypatch):
    made = HostMemory()
    monkeypatch.setattr(arrays, "import_binding", lambda name: made)
    return made


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "e4m3", "e5m2", "int32", "bool"])
def test_what_goes_in_comes_out(memory, kind):
    values = np.array([[0, 1, -2], [4, 8, 96]], np.float32)
    values = np.abs(values) > 1 if kind == "bool" else values
    made = DeviceArray(values, kind)
    assert np.array_equal(made.numpy(), values)
    found = view(made, "x")
    assert (found.address, found.shape, found.strides, found.dtype) == (
        made.address, (2, 3), (3, 1), kind,
    )  # fmt: skip
    made.free()
    assert not memory.held


def test_a_length_of_0_has_an_address(memory):
    made = DeviceArray(np.zeros((0, 4)), "bf16")
    assert made.address in memory.held and made.numpy().shape == (0, 4)


def test_a_refusal_of_the_driver_is_named(monkeypatch):
    monkeypatch.setattr(arrays, "import_binding", lambda name: HostMemory(full=True))
    with pytest.raises(DeviceError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceArray(np.zeros(4), "fp32")
