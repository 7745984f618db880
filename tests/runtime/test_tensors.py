"""Other people's tensors: DLPack capsules as they are in memory, and the array interfaces."""

from types import SimpleNamespace

import numpy as np
import pytest

from warploom.errors import InputError
from warploom.runtime import dlpack
from warploom.runtime.tensors import contiguous, view


class OnGpu:
    """A numpy array that says it is on GPU 1; `seen` is the stream the reader asked for."""

    def __init__(self, array, versioned=False):
        self.array, self.versioned, self.seen = array, versioned, None

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, stream):
        self.seen = stream
        return self.array.__dlpack__(max_version=(1, 0)) if self.versioned else \
            self.array.__dlpack__()  # fmt: skip


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_gives_address_shape_strides_and_device(versioned):
    if versioned and np.__version__ < "2.1":
        pytest.skip("numpy without versioned capsules")
    array = np.zeros((4, 6, 8), np.float32)[1:, ::2, :]
    given = OnGpu(array, versioned)
    found = view(given, "x", stream=77)
    assert given.seen == 77
    assert found.address == array.ctypes.data
    assert (found.shape, found.strides) == ((3, 3, 8), (48, 16, 1))
    assert (found.dtype, found.device) == ("fp32", 1)
    view(given, "x")
    assert given.seen == 1  # the protocol's number of the default stream


def test_the_capsule_stays_the_producers():
    capsule = np.zeros(4, np.int32).__dlpack__()
    assert dlpack.read(capsule, "x").dtype == "int32"
    assert dlpack.read(capsule, "x").shape == (4,)


def test_a_used_capsule_is_refused():
    torch = pytest.importorskip("torch")
    capsule = torch.zeros(4).__dlpack__()
    torch.utils.dlpack.from_dlpack(capsule)
    with pytest.raises(InputError, match="no unused DLPack capsule"):
        dlpack.read(capsule, "x")


def test_types_that_no_kernel_has_keep_their_name():
    assert view(OnGpu(np.zeros(3, np.float64)), "x").dtype == "DLPack type code 2 with 64 bits"


def test_torch_types_through_dlpack():
    torch = pytest.importorskip("torch")
    assert view(OnGpu(torch.zeros(2, 3).bfloat16()), "x").dtype == "bf16"


def test_memory_of_a_cpu_is_refused():
    with pytest.raises(InputError, match="x is not on a GPU"):
        view(np.zeros(3), "x")


def test_the_cuda_array_interface():
    face = {"shape": (2, 3), "typestr": "<f2", "data": (4096, True), "stream": 9}
    found = view(SimpleNamespace(__cuda_array_interface__=face, dtype="float16"), "x")
    assert (found.strides, found.dtype, found.stream, found.writable) == ((3, 1), "fp16", 9, False)
    face = {**face, "strides": (12, 4), "data": (4096, False)}
    found = view(SimpleNamespace(__cuda_array_interface__=face, dtype="float16"), "x")
    assert found.strides == (6, 2) and found.writable


def test_contiguous_strides():
    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert contiguous(()) == ()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        ("int32", "int32"),
        ("bool_", "bool"),
        ("float8_e4m3fn", "e4m3"),
        ("float8_e5m2", "e5m2"),
    ],
)
def test_capsules_of_jax_have_address_shape_strides_and_type(theirs, ours):
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((4, 6), getattr(jax.numpy, theirs))
    found = view(OnGpu(array), "x")
    assert (found.shape, found.strides, found.dtype) == ((4, 6), (6, 1), ours)
    assert found.address == array.unsafe_buffer_pointer()


def test_an_array_of_jax_on_the_cpu_is_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(InputError, match="x is not on a GPU"):
        view(jax.numpy.ones(3), "x")
