"""nvcc's compiler in this process: the NVRTC library that came with it, by ctypes.

NVRTC and nvcc of one release have the same front end and the same ptxas, and give the same machine
code. nvcc also preprocesses with the host's compiler and starts three more programs, which takes a
third of a build's processor time. nvcc compiles again what NVRTC refuses, so that errors read as
nvcc's.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from warploom.toolchain import Tool

FOLDERS = ("lib", "lib64")


@cache
def library(tool: Tool) -> ctypes.CDLL | None:
    """The NVRTC beside that nvcc, if it is there and of the same release."""
    release = tuple(int(part) for part in tool.version.split(".")[:2])
    root = Path(tool.path).resolve().parent.parent
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("libnvrtc.so.*")):
            try:
                found = ctypes.CDLL(str(path))
            except OSError:
                continue
            major, minor = ctypes.c_int(), ctypes.c_int()
            found.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            if (major.value, minor.value) == release:
                return found
    return None


def compile_here(
    tool: Tool, text: str, file: str, options: tuple[str, ...]
) -> tuple[bytes, str] | None:
    """The cubin, whose line table names `file`, and what the compiler said; None when NVRTC is not
    there or refuses."""
    nvrtc = library(tool)
    if nvrtc is None:
        return None
    program = ctypes.c_void_p()
    created = ctypes.byref(program), text.encode(), file.encode()
    if nvrtc.nvrtcCreateProgram(*created, 0, None, None):
        return None
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), flags):
            return None
        log = _bytes(nvrtc, program, "ProgramLog")
        cubin = _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log.rstrip(b"\0").decode(errors="replace")


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
