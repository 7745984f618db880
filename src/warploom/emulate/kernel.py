"""Emitted kernels on the emulated machine: their arrays, parameters and tasks.

Arrays lie in memory with pitches of 16 bytes and guards around them: a write outside is a fault, a
read outside gives NaN.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.ir.source import CudaSource
from warploom.emulate.build import MODEL, compiled
from warploom.emulate.report import Fault, fault_of
from warploom.emulate.source import as_cpp
from warploom.runtime.encoding import decode, encode
from warploom.tile import Program
from warploom.tile.dtypes import MEMORY, DType, dtype
from warploom.tile.fragments import in_memory, in_order
from warploom.tile.interpret import bind, sizes

CODES: dict[str, Any] = {"int32": np.int32, "int8": np.int8, "bool": np.uint8, "fp32": np.float32}
GUARD = 64  # bytes around an array
POISON = 0xFF
SIDE_BY_SIDE = 4  # blocks, where a cluster has no more


class Library:
    """Kernels compiled together: `run` runs one of them."""

    def __init__(self, sources: Sequence[CudaSource]) -> None:
        """Raises `InputError` where a text is not in the emulated subset."""
        self.sources = tuple(sources)
        parts: list[str] = []
        self.names = [f"{n}.{each.file}" if n else each.file for n, each in enumerate(sources)]
        for number, (source, label) in enumerate(zip(sources, self.names, strict=True)):
            parts.append(f'namespace k{number} {{\n#line 1 "{label}"\n')
            parts.append(as_cpp(source.text, label) + "\n}")
            parts.append(_entry(source, number))
        self.path = compiled("\n".join(parts), "the emitted text", shared=True)
        self.library = ctypes.CDLL(str(self.path))

    def run(
        self, number: int, program: Program, arrays: Mapping[str, Any],
        scalars: Mapping[str, Any] | None = None, blocks: int = 2, seed: int = 1,
    ) -> dict[str, NDArray[Any]]:  # fmt: skip
        """Every array as kernel `number` leaves it after a run in the order of `seed`; given and
        returned in the order of their indices (`tile.fragments`).

        `blocks` limits the launch where the kernel takes tasks in a loop. Raises `Fault`.
        """
        source = self.sources[number]
        values = in_memory(program, bind(program, arrays))
        dims = sizes(program, values)
        pairs = {p["array"] for p in source.parameters if p.get("interleaved")}
        memory = {
            spec.name: _Guarded(values[spec.name], spec.dtype.name, 1 + (spec.name in pairs))
            for spec in program.arrays
        }
        counter = ctypes.c_uint(0)
        packed = [_parameter(p, memory, dims, scalars or {}, counter) for p in source.parameters]
        pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(p) for p in packed])
        call = getattr(self.library, f"run_{number}")
        call.restype = ctypes.c_char_p
        most = -(-blocks // source.cluster) if source.persistent else source.tasks(dims)
        count = min(most, source.tasks(dims)) * source.cluster
        together = max(source.cluster, SIDE_BY_SIDE)
        message = call(pointers, count, together, ctypes.c_uint(seed))
        if message is not None:
            raise fault_of(message.decode(), self.path, seed, self.names)
        if counter.value:
            raise Fault("result: the counter of tasks is not back at 0", (), seed)
        return in_order(program, {name: array.values(seed) for name, array in memory.items()})


def _entry(source: CudaSource, number: int) -> str:
    """The function of C that runs a kernel; its parameters come as addresses."""
    return (
        f'extern "C" const char* run_{number}(void** p, int blocks, int together, '
        "unsigned seed) {\n"
        f"  machine::Launch how; how.grid.x = blocks; how.block.x = {source.threads};\n"
        f"  how.shared = {source.shared_bytes}; how.cluster = {source.cluster};\n"
        "  how.together = together; how.seed = seed;\n"
        f"  return launch_with(k{number}::{source.name}, p, how);\n}}"
    )


class _Guarded:
    """An array in memory as a kernel takes it; `inner` dimensions have no room between them."""

    def __init__(self, values: NDArray[Any], kind: str, inner: int = 1) -> None:
        self.kind = kind
        codes = _codes(values, kind)
        self.element = codes.itemsize
        line = int(np.prod(codes.shape[-inner:], dtype=int)) * self.element
        pitch = -(-line // 16) * 16 if codes.ndim > inner else line
        rows = int(np.prod(codes.shape[:-inner], dtype=int))
        self.raw = np.full(rows * pitch + 2 * GUARD + 16, POISON, np.uint8)
        self.start = GUARD + -(self.raw.ctypes.data + GUARD) % 16
        self.shape = codes.shape
        strides: list[int] = []
        step = self.element
        for dim in reversed(range(codes.ndim)):
            step = pitch if dim == codes.ndim - inner - 1 else step
            strides.insert(0, step)
            step *= max(codes.shape[dim], 1)
        self.strides = tuple(strides)
        self.array: NDArray[Any] = np.ndarray(
            codes.shape, codes.dtype, self.raw.data, self.start, self.strides
        )
        self.array[...] = codes
        marks = np.zeros(self.raw.size, bool)
        inside: NDArray[Any] = np.ndarray(
            (*codes.shape, self.element), bool, marks.data, self.start, (*self.strides, 1)
        )
        inside[...] = True
        self.outside = ~marks
        self.scratch: NDArray[Any] | None = None

    def values(self, seed: int) -> NDArray[Any]:
        """What it holds; `Fault` where something was written around it."""
        if not (self.raw[self.outside] == POISON).all():
            raise Fault("bounds: a write outside of an array", (), seed)
        if self.kind == "bool":
            return self.array.astype(bool)
        if self.kind in CODES:
            return self.array.copy()
        return decode(np.ascontiguousarray(self.array), dtype(self.kind)).astype(np.float32)


@cache
def kinds() -> list[str]:
    """The element types of a tensor map by the machine's names, as `machine.h` counts them."""
    found = re.search(r"enum Kind \{ (.*) \};", (MODEL / "machine.h").read_text())
    assert found is not None
    return found[1].split(", ")


