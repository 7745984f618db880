"""Numpy values in device memory, with a device whose memory is the host's."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from tests.runtime.fake_device import FakeDevice

from warploom.runtime.arrays import DeviceArray
from warploom.runtime.driver import CudaDevice
from warploom.runtime.tensors import view


def made_of(values: object, kind: str) -> DeviceArray:
    return DeviceArray(cast(CudaDevice, FakeDevice()), np.asarray(values), kind)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "e4m3", "e5m2", "int32", "bool"])
def test_what_goes_in_comes_out(kind: str) -> None:
    values = np.array([[0, 1, -2], [4, 8, 96]], np.float32)
    values = np.abs(values) > 1 if kind == "bool" else values
    made = made_of(values, kind)
    assert np.array_equal(made.numpy(), values)
    found = view(made, "x")
    assert (found.address, found.shape, found.strides, found.dtype) == (
        made.address, (2, 3), (3, 1), kind,
    )  # fmt: skip
    made.free()


def test_a_length_of_0_has_an_address() -> None:
    made = made_of(np.zeros((0, 4)), "bf16")
    assert made.address and made.numpy().shape == (0, 4)
