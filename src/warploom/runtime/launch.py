"""What a launch needs, as data: kernel, grid, block, shared memory, cluster, buffers, arguments.

A `LaunchSpec` says everything needed to run a cubin's kernel on fresh inputs and to judge its
outputs. It is plain JSON, so it travels in a manifest beside the cubin and to worker processes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from warploom.errors import InputError
from warploom.machine import largest
from warploom.runtime.encoding import encode
from warploom.tile.dtypes import MEMORY, dtype

SCHEMA_VERSION = 1
SCALARS = ("i1", *MEMORY)
ROLES = ("in", "out", "inout")
Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Buffer:
    """A region of device memory: `role` 'in' is only read, 'out' wholly written, 'inout' both.

    Integer buffers are filled uniformly in [low, high): they are mostly indices. `zero` starts an
    input at zero whatever the pattern (counters, locks, scratch).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    low: int = 0
    high: int = 8
    zero: bool = False

    def __post_init__(self) -> None:
        """Refuse an unknown dtype or role, an empty shape or an empty integer range."""
        dtype(self.dtype, MEMORY)
        if self.role not in ROLES:
            raise InputError(f"buffer {self.name}: role {self.role!r}, expected in, out or inout")
        if any(extent < 1 for extent in self.shape):
            raise InputError(f"buffer {self.name}: shape {list(self.shape)} has an empty axis")
        if self.high <= self.low:
            raise InputError(f"buffer {self.name}: range [{self.low}, {self.high}) is empty")

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.count * dtype(self.dtype, MEMORY).bytes


@dataclass(frozen=True)
class Pointer:
    """A kernel argument: the address of a buffer, `offset` bytes in."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A kernel argument passed by value; `ctype` is one of `SCALARS`."""

    ctype: str
    value: float

    def __post_init__(self) -> None:
        """Refuse an unknown type, or a value it cannot hold."""
        if self.ctype not in SCALARS:
            raise InputError(
                f"unknown scalar type {self.ctype!r}: expected one of {', '.join(SCALARS)}"
            )
        if self.ctype == "i1":
            return
        kind = dtype(self.ctype, MEMORY)
        if kind.is_float:
            fits = math.isinf(self.value) or not abs(self.value) > kind.largest
        else:
            low = -(1 << (kind.bits - 1)) if kind.kind == "int" else 0
            fits = low <= self.value < low + (1 << kind.bits) and self.value == int(self.value)
        if not fits:
            raise InputError(f"scalar {self.value} does not fit {self.ctype}")

    def pack(self) -> bytes:
        """The bytes of the kernel parameter."""
        if self.ctype == "i1":
            return bytes([bool(self.value)])
        kind = dtype(self.ctype, MEMORY)
        if kind.bits >= 32 and kind.is_float:
            return struct.pack("<f" if kind.bits == 32 else "<d", self.value)
        if kind.is_float:
            return encode(np.array([self.value], np.float32), kind).tobytes()
        return int(self.value).to_bytes(kind.bytes, "little", signed=kind.kind == "int")


@dataclass(frozen=True)
class Null:
    """A null pointer argument, such as the scratch pointers Triton appends."""


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor passed by value (`const __grid_constant__ CUtensorMap`).

    Dimensions run innermost first, as `cuTensorMapEncodeTiled` takes them. `dims` and `box` are in
    elements, `strides` in bytes for all dimensions but the first, `swizzle` in bytes (0, 32, 64 or
    128), `fill` is what out-of-bounds elements read: 'zero' or 'nan'; `promotion` is how many bytes
    the L2 fetches at a time (0: what is asked for, 64, 128 or 256).
    """

    buffer: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    offset: int = 0
    promotion: int = 128

    def __post_init__(self) -> None:
        """Refuse what the driver would refuse with a bare 'invalid value'."""
        rank = len(self.dims)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise InputError(
                f"tensor map of {self.buffer}: {rank} dims, {len(self.strides)} strides, "
                f"{len(self.box)} box extents; expected rank 1-5, rank - 1 strides, rank extents"
            )
        if any(not 1 <= extent <= 256 for extent in self.box):
            raise InputError(f"tensor map of {self.buffer}: box {list(self.box)}, expected 1..256")
        if any(stride % 16 for stride in self.strides):
            raise InputError(
                f"tensor map of {self.buffer}: strides {list(self.strides)} must be multiples of 16"
            )
        if self.swizzle not in (0, 32, 64, 128) or self.fill not in ("zero", "nan"):
            raise InputError(
                f"tensor map of {self.buffer}: swizzle {self.swizzle}, fill {self.fill!r}; "
                "expected swizzle 0, 32, 64 or 128 and fill zero or nan"
            )
        if self.promotion not in (0, 64, 128, 256):
            raise InputError(
                f"tensor map of {self.buffer}: promotion {self.promotion}, expected 0, 64, 128, 256"
            )


Argument = Pointer | Scalar | Null | TensorMap
_KINDS: dict[str, type[Argument]] = {
    "pointer": Pointer,
    "scalar": Scalar,
    "null": Null,
    "tensor_map": TensorMap,
}


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of one kernel. `grid`, `block` and `cluster` are (x, y, z); sizes in bytes.

    Raises `InputError` on an argument that names no buffer, a repeated buffer name, or dimensions
    that no GPU accepts.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    buffers: tuple[Buffer, ...]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    notes: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Check the dimensions and that every argument's buffer exists once."""
        for name, dims in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if len(dims) != 3 or any(extent < 1 for extent in dims):
                raise InputError(f"launch of {self.kernel}: {name} {dims}, expected three >= 1")
        if math.prod(self.block) > (most := largest("limits.threads_per_block")):
            raise InputError(f"launch of {self.kernel}: block {self.block} has over {most} threads")
        if any(grid % cluster for grid, cluster in zip(self.grid, self.cluster, strict=True)):
            raise InputError(
                f"launch of {self.kernel}: grid {self.grid} is no multiple of the cluster "
                f"{self.cluster}"
            )
        if self.shared_bytes < 0:
            raise InputError(f"launch of {self.kernel}: shared_bytes {self.shared_bytes} < 0")
        names = [buffer.name for buffer in self.buffers]
        if len(set(names)) != len(names):
            raise InputError(f"launch of {self.kernel}: buffer names repeat in {names}")
        for argument in self.arguments:
            if isinstance(argument, Pointer | TensorMap) and argument.buffer not in names:
                raise InputError(
                    f"launch of {self.kernel}: argument names buffer {argument.buffer!r}, "
                    f"expected one of {names}"
                )

    @property
    def kinds(self) -> dict[str, str]:
        """The element type of every buffer."""
        return {buffer.name: buffer.dtype for buffer in self.buffers}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; `from_json` restores an equal spec."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        data = asdict(self)
        data["schema"] = SCHEMA_VERSION
        data["arguments"] = [
            {"kind": kinds[type(argument)], **asdict(argument)} for argument in self.arguments
        ]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchSpec:
        """A spec back from JSON; raises `InputError` on another schema or a malformed part."""
        if data.get("schema") != SCHEMA_VERSION:
            raise InputError(
                f"launch spec has schema {data.get('schema')!r}, expected {SCHEMA_VERSION}"
            )
        values = {name: value for name, value in data.items() if name != "schema"}
        try:
            for name in ("grid", "block", "cluster"):
                values[name] = tuple(int(extent) for extent in values[name])
            values["buffers"] = tuple(Buffer(**_tupled(entry)) for entry in values["buffers"])
            values["arguments"] = tuple(_argument(entry) for entry in values["arguments"])
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"launch spec is malformed: {error}") from None


