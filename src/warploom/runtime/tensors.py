"""What a launch needs to know of somebody else's tensor: address, sizes, strides, type, device.

Three protocols are read, none of them copies and none waits on the host: torch's own attributes,
DLPack (CuPy, JAX, anything with `__dlpack__`; the producer orders its work before `stream`), and
`__cuda_array_interface__` (Numba).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, cast

from warploom.errors import InputError
from warploom.runtime import dlpack
from warploom.tile.dtypes import DTYPES

# numpy's codes of types, for arrays that only describe themselves
TYPESTRS = {"<f2": "float16", "<f4": "float32", "<i4": "int32", "|b1": "bool"}
_NAMES = {kind.library: kind.name for kind in DTYPES.values()}


class View(NamedTuple):
    """A tensor in device memory: address, sizes and strides in elements, our element type.

    `device` is None where the protocol does not say; `stream` is the producer's stream where the
    protocol names one that the launch must wait for.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None = None
    stream: int | None = None
    writable: bool = True


@cache
def element_type(of: Any) -> str:
    """Our name of a tensor's element type; one we have none for keeps its own."""
    name = str(of).removeprefix("torch.")
    return _NAMES.get(name, name)


def view(tensor: Any, name: str, stream: int = 0) -> View:
    """What a launch on `stream` needs of a tensor; raises `InputError` when it is not on a GPU."""
    if hasattr(tensor, "data_ptr"):
        return _torch(tensor, name)
    if hasattr(tensor, "__dlpack__"):
        return _dlpack(tensor, name, stream)
    face: Any = getattr(tensor, "__cuda_array_interface__", None)
    if not isinstance(face, Mapping):
        raise InputError(
            f"array {name} is a {type(tensor).__name__}, expected a GPU tensor with __dlpack__ or "
            "__cuda_array_interface__"
        )
    return _interface(tensor, name, cast("Mapping[str, Any]", face))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    steps: list[int] = []
    step = 1
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


def _torch(tensor: Any, name: str) -> View:
    if not bool(getattr(tensor, "is_cuda", False)):
        raise InputError(f"array {name} is not on a GPU; move it there first")
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise InputError(f"array {name} has layout {layout}, expected a dense tensor")
    negated: Any = getattr(tensor, "is_neg", None)
    if negated is not None and negated():
        raise InputError(
            f"array {name} is a view that negates its memory (of a conjugate): call resolve_neg()"
        )
    return View(
        int(tensor.data_ptr()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        element_type(tensor.dtype),
        getattr(getattr(tensor, "device", None), "index", None),
    )


def _dlpack(tensor: Any, name: str, stream: int) -> View:
    place, number = tensor.__dlpack_device__()
    if int(place) not in dlpack.GPU_PLACES:
        raise InputError(f"array {name} is not on a GPU; move it there first")
    # The protocol's stream numbers: 1 is the default stream, 0 is not allowed.
    capsule = tensor.__dlpack__(stream=stream or 1)
    found = dlpack.read(capsule, name)
    strides = contiguous(found.shape) if found.strides is None else found.strides
    kind = element_type(found.dtype)
    return View(
        found.address, found.shape, strides, kind, int(number), writable=not found.read_only
    )


def _interface(tensor: Any, name: str, face: Mapping[str, Any]) -> View:
    shape = tuple(int(extent) for extent in face["shape"])
    text = str(face["typestr"])
    kind = element_type(getattr(tensor, "dtype", TYPESTRS.get(text, text)))
    size = int(text[2:])
    strides = face.get("strides")
    if strides is not None and any(int(s) % size for s in strides):
        raise InputError(
            f"array {name}: strides of {[int(s) for s in strides]} B are no multiples of its "
            f"{size} B elements"
        )
    return View(
        int(face["data"][0]),
        shape,
        contiguous(shape) if strides is None else tuple(int(s) // size for s in strides),
        kind,
        stream=face.get("stream"),
        writable=not face["data"][1],
    )
