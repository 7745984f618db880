"""Launching without a GPU: a driver that records calls; everything before the launch is real."""

import ctypes
from pathlib import Path
from typing import ClassVar

import pytest

from warploom.codegen import launch
from warploom.codegen.build import Built, build
from warploom.codegen.launch import Kernel
from warploom.codegen.named import multistage
from warploom.codegen.plan import LaunchPlan
from warploom.errors import DeviceError, InputError
from warploom.kernels.gemm import GemmConfig, gemm

real = pytest.importorskip("cuda.bindings.driver")


class Driver:
    """cuda-bindings' types with every call answered from a table."""

    ANSWERS: ClassVar[dict[str, int]] = {
        "cuOccupancyMaxActiveClusters": 66,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": 1,
        "cuDeviceGetAttribute": 132,
    }

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(real, name)

        def call(*args):
            self.calls.append((name, args))
            if name == "cuTensorMapEncodeTiled":
                return real.CUresult.CUDA_SUCCESS, real.CUtensorMap()
            return real.CUresult.CUDA_SUCCESS, self.ANSWERS.get(name, 0)

        return call

    def last(self, name):
        return [args for called, args in self.calls if called == name][-1]


class Tensor:
    """What a launch reads of a torch tensor."""

    is_cuda = True

    def __init__(self, *shape, dtype="torch.bfloat16", pitch=None, address=1 << 20):
        self.shape, self.dtype, self.address = shape, dtype, address
        steps = [1]
        for extent in reversed(shape[1:]):
            steps.append(steps[-1] * extent)
        self.steps = list(reversed(steps))
        if pitch is not None:
            self.steps[-2] = pitch

    def data_ptr(self):
        return self.address

    def stride(self):
        return tuple(self.steps)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(launch, "import_binding", lambda name: made)
    return made


def kernel(cluster=2, **config) -> Kernel:
    chosen = GemmConfig(**config)
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    plan = LaunchPlan(split="m", cluster=along)
    return Kernel(build(gemm(chosen), multistage(gemm(chosen), 4, plan)))


def arrays(m=300, n=520, k=72):
    return {"a": Tensor(m, k), "b": Tensor(k, n), "c": Tensor(m, n)}


def test_grid_shared_memory_and_stream_reach_the_driver(driver):
    made = kernel()
    made(arrays(), stream=77)
    args = driver.last("cuLaunchKernel")
    # 3 x 3 tiles of 128 x 256, in pairs along m: 2 x 3 clusters of two blocks
    assert args[1:7] == (12, 1, 1, 384, 1, 1)
    assert args[7] == made.built.source.shared_bytes and args[8] == 77


def test_a_persistent_grid_is_no_larger_than_the_gpu(driver):
    kernel()(arrays(m=16384, n=16384))
    assert driver.last("cuLaunchKernel")[1] == 132
    kernel(cluster=1)(arrays(m=16384, n=16384))
    assert driver.last("cuLaunchKernel")[1] == 132


def test_tensor_maps_are_encoded_once_and_have_the_box_of_the_manifest(driver):
    made = kernel()
    given = arrays()
    made(given)
    made(given)
    encoded = [args for name, args in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert len(encoded) == 3
    a = next(args for args in encoded if [int(x) for x in args[3]] == [72, 300])
    assert [int(x) for x in a[4]] == [144] and [int(x) for x in a[5]] == [64, 128]


def test_dimensions_are_passed_in_the_order_of_the_parameters(driver, monkeypatch):
    seen = []

    def remember(*args):
        slots = ctypes.cast(args[9], ctypes.POINTER(ctypes.c_void_p))
        kinds = [p["kind"] for p in made.built.source.parameters]
        first = kinds.index("dim")
        seen.extend(
            ctypes.cast(slots[first + i], ctypes.POINTER(ctypes.c_int))[0] for i in range(3)
        )
        return (real.CUresult.CUDA_SUCCESS,)

    made = kernel()
    monkeypatch.setattr(driver, "cuLaunchKernel", remember, raising=False)
    made(arrays())
    assert seen == [300, 72, 520]


REFUSED = {
    "multiples of 16 B": {"a": Tensor(300, 72, pitch=73)},
    "must be multiples of 16 B for TMA": {"a": Tensor(300, 72, address=8)},
    "the kernel takes bf16": {"a": Tensor(300, 72, dtype="torch.float16")},
    "'k' is 72 in one array, 80 in b": {"b": Tensor(80, 520)},
    "given with shape": {"b": Tensor(1, 72, 520)},
    "expected a GPU tensor": {"b": object()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_tma_or_the_kernel_cannot_take_is_refused_before_the_launch(driver, message):
    made = kernel()
    with pytest.raises(InputError, match=message):
        made({**arrays(), **REFUSED[message]})
    assert not [name for name, _ in driver.calls if name == "cuLaunchKernel"]


def test_a_driver_error_is_named(driver, monkeypatch):
    made = kernel()
    monkeypatch.setattr(
        driver, "cuLaunchKernel", lambda *a: (real.CUresult.CUDA_ERROR_INVALID_VALUE,),
        raising=False,
    )  # fmt: skip
    with pytest.raises(DeviceError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
        made(arrays())


def test_a_folder_that_is_no_kernel_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="not a built kernel"):
        Built.read(tmp_path)