def _argument(entry: Mapping[str, Any]) -> Argument:
    kind = entry.get("kind")
    if kind not in _KINDS:
        raise InputError(f"argument kind {kind!r}, expected one of {', '.join(_KINDS)}")
    values = _tupled(entry)
    del values["kind"]
    return _KINDS[kind](**values)


def _tupled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with its JSON lists as tuples."""
    values: dict[str, Any] = dict(entry)
    for name, value in entry.items():
        if isinstance(value, list):
            values[name] = tuple(cast(list[int], value))
    return values


class Params:
    """Kernel parameters laid out for the driver: one block of bytes and an array of pointers to it.

    `address` is what `cuLaunchKernel` takes as `kernelParams`; the object must outlive the launch
    call (the driver copies the values during it). `words` are all parameters in words of 8 bytes.
    """

    def __init__(self, slots: Sequence[bytes]) -> None:
        self.slots = tuple(slots)
        offsets: list[int] = []
        size = 0
        for slot in self.slots:
            size = -(-size // 64) * 64
            offsets.append(size)
            size += len(slot)
        self._storage = ctypes.create_string_buffer(size + 72)
        base = -(-ctypes.addressof(self._storage) // 64) * 64
        self._base, count = base, size // 8 + 1
        bytes_of_words = (ctypes.c_char * (8 * count)).from_address(base)
        self.words = memoryview(bytes_of_words).cast("B").cast("Q")
        count = max(len(self.slots), 1)
        self._pointers = (ctypes.c_void_p * count)(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)
        for place, slot in enumerate(self.slots):
            self.put(place, slot)

    def at(self, place: int) -> int:
        """Where parameter number `place` stands."""
        return int(self._pointers[place] or 0)

    def word(self, place: int) -> int:
        """Which of `words` parameter number `place` begins with."""
        return (self.at(place) - self._base) // 8

    def bytes_of(self, place: int) -> bytes:
        """What stands where parameter number `place` does."""
        return ctypes.string_at(self.at(place), len(self.slots[place]))

    def put(self, place: int, slot: bytes) -> None:
        """Write other bytes where parameter number `place` stands."""
        ctypes.memmove(self._pointers[place], slot, len(slot))


class MapEncoder(Protocol):
    """Whatever can turn a tensor map and an address into its 128 bytes (a device can)."""

    def tensor_map(self, spec: TensorMap, kind: str, address: int) -> bytes:
        """The encoded descriptor of elements of that type."""
        ...


def pack_arguments(
    arguments: Sequence[Argument],
    addresses: Mapping[str, int],
    kinds: Mapping[str, str],
    encoder: MapEncoder,
) -> Params:
    """The parameters of a launch with its buffers at `addresses`, their element types `kinds`."""
    return Params([packed(argument, addresses, kinds, encoder) for argument in arguments])


def packed(
    argument: Argument, addresses: Mapping[str, int], kinds: Mapping[str, str], encoder: MapEncoder
) -> bytes:
    """The bytes of one parameter."""
    match argument:
        case Pointer(buffer, offset):
            return (addresses[buffer] + offset).to_bytes(8, "little")
        case Scalar():
            return argument.pack()
        case Null():
            return bytes(8)
        case TensorMap(buffer=buffer, offset=offset):
            return encoder.tensor_map(argument, kinds[buffer], addresses[buffer] + offset)
