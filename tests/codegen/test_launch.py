"""Launching without a GPU: a driver that records calls; everything before the launch is real."""

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from warploom import tile as t
from warploom.autosched.schedules import Policy, compiled
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.errors import DeviceError, InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.runtime import driver as road
from warploom.runtime.kernel import Kernel

real = pytest.importorskip("cuda.bindings.driver")


class Driver:
    """cuda-bindings' types with every call answered from a table."""

    ANSWERS: ClassVar[dict[str, int]] = {
        "cuOccupancyMaxActiveClusters": 66,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": 1,
        "cuMemAlloc": 1 << 30,
        "cuDevicePrimaryCtxRetain": 5,
        "cuCtxGetCurrent": 5,
        "cuDeviceGetCount": 1,
    }

    def __init__(self, capability=90, shared=232448):
        self.calls, self.kept = [], []
        self.attributes = {
            "MULTIPROCESSOR_COUNT": 132,
            "COMPUTE_CAPABILITY_MAJOR": capability // 10,
            "COMPUTE_CAPABILITY_MINOR": capability % 10,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": shared,
        }

    def __getattr__(self, name):
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(real, name)

        def call(*args):
            if name == "cuGetProcAddress":
                return real.CUresult.CUDA_SUCCESS, self.address(args[0].decode()), 0
            self.calls.append((name, args))
            if name == "cuTensorMapEncodeTiled":
                return real.CUresult.CUDA_SUCCESS, real.CUtensorMap()
            if name == "cuDeviceGetAttribute":
                asked = args[0].name.removeprefix("CU_DEVICE_ATTRIBUTE_")
                return real.CUresult.CUDA_SUCCESS, self.attributes[asked]
            return real.CUresult.CUDA_SUCCESS, self.ANSWERS.get(name, 0)

        return call

    def address(self, name):
        """That of a function of C which is called without cuda-bindings."""

        @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * road.DIRECT[name])
        def call(*args):
            self.calls.append((name, args))
            if name == "cuCtxGetCurrent":
                ctypes.c_uint64.from_address(args[0]).value = self.ANSWERS[name]
            return 0

        self.kept.append(call)
        return ctypes.cast(call, ctypes.c_void_p).value

    def last(self, name):
        return [args for called, args in self.calls if called == name][-1]


class Tensor:
    """What a launch reads of a torch tensor."""

    is_cuda = True

    def __init__(self, *shape, dtype="torch.bfloat16", pitch=None, address=1 << 20, device=0):
        self.shape, self.dtype, self.address = shape, dtype, address
        self.device = SimpleNamespace(index=device)
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


def fp32(*shape, **rest):
    return Tensor(*shape, dtype="torch.float32", **rest)


