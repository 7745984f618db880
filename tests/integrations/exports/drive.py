"""Calls each launcher over the stub libcuda; test_launchers.py runs it as a process.

Usage: drive.py STUB FOLDER, with python/, the library c.so and, where tvm_ffi is, ffi.so in FOLDER.
Prints {launcher: {kernel: [what the driver was asked in each call]}, "refused": {...}}.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases  # it is run as a script, beside it
import numpy as np

from warploom.runtime.kernel import Kernel
from warploom.runtime.tensors import contiguous

STUB = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
STUB.recorded.restype = ctypes.c_char_p
FOLDER = Path(sys.argv[2])
STREAM = 0x50


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Wl(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class OnGpu:
    """An array that exists as a description alone."""

    def __init__(self, given: Any, kind: Any, row_major: tuple[int, ...]) -> None:
        self.given, self.kind, self.dtype = given, kind, kind["library"]
        self.strides = given.strides or row_major
        self.__cuda_array_interface__ = {
            "shape": given.shape, "typestr": f"|V{kind['bytes']}", "data": (given.address, False),
            "strides": tuple(s * kind["bytes"] for s in given.strides) or None, "stream": None,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = np.zeros([1] * len(self.given.shape), np.float32).__dlpack__()
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        one = DLTensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor"))
        one.data, one.device_type, one.device_id = self.given.address, 2, 0
        one.code, one.bits = self.kind["dlpack"]
        one.byte_offset = 0
        for at, (extent, stride) in enumerate(zip(self.given.shape, self.strides, strict=True)):
            one.shape[at], one.strides[at] = extent, stride
        return capsule


class Produced:
    """The same as its producer describes it, whose stream a launch must wait for."""

    def __init__(self, of: OnGpu) -> None:
        self.dtype = of.dtype
        self.__cuda_array_interface__ = {**of.__cuda_array_interface__, "stream": 0x60}


def own(case: Any) -> Any:
    kernel = Kernel(case.interface, case.cubin)
    return lambda arrays, scalars: kernel(arrays, scalars, STREAM)


def bound(case: Any) -> Any:
    """Ours, bound to arrays that lie elsewhere; those with no elements it refuses."""
    kernel, types = Kernel(case.interface, case.cubin), cases.manifest()["types"]

    def call(arrays: Any, scalars: Any) -> None:
        if any(0 in one.given.shape for one in arrays.values()):
            kernel(arrays, scalars, STREAM)
            return
        moved = {
            n: replace(x.given, address=x.given.address + (3 << 20)) for n, x in arrays.items()
        }
        launch = kernel.bound(tensors(case, moved, types), scalars)
        launch([arrays[name].given.address for name in moved], STREAM)

    return call


def python(case: Any) -> Any:
    spec = importlib.util.spec_from_file_location("launch", FOLDER / "python" / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = module.load()[case.name]
    return lambda arrays, scalars: kernel(**arrays, **scalars, stream=STREAM)


def c(case: Any) -> Any:
    function = getattr(ctypes.CDLL(str(FOLDER / "c.so")), f"{case.name}_launch")
    function.restype = ctypes.c_char_p

    def call(arrays: Any, scalars: Any) -> None:
        made = []
        for one in arrays.values():
            rank = len(one.given.shape)
            shape = (ctypes.c_int64 * rank)(*one.given.shape)
            strides = (ctypes.c_int64 * rank)(*one.given.strides) if one.given.strides else None
            made.append(Wl(one.given.address, rank, *one.kind["dlpack"], shape, strides))
        numbers = [ctypes.c_float(v) if isinstance(v, float) else v for v in scalars.values()]
        wrong = function(*map(ctypes.byref, made), *numbers, 0, ctypes.c_void_p(STREAM))
        if wrong:
            raise ValueError(wrong.decode())

    return call


def ffi(case: Any) -> Any:
    tvm_ffi = importlib.import_module("tvm_ffi")
    module = tvm_ffi.load_module(str(FOLDER / "ffi.so"))
    schema = module.get_function_metadata(case.name)["type_schema"]
    assert schema.count("DLTensor*") == len(case.interface.arrays), schema

    def call(arrays: Any, scalars: Any) -> None:
        # DLPack knows no "row after row" here: strides are always said.
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), STREAM):
            module[case.name](*arrays.values(), *scalars.values())

    return call


def tensors(case: Any, given: Any, types: Any) -> dict[str, OnGpu]:
    kinds = case.interface.types
    return {n: OnGpu(g, types[kinds[n]], contiguous(g.shape)) for n, g in given.items()}


def main() -> None:
    types = cases.manifest()["types"]
    launchers = {"own": own, "bound": bound, "python": python, "c": c}
    if (FOLDER / "ffi.so").is_file():
        launchers["ffi"] = ffi
    seen: dict[str, Any] = {"refused": {}}
    for name, make in launchers.items():
        seen[name], ready = {}, {}
        for case in cases.CASES:
            STUB.expect(len(case.sizes), (ctypes.c_int * len(case.sizes))(*case.sizes))
            STUB.recorded()
            call = ready[case.name] = make(case)
            seen[name][case.name] = []
            for given in (*case.calls, case.calls[0]):
                call(tensors(case, given, types), case.scalars)
                seen[name][case.name].append(STUB.recorded().decode().splitlines())
        if name in ("own", "python"):
            given = tensors(cases.CASES[1], cases.CASES[1].calls[1], types)
            ready["rows"]({key: Produced(one) for key, one in given.items()}, {})
            seen[name]["produced"] = STUB.recorded().decode().splitlines()
        seen["refused"][name] = {}
        for what, (kernel, given) in cases.REFUSED.items():
            case = next(one for one in cases.CASES if one.name == kernel)
            try:
                ready[kernel](tensors(case, given, types), case.scalars)
                seen["refused"][name][what] = ""
            except Exception as error:
                seen["refused"][name][what] = str(error)
    seen["contexts"] = STUB.depth_of_contexts()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
