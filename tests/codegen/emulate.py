"""Running emitted kernels on the CPU: the emitted text, compiled as C++ (cuda_on_cpu.h).

Arrays lie in memory with pitches of 16 bytes and guards around them: a write outside is an error,
a read outside gives NaN.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import subprocess
from pathlib import Path

import numpy as np

from warploom.codegen.cuda.prelude import PRELUDE, WGMMA_TYPES, tma_load, tma_store, wgmma
from warploom.codegen.cuda.prelude_simt import TYPES
from warploom.codegen.cuda.prelude_sm80 import SM80_PRELUDE
from warploom.runtime.encoding import decode, encode
from warploom.tile.dtypes import MEMORY, dtype
from warploom.tile.interpret import bind, sizes

FOLDER = Path(__file__).parent
# Helpers that are PTX: the headers have them in C++.
REPLACED = (
    *TYPES.values(),
    *(text for text in PRELUDE.values() if "asm" in text),
    *(text for text in SM80_PRELUDE.values() if "asm" in text),
    *(tma_load(rank, multicast)[1] for rank in range(2, 6) for multicast in (False, True)),
    *(tma_store(rank, add)[1] for rank in range(2, 6) for add in (False, True)),
)
CODES = {"int32": np.int32, "bool": np.uint8, "fp32": np.float32}
KINDS = ("bf16", "fp16", "e4m3", "e5m2", "fp32", "int32")  # as hopper_on_cpu.h counts them
GUARD = 64  # bytes around an array
POISON = 0xFF
SIDE_BY_SIDE = 4  # blocks, where a cluster has no more


class Fault(AssertionError):
    """The run ended in a deadlock or did what a GPU does not allow."""


def compile_all(sources, folder):
    """One shared library with every source, each in a namespace of its own; `run` calls them."""
    parts = [f'#include "{FOLDER / name}"' for name in ("cuda_on_cpu.h", "hopper_on_cpu.h")]
    for number, source in enumerate(sources):
        text = source.text
        for helper in REPLACED:
            text = text.replace(helper, "")
        text = text.replace('extern "C" __global__', "__global__")
        text = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];",
            r"unsigned char* const \1 = machine::own_shared();",
            text,
        )
        parts.append(f"namespace k{number} {{\n{_with_matmuls(text)}}}")
        parts.append(
            f'extern "C" const char* run_{number}(void** p, int blocks, int together, '
            f"unsigned seed) {{ return launch(k{number}::{source.name}, p, blocks, "
            f"{source.threads}, together, {source.shared_bytes}, {source.cluster}, seed); }}"
        )
    whole = "\n".join(parts).replace("#define DEVICE __device__ __forceinline__\n", "")
    whole = "#define DEVICE __device__ __forceinline__\n" + whole
    headers = "".join((FOLDER / name).read_text() for name in ("cuda_on_cpu.h", "hopper_on_cpu.h"))
    name = hashlib.sha256((headers + whole).encode()).hexdigest()[:16]
    path, library = Path(folder) / f"{name}.cpp", Path(folder) / f"{name}.so"
    if not library.exists():
        path.write_text(whole)
        done = subprocess.run(
            ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-o", str(library), str(path)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


def _with_matmuls(text):
    """The text with its wgmma instructions taken from the header."""
    found = set(
        re.findall(r"DEVICE void (wgmma_m64n(\d+)_([a-z]+\d\w*?)_(rs|ss)(_[nt]{2})?)\(", text)
    )
    for name, columns, kind, form, bits in found:
        transposed = (bits[1:2] == "t", bits[2:3] == "t")
        made = wgmma(int(columns), kind, form == "rs", transposed)
        assert made[0] == name and made[1] in text
        flags = ", ".join("true" if flag else "false" for flag in transposed)
        left = "const unsigned*" if form == "rs" else "unsigned long long"
        text = text.replace(
            made[1],
            f"DEVICE void {name}(float (&d)[{int(columns) // 2}], {left} a, unsigned long long b, "
            f"int add) {{ start_wgmma<{list(WGMMA_TYPES).index(kind)}, {flags}>(d, a, b, add); }}",
        )
    return text


def run(library, number, source, program, arrays, scalars=None, blocks=2, seed=1):
    """Every array as the kernel leaves it; raises `Fault`."""
    values = bind(program, arrays)
    dims = sizes(program, values)
    memory = {spec.name: _Guarded(values[spec.name], spec.dtype.name) for spec in program.arrays}
    counter = ctypes.c_uint(0)
    packed = [_parameter(p, memory, dims, scalars or {}, counter) for p in source.parameters]
    pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(p) for p in packed])
    call = getattr(library, f"run_{number}")
    call.restype = ctypes.c_char_p
    count = min(-(-blocks // source.cluster), _tasks(source, dims)) * source.cluster
    fault = call(pointers, count, max(source.cluster, SIDE_BY_SIDE), seed)
    if fault is not None:
        raise Fault(fault.decode())
    assert counter.value == 0, "the counter of tasks is not back at 0"
    return {spec.name: memory[spec.name].values() for spec in program.arrays}


def _tasks(source, dims):
    # As `Kernel.tasks`: a launch has no more clusters than tasks.
    total = 1
    for name, extent in source.grid:
        count = max(0, extent.evaluate(dims))
        total *= -(-count // source.cluster) if name == source.cluster_axis else count
    return total


class _Guarded:
    """An array in memory as a kernel takes it."""

    def __init__(self, values, kind):
        self.kind = kind
        codes = _codes(values, kind)
        self.element = codes.itemsize
        inner = codes.shape[-1] * self.element
        pitch = -(-inner // 16) * 16 if codes.ndim > 1 else inner
        rows = int(np.prod(codes.shape[:-1], dtype=int))
        self.raw = np.full(rows * pitch + 2 * GUARD + 16, POISON, np.uint8)
        self.start = GUARD + -(self.raw.ctypes.data + GUARD) % 16
        self.shape, self.strides = codes.shape, []
        step = pitch
        for extent in reversed(codes.shape[:-1]):
            self.strides.insert(0, step)
            step *= max(extent, 1)
        self.strides.append(self.element)
        self.array = np.ndarray(
            codes.shape, codes.dtype, self.raw.data, self.start, tuple(self.strides)
        )
        self.array[...] = codes
        inside = np.ndarray(
            (*codes.shape, self.element), bool, bytearray(self.raw.size), self.start,
            (*self.strides, 1),
        )  # fmt: skip
        inside[...] = True
        self.outside = ~np.frombuffer(inside.base, bool)

    def values(self):
        assert (self.raw[self.outside] == POISON).all(), "a write outside of an array"
        if self.kind == "bool":
            return self.array.astype(bool)
        if self.kind in CODES:
            return self.array.copy()
        return decode(np.ascontiguousarray(self.array), dtype(self.kind, MEMORY)).astype(np.float32)


def _codes(values, kind):
    if kind in CODES:
        return np.ascontiguousarray(values, CODES[kind])
    return np.ascontiguousarray(encode(np.asarray(values, np.float32), dtype(kind, MEMORY)))


def _parameter(parameter, memory, dims, scalars, counter):
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
    return ctypes.c_longlong(array.strides[parameter["dim"]] // array.element)


def _map(parameter, array):
    """A tensor map as hopper_on_cpu.h reads it; of an empty array as `Kernel` does."""
    rank, address = len(array.shape), array.array.ctypes.data
    shape, pitches = list(reversed(array.shape)), [0, *reversed(array.strides[:-1])]
    if 0 in array.shape:
        scratch = np.zeros(64, np.uint8)
        array.scratch = scratch
        address = scratch.ctypes.data + -scratch.ctypes.data % 16
        shape, pitches = [1] * rank, [0] + [16] * (rank - 1)

    def five(items):
        return [*items, *[1] * (5 - rank)]

    packed = struct.pack(
        "<Q4i5i5i5q", address, rank, array.element, parameter["swizzle"],
        KINDS.index(parameter["dtype"]), *five(shape), *five(parameter["box"]), *five(pitches),
    )  # fmt: skip
    return ctypes.create_string_buffer(packed, 128)
