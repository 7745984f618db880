"""CUDA C++ to a cubin in this process, by NVRTC; needs no GPU."""

from __future__ import annotations

from typing import Any

from warploom.errors import DeviceError, InputError, ToolMissing
from warploom.runtime.bindings import import_binding, one_line


def compile_source(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Compile CUDA C++ to a cubin for `arch` (such as 'sm_90a') with NVRTC; needs no GPU.

    Raises `ToolMissing` when cuda-bindings or NVRTC is absent, `InputError` with the first line of
    the compiler's log when the source does not compile.
    """
    nvrtc = import_binding("nvrtc")
    flags = [f"--gpu-architecture={arch}", "--fmad=false", "--std=c++17", *options]
    try:
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"warploom.cu", 0, [], [])
    except (RuntimeError, OSError) as error:
        raise ToolMissing(
            f"NVRTC cannot be loaded ({one_line(error)}); install it with: "
            "pip install 'warploom[compile,gpu]'"
        ) from None
    _check(nvrtc, "nvrtcCreateProgram", status)
    encoded = [flag.encode() for flag in flags]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InputError(f"NVRTC cannot compile for {arch}: {_first_error(nvrtc, program)}")
    status, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(nvrtc, "nvrtcGetCUBINSize", status)
    cubin = bytes(bytearray(size))
    (status,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    _check(nvrtc, "nvrtcGetCUBIN", status)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _first_error(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(bytearray(size))
    nvrtc.nvrtcGetProgramLog(program, log)
    lines = [line for line in log.decode(errors="replace").strip("\0").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["no message"])[0]


def _check(nvrtc: Any, call: str, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{call} failed: {status.name}")
