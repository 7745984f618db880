"""CUDA C++ to a cubin in this process, by the NVRTC library; needs no GPU.

NVRTC and nvcc of one release are the same front end and the same ptxas, and give the same machine
code; in a process of its own nvcc also preprocesses with the host's compiler and starts three more
programs, which takes a third of a build's processor time.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from pathlib import Path

from warploom.errors import InputError, ToolMissing
from warploom.runtime.bindings import one_line
from warploom.toolchain import Tool

FOLDERS = ("lib", "lib64")


def version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    """The library's release, such as (13, 3)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def beside(tool: Tool) -> ctypes.CDLL | None:
    """The NVRTC beside that nvcc, if it is there and of the same release."""
    release = tuple(int(part) for part in tool.version.split(".")[:2])
    root = Path(tool.path).resolve().parent.parent
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("libnvrtc.so.*")):
            try:
                found = ctypes.CDLL(str(path))
            except OSError:
                continue
            if version(found) == release:
                return found
    return None


@cache
def installed() -> ctypes.CDLL:
    """The NVRTC that NVIDIA's own packages find here; raises `ToolMissing` when there is none."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except (ImportError, RuntimeError, OSError) as error:
        raise ToolMissing(
            f"NVRTC cannot be loaded ({one_line(error)}); install it with: "
            "pip install 'warploom[gpu]'"
        ) from None


def compiled(
    nvrtc: ctypes.CDLL, text: str, file: str, options: tuple[str, ...]
) -> tuple[bytes | None, str]:
    """The cubin, whose line table names `file`, and what the compiler said; None when it refuses
    the text."""
    program = ctypes.c_void_p()
    created = ctypes.byref(program), text.encode(), file.encode()
    if nvrtc.nvrtcCreateProgram(*created, 0, None, None):
        return None, "no program is made of it"
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        refused = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        log = _bytes(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        return None if refused else _bytes(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def compile_source(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The cubin of a file with no headers for `arch`, such as 'sm_90a'; fp32 steps are not fused.

    Raises `ToolMissing` when NVRTC is absent, `InputError` with the first error in the compiler's
    log when the source does not compile.
    """
    flags = (f"--gpu-architecture={arch}", "--fmad=false", "--std=c++17", *options)
    cubin, log = compiled(installed(), source, "warploom.cu", flags)
    if cubin is None:
        lines = [line for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line]
        first = (errors or lines or ["no message"])[0]
        raise InputError(f"NVRTC cannot compile for {arch}: {first}")
    return cubin
