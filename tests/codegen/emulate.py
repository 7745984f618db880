"""Running emitted kernels on the CPU: the emitted text, compiled as C++ (cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np

from warploom.codegen.prelude import PRELUDE
from warploom.codegen.prelude_sm80 import SM80_PRELUDE
from warploom.codegen.simt.prelude import TYPES
from warploom.runtime.dtypes import decode, dtype_named, encode
from warploom.tile.interpret import bind, sizes

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
# Helpers that are PTX: the header has them in C++.
REPLACED = (
    *TYPES.values(),
    *(text for text in PRELUDE.values() if "asm" in text),
    *(text for text in SM80_PRELUDE.values() if "asm" in text),
)
CODES = {"int32": np.int32, "bool": np.uint8, "fp32": np.float32}


def compile_all(sources, folder):
    """One shared library with every source, each in a namespace of its own; `run` calls them."""
    parts = [f'#include "{HEADER}"']
    for number, source in enumerate(sources):
        text = source.text
        for helper in REPLACED:
            text = text.replace(helper, "")
        text = text.replace('extern "C" __global__', "__global__")
        text = text.replace("extern __shared__", "extern")
        memory = "alignas(1024) unsigned char shared[1 << 18], shared_raw[1 << 18];"
        parts.append(f"namespace k{number} {{ {memory}\n{text}}}")
        parts.append(
            f'extern "C" void run_{number}(void** p, int blocks, int threads) '
            f"{{ launch(k{number}::{source.name}, p, blocks, threads, k{number}::shared_raw); }}"
        )
    whole = "\n".join(parts).replace("#define DEVICE __device__ __forceinline__\n", "")
    whole = "#define DEVICE __device__ __forceinline__\n" + whole
    name = hashlib.sha256(whole.encode()).hexdigest()[:16]
    path, library = Path(folder) / f"{name}.cpp", Path(folder) / f"{name}.so"
    if not library.exists():
        path.write_text(whole)
        done = subprocess.run(
            ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-o", str(library), str(path)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


def run(library, number, source, program, arrays, scalars=None, blocks=2):
    """Every array as the kernel leaves it."""
    values = bind(program, arrays)
    dims = sizes(program, values)
    memory = {spec.name: _codes(values[spec.name], spec.dtype.name) for spec in program.arrays}
    packed = [_parameter(p, memory, dims, scalars or {}) for p in source.parameters]
    pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(p) for p in packed])
    getattr(library, f"run_{number}")(pointers, blocks, source.threads)
    return {spec.name: _values(memory[spec.name], spec.dtype.name) for spec in program.arrays}


def _codes(values, kind):
    if kind in CODES:
        return np.ascontiguousarray(values, CODES[kind])
    return np.ascontiguousarray(encode(np.asarray(values, np.float32), dtype_named(kind)))


def _values(codes, kind):
    if kind in CODES:
        return codes.astype(bool) if kind == "bool" else codes
    return decode(codes, dtype_named(kind)).astype(np.float32)


def _parameter(parameter, memory, dims, scalars):
    kind = parameter["kind"]
    if kind == "pointer":
        return ctypes.c_void_p(memory[parameter["array"]].ctypes.data)
    if kind == "stride":
        array = memory[parameter["array"]]
        return ctypes.c_longlong(array.strides[parameter["dim"]] // array.itemsize)
    if kind == "dim":
        return ctypes.c_int(dims[parameter["name"]])
    value = scalars[parameter["name"]]
    return ctypes.c_int(value) if parameter["dtype"] == "int32" else ctypes.c_float(value)
