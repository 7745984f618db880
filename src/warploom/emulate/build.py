"""Compiling for the emulated machine: g++, the machine's own code once, what is compiled kept."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from warploom.errors import InputError, ToolMissing
from warploom.files import cache_folder

MODEL = Path(__file__).parent / "model"
HEADER = "host.h"  # which every translated source includes first
PARTS = ("machine.cpp", "async.cpp")
OLDEST = 9  # of gcc: what its instrumentation calls
# Kernels: every access to memory that others may see is reported to the machine (its hooks bear the
# names of gcc's thread sanitizer, whose runtime is not linked), and frames can be followed.
KERNEL_FLAGS = (
    "-std=c++17", "-O0", "-g1", "-w", "-fPIC", "-fno-omit-frame-pointer", "-fsanitize=thread",
    "-fno-threadsafe-statics",
    "--param", "tsan-instrument-func-entry-exit=0",
)  # fmt: skip
MACHINE_FLAGS = ("-std=c++17", "-O2", "-w", "-fPIC", "-fno-omit-frame-pointer")
SECONDS = 600


@functools.cache
def compiler() -> str:
    """The path of g++; `ToolMissing` says how to get it."""
    chosen = os.environ.get("WARPLOOM_GXX") or shutil.which("g++")
    if chosen is None or not Path(chosen).is_file():
        raise ToolMissing(
            f"the emulation compiles kernels with g++ {OLDEST} or newer on Linux, and there is none"
            f"{f' at {chosen}' if chosen else ''}: install it (apt install g++) or set WARPLOOM_GXX"
        )
    macros = _run([chosen, "-dM", "-E", "-x", "c++", "/dev/null"], "g++").stdout
    found = dict(re.findall(r"^#define (\w+) (\w+)$", macros, re.MULTILINE))
    if "__clang__" in found or int(found.get("__GNUC__", 0)) < OLDEST or "__linux__" not in found:
        raise ToolMissing(f"{chosen} is no g++ {OLDEST} or newer for Linux: set WARPLOOM_GXX")
    return chosen


def compiled(text: str, name: str, shared: bool) -> Path:
    """A shared library, or a program, of C++; from the cache where it is."""
    key = hashlib.sha256("\0".join((text, _model(), str(shared))).encode()).hexdigest()[:24]
    path = cache_folder() / "emulate" / (key + (".so" if shared else ""))
    if path.exists():
        return path
    machine = [_machine(part) for part in PARTS]
    with tempfile.TemporaryDirectory() as folder:
        source, object_, made = (Path(folder) / end for end in ("k.cpp", "k.o", "made"))
        source.write_text(f'#include "{HEADER}"\n{text}')
        found = [f"-I{_headers()}", f"-I{MODEL}"]
        call = [compiler(), *KERNEL_FLAGS, *found, "-c", str(source), "-o", str(object_)]
        _run(call, name)
        kind = ["-shared", "-Wl,-Bsymbolic"] if shared else []
        _run([compiler(), *kind, str(object_), *map(str, machine), "-o", str(made)], name)
        _keep(made, path)
    return path


@functools.cache
def _model() -> str:
    texts = [path.read_text() for path in sorted(MODEL.iterdir())]
    return "\0".join([*texts, *KERNEL_FLAGS, *MACHINE_FLAGS, compiler()])


def _machine(part: str) -> Path:
    """The object file of a part of the machine."""
    key = hashlib.sha256((part + _model()).encode()).hexdigest()[:24]
    path = cache_folder() / "emulate" / f"{key}.o"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "part.o"
            _run([compiler(), *MACHINE_FLAGS, "-c", str(MODEL / part), "-o", str(made)], part)
            _keep(made, path)
    return path


@functools.cache
def _headers() -> Path:
    """A folder with the headers compiled: most of a small kernel's compilation is theirs."""
    key = hashlib.sha256(("headers" + _model()).encode()).hexdigest()[:24]
    folder = cache_folder() / "emulate" / key
    path = folder / f"{HEADER}.gch"
    if not path.exists():
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary) / path.name
            call = [compiler(), *KERNEL_FLAGS, "-x", "c++-header", str(MODEL / HEADER)]
            _run([*call, "-o", str(made)], HEADER)
            _keep(made, path)
    return folder


def _keep(made: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.copy(made, beside)
        beside.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _run(call: list[str], name: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if re.search("error:|undefined", line)]
        first = (errors or done.stderr.splitlines() or ["no message"])[0]
        raise InputError(f"{name} does not compile for the emulation: {first}")
    return done