class Strange:
    """Says it speaks DLPack, and does not."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream):
        return "no capsule"


def changed(**attributes):
    """The first operand with something else about it."""
    made = Tensor(300, 72)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Described:
    """The first operand by the CUDA array interface."""

    def __init__(self, **changes):
        face = {"shape": (300, 72), "typestr": "<f2", "data": (1 << 20, False), "version": 3}
        self.dtype = "bfloat16"
        self.__cuda_array_interface__ = {**face, **changes}


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(road, "import_binding", lambda name: made)
    return made


def kernel(cluster=2, **config) -> Kernel:
    chosen = GemmConfig(**config)
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    plan = LaunchPlan(split="m", cluster=along)
    return compiled(gemm(chosen), Policy("inflight", plan, groups=2, depth=4)).kernel()


def arrays(m=300, n=520, k=72):
    return {"a": Tensor(m, k), "b": Tensor(k, n), "c": Tensor(m, n)}


def test_grid_shared_memory_and_stream_reach_the_driver(driver):
    made = kernel()
    made(arrays(), stream=77)
    args = driver.last("cuLaunchKernel")
    # 3 x 3 tiles of 128 x 256, in pairs along m: 2 x 3 clusters of two blocks
    assert args[1:7] == (12, 1, 1, 384, 1, 1)
    assert args[7] == made.interface.shared_bytes and args[8] == 77


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
        kinds = [p["kind"] for p in made.interface.parameters]
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
    "it is 8 B past one": {"a": Tensor(300, 72, address=8)},
    "between 1 and 2\\^40": {"b": Tensor(72, 520, pitch=0)},
    "the kernel takes bf16": {"a": Tensor(300, 72, dtype="torch.float16")},
    "'k' is 72 in one array, 80 in b": {"b": Tensor(80, 520)},
    "given with shape": {"b": Tensor(1, 72, 520)},
    "expected a GPU tensor": {"b": object()},
    "has no array 'bias'": {"bias": Tensor(520)},
    "is on device 3": {"b": Tensor(72, 520, device=3)},
    "__dlpack__ gave": {"b": Strange()},
    "is not on a GPU": {"b": np.zeros((72, 520), np.float32)},
    "c is written to, but strides .* overlap": {"c": Tensor(300, 520, pitch=512)},
    "at most 2,147,418,112": {"a": Tensor(2**31 - 1, 72), "c": Tensor(2**31 - 1, 520)},
    "has layout torch.sparse_coo": {"a": changed(layout="torch.sparse_coo")},
    "call resolve_neg": {"a": changed(is_neg=lambda: True)},
    "no multiples of its 2 B": {"a": Described(strides=(145, 2))},
    "has no array '3'": {3: Tensor(300, 72)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_tma_or_the_kernel_cannot_take_is_refused_before_the_launch(driver, message):
    made = kernel()
    made(arrays())  # what was checked for these does not pass for others
    before = len(driver.calls)
    with pytest.raises(InputError, match=message):
        made(arrays() | REFUSED[message])
    assert not [name for name, _ in driver.calls[before:] if name == "cuLaunchKernel"]


def scaled():
    """A kernel on threads with a scalar of each kind, and a bias of any alignment."""

    def body(x, y):
        (i,) = t.grid(m=t.size("m"))
        rows, cols = t.span(i, 1), t.span(0, 8)
        shifted = t.load(x, rows, cols) * t.scalar("scale") + t.scalar("shift", t.INT32).cast(
            t.FP32
        )
        t.store(y, rows, cols, tile=shifted)

    program = t.trace(body, {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n")})
    return build(program, simt(program)).kernel()


GIVEN = {"scale": 0.5, "shift": 3}
ODD_CALLS = {
    "is no multiple of its 4 B elements": {"x": fp32(4, 8, address=(1 << 20) + 2)},
    "y is written to": {"y": fp32(4, 8, pitch=0)},
    "scalar scale='a half': expected a number that fp32 holds": {"scale": "a half"},
    "scalar scale=1e\\+300": {"scale": 1e300},
    "scalar shift=nan: expected a 32-bit integer": {"shift": float("nan")},
    "scalar shift=2147483648": {"shift": 2**31},
    "scalar shift=None": {"shift": None},
    "needs scalar scale": {"scale": ...},
    "has no scalar 'skale'": {"skale": 1.0},
    "stream is a SimpleNamespace": {"stream": SimpleNamespace(cuda_stream=7)},
}


@pytest.mark.parametrize("message", ODD_CALLS)
def test_odd_scalars_streams_and_addresses_are_refused(driver, message):
    made = scaled()
    change = dict(ODD_CALLS[message])
    given = {name: change.pop(name, fp32(4, 8)) for name in "xy"}
    stream = change.pop("stream", 0)
    scalars = {name: one for name, one in {**GIVEN, **change}.items() if one is not ...}
    with pytest.raises(InputError, match=message):
        made(given, scalars, stream)
    with pytest.raises(InputError, match="takes a table of arrays by name, not list"):
        made([fp32(4, 8)], GIVEN)
    assert not [name for name, _ in driver.calls if name == "cuLaunchKernel"]


UNALIGNED = {
    "dimension n is 9, expected a multiple of 4": {"x": fp32(4, 9, pitch=48)},
    r"strides \[9, 1\]: expected multiples of 16 B": {"x": fp32(4, 8, pitch=9)},
    "array y at 0x100004": {"y": fp32(4, 8, address=(1 << 20) + 4)},
}


@pytest.mark.parametrize("message", UNALIGNED)
def test_a_kernel_for_aligned_lines_takes_no_others(driver, message):
    def body(x, y):
        rows, cols = t.span(0, 4), t.span(0, 8)
        t.store(y, rows, cols, tile=t.load(x, rows, cols))

    program = t.trace(body, {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n")})
    made = build(program, replace(simt(program), aligned=True)).kernel()
    given = {"x": fp32(4, 8), "y": fp32(4, 8)}
    made(given)
    given |= UNALIGNED[message]
    if "x" in UNALIGNED[message] and given["x"].shape[1] == 9:
        given["y"] = given["x"]
    with pytest.raises(InputError, match=message):
        made(given)


def test_scalars_that_compare_equal_and_are_not_the_same_are_told_apart(driver):
    made = scaled()
    given = {"x": fp32(4, 8), "y": fp32(4, 8)}
    made(given, {"scale": 0.0, "shift": 1})
    first = driver.last("cuLaunchKernel")[9]
    made(given, {"scale": -0.0, "shift": 1})
    assert driver.last("cuLaunchKernel")[9] != first
    number = np.array(2.0)
    made(given, {"scale": number, "shift": 1})
    second = driver.last("cuLaunchKernel")[9]
    number[...] = 3.0
    made(given, {"scale": number, "shift": 1})
    assert driver.last("cuLaunchKernel")[9] != second


def test_a_repeated_call_hands_over_the_same_parameters_and_encodes_nothing(driver):
    made = kernel()
    given = arrays()
    made(given)
    first, before = driver.last("cuLaunchKernel"), len(driver.calls)
    made(given, stream=5)
    names = [name for name, _ in driver.calls[before:]]
    assert names == ["cuCtxGetCurrent", "cuLaunchKernel"]
    assert driver.last("cuLaunchKernel")[9] == first[9]


def test_tensors_that_moved_are_handed_over_where_they_are(driver):
    made = kernel()
    made(arrays())
    before = len(driver.calls)
    made(arrays() | {"b": Tensor(72, 520, address=1 << 22)})
    encoded = [args for name, args in driver.calls[before:] if name == "cuTensorMapEncodeTiled"]
    assert [int(args[2]) for args in encoded] == [1 << 22]
    pointers = scaled()
    for address in (1 << 20, 1 << 23):
        pointers({"x": fp32(4, 8), "y": fp32(4, 8, address=address)}, GIVEN)
        slots = ctypes.cast(driver.last("cuLaunchKernel")[9], ctypes.POINTER(ctypes.c_void_p))
        place = [p.get("array") for p in pointers.interface.parameters].index("y")
        assert ctypes.cast(slots[place], ctypes.POINTER(ctypes.c_uint64))[0] == address


def test_dimensions_of_length_0(driver):
    made = kernel()
    made(arrays(m=0))
    assert not [name for name, _ in driver.calls if name == "cuLaunchKernel"]
    made(arrays(k=0))  # no trips: c is still written, with zeros
    assert driver.last("cuLaunchKernel")[1] == 12
    encoded = [args for name, args in driver.calls if name == "cuTensorMapEncodeTiled"]
    sizes = [[int(x) for x in args[3]] for args in encoded]
    assert sorted(sizes) == [[1, 1], [1, 1], [520, 300]]
    assert {args[2] for args in encoded if [int(x) for x in args[3]] == [1, 1]} == {1 << 30}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capability": 80}, "built for sm_90a, device 0 is sm_80"),
        ({"capability": 100}, "built for sm_90a, device 0 is sm_100"),
        ({"shared": 101376}, r"needs \d{3},\d{3} B of shared memory, the GPU has 101,376"),
    ],
)
def test_a_device_that_cannot_run_the_kernel_is_refused(monkeypatch, changes, message):
    monkeypatch.setattr(road, "import_binding", lambda name: Driver(**changes))
    with pytest.raises(InputError, match=message):
        kernel()


def test_a_block_that_does_not_fit_is_refused(driver, monkeypatch):
    answers = {**Driver.ANSWERS, "cuOccupancyMaxActiveBlocksPerMultiprocessor": 0}
    monkeypatch.setattr(Driver, "ANSWERS", answers)
    with pytest.raises(InputError, match=r"384 threads with \d+ registers each .* does not fit"):
        kernel(cluster=1)


def test_another_context_is_left_as_it_was(driver, monkeypatch):
    made = kernel()
    monkeypatch.setattr(Driver, "ANSWERS", {**Driver.ANSWERS, "cuCtxGetCurrent": 9})
    before = len(driver.calls)
    made(arrays())
    names = [name for name, _ in driver.calls[before:]]
    # Tensor maps are made inside, too: a thread that has not used the GPU has no context.
    assert names[:2] == ["cuCtxGetCurrent", "cuCtxPushCurrent"]
    assert names[2:] == [*["cuTensorMapEncodeTiled"] * 3, "cuLaunchKernel", "cuCtxPopCurrent"]
    with pytest.raises(InputError):
        made({**arrays(), "a": Tensor(300, 72, pitch=75)})
    assert driver.calls[-1][0] == "cuCtxPopCurrent"


def test_a_driver_error_is_named(driver, monkeypatch):
    made = kernel()
    monkeypatch.setattr(
        driver, "cuLaunchKernel", lambda *a: (real.CUresult.CUDA_ERROR_INVALID_VALUE,),
        raising=False,
    )  # fmt: skip
    with pytest.raises(
        DeviceError, match=r"cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE \(kernel gemm"
    ):
        made(arrays())


def test_a_folder_that_is_no_kernel_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no manifest"):
        Built.read(tmp_path)