def _codes(values: NDArray[Any], kind: str) -> NDArray[Any]:
    if kind in CODES:
        return np.ascontiguousarray(values, CODES[kind])
    return np.ascontiguousarray(encode(np.asarray(values, np.float32), dtype(kind)))


def _parameter(
    parameter: Mapping[str, Any], memory: Mapping[str, _Guarded], dims: Mapping[str, int],
    scalars: Mapping[str, Any], counter: Any,
) -> Any:  # fmt: skip
    kind = parameter["kind"]
    if kind == "counter":
        return ctypes.c_void_p(ctypes.addressof(counter))
    if kind == "dim":
        return ctypes.c_int(dims[parameter["name"]])
    if kind == "scalar":
        value = scalars[parameter["name"]]
        return ctypes.c_int(value) if parameter["dtype"] == "int32" else ctypes.c_float(value)
    array = memory[parameter["array"]]
    if kind == "map":
        return _map(parameter, array)
    if kind == "pointer":
        return ctypes.c_void_p(array.array.ctypes.data)
    assert kind == "stride"
    dim: int = parameter["dim"]
    return ctypes.c_longlong(array.strides[dim] // array.element)


def _map(parameter: Mapping[str, Any], array: _Guarded) -> Any:
    """A tensor map as machine.h reads it; of an empty array as `runtime.driver` makes it."""
    rank, address = len(array.shape), array.array.ctypes.data
    shape, pitches = list(reversed(array.shape)), [0, *reversed(array.strides[:-1])]
    if 0 in array.shape:
        array.scratch = np.zeros(64, np.uint8)
        address = array.scratch.ctypes.data + -array.scratch.ctypes.data % 16
        shape, pitches = [1] * rank, [0] + [16] * (rank - 1)

    made = packed_map(
        address, dtype(parameter["dtype"], MEMORY), parameter["swizzle"], shape, parameter["box"],
        pitches[1:],
    )  # fmt: skip
    return ctypes.create_string_buffer(made, 128)


def packed_map(
    address: int, kind: DType, swizzle: int, shape: Sequence[int], box: Sequence[int],
    pitches: Sequence[int],
) -> bytes:  # fmt: skip
    """A tensor map as machine.h reads it; sizes innermost first, `pitches` of all but the first."""
    rank = len(shape)

    def five(items: Sequence[int]) -> list[int]:
        return [*items, *[1] * (5 - len(items))]

    number = kinds().index(f"k{kind.name.capitalize()}")
    return struct.pack(
        "<Q4i5i5i5q", address, rank, kind.bytes, swizzle, number, *five(shape), *five(box),
        *five([0, *pitches]),
    )  # fmt: skip
