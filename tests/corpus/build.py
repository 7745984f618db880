"""Builds a corpus of real cubins with no GPU: Triton, CUDA C++ through NVRTC, old prebuilts.

    python -m tests.corpus.build [DIRECTORY]      (default build/corpus)

Each cubin is rebuilt only when the hash of its sources, options and compiler version changed;
`manifest.json` lists them all. Processes that build the same directory wait for each other.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import itertools
import json
import lzma
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
DEFAULT_DIRECTORY = REPOSITORY / "build" / "corpus"

# (source, architectures): everything that NVRTC builds.
CUDA_SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sgemm", ("sm_80", "sm_90a", "sm_100a")),
    ("reduce", ("sm_80", "sm_90a")),
    ("mma_gemm", ("sm_80", "sm_90a")),
    ("calls", ("sm_80", "sm_90a")),
    ("doubles", ("sm_80", "sm_90a")),
    ("switch", ("sm_80", "sm_90a")),
    ("several", ("sm_80", "sm_90a")),
    ("wgmma_gemm", ("sm_90a",)),
    ("fp8_wgmma", ("sm_90a",)),
    ("cluster", ("sm_90a",)),
)

# (kernel of the suite, indices of its configurations, compute capabilities).
TRITON_KERNELS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("attention", (3,), (80, 90)),
    ("gemm_leaky_relu", (0,), (80, 90)),
    ("batched_gemm", (1,), (80, 90)),
    ("feed_forward", (0,), (80, 90)),
    ("softmax", (1, 5), (80, 90)),
    ("layernorm", (1,), (80, 90)),
    ("rmsnorm", (3,), (80, 90)),
    ("skinny_gemm", (0,), (80, 90)),
    ("gemm_leaky_relu", (2,), (100,)),
)


@dataclass(frozen=True)
class Entry:
    """One cubin of the corpus: its entry functions, and a LaunchSpec as JSON where we have one."""

    name: str
    file: str
    arch: str
    source: str
    compiler: str
    kernels: list[str]
    key: str
    sha256: str
    launch: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to make one cubin: `make` returns the bytes and, for Triton, what a launch needs."""

    name: str
    arch: str
    source: str
    compiler: str
    key: str
    make: Callable[[], tuple[bytes, dict[str, Any]]]


def build_corpus(
    directory: Path = DEFAULT_DIRECTORY, report: Callable[[str], None] = lambda line: None
) -> list[Entry]:
    """Bring `directory` up to date and return its entries, sorted by name."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_manifest(directory)
        recipes = [*triton_recipes(), *cuda_recipes(), *prebuilt_recipes()]
        entries = [bring_up_to_date(directory, recipe, known, report) for recipe in recipes]
        entries.sort(key=lambda entry: entry.name)
        text = json.dumps([asdict(entry) for entry in entries], indent=1) + "\n"
        write_atomically(directory / "manifest.json", text.encode())
    return entries


def read_manifest(directory: Path) -> dict[str, Entry]:
    """The entries of an earlier build by name; nothing when there is none or it is not ours."""
    try:
        rows = json.loads((directory / "manifest.json").read_text())
        return {row["name"]: Entry(**row) for row in rows}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def bring_up_to_date(
    directory: Path, recipe: Recipe, known: dict[str, Entry], report: Callable[[str], None]
) -> Entry:
    """The entry of `recipe`, built again only when its key or its file changed."""
    path = directory / f"{recipe.name}.cubin"
    old = known.get(recipe.name)
    if old and old.key == recipe.key and path.is_file() and digest(path.read_bytes()) == old.sha256:
        return old
    start = time.monotonic()
    cubin, launch = recipe.make()
    write_atomically(path, cubin)
    report(f"{recipe.name}: {len(cubin)} bytes in {time.monotonic() - start:.1f} s")
    kernels = entry_functions(cubin)
    return Entry(
        recipe.name,
        path.name,
        recipe.arch,
        recipe.source,
        recipe.compiler,
        kernels,
        recipe.key,
        digest(cubin),
        json.loads(json.dumps(launch)),
    )


def triton_recipes() -> Iterable[Recipe]:
    """The suite of bench/triton_suite, a few configurations each, and triton_extra.py."""
    suite = importlib.import_module("bench.triton_suite")
    offline = importlib.import_module("bench.triton_suite.offline")
    folder = REPOSITORY / "bench" / "triton_suite"
    shared = (folder / "common.py", folder / "offline.py")
    for name, indices, capabilities in TRITON_KERNELS:
        kernel = suite.SUITE[name]
        sources = (folder / f"{name}.py", *shared)
        for arch, index in itertools.product(capabilities, indices):
            config = kernel.configs[index]
            make = functools.partial(offline.compile_offline, kernel, config, arch)
            yield triton_recipe(f"{name}_{config.name}", arch, sources, make)
    for name, make, capabilities in importlib.import_module("tests.corpus.triton_extra").EXTRA:
        for arch in capabilities:
            sources = (HERE / "triton_extra.py",)
            yield triton_recipe(name, arch, sources, functools.partial(make, arch))


def triton_recipe(
    name: str, arch: int, sources: tuple[Path, ...], capture: Callable[[], Any]
) -> Recipe:
    """The recipe of one captured Triton kernel."""
    module = importlib.import_module("warploom.integrations.triton_capture")
    launch = importlib.import_module("warploom.runtime.launch")
    recipe_files = (Path(module.__file__ or ""), Path(launch.__file__ or ""))
    version = module.triton_module().__version__
    compiler = f"triton {version}, ptxas {module.ptxas_version(arch)}"

    def make() -> tuple[bytes, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = capture()
        return kernel.cubin, kernel.launch.to_json()

    return Recipe(
        name=f"triton_{name}_sm{arch}",
        arch=f"sm_{arch}a" if arch >= 90 else f"sm_{arch}",
        source=str(sources[0].relative_to(REPOSITORY)),
        compiler=compiler,
        key=key_of((*sources, *recipe_files), compiler, name, str(arch)),
        make=make,
    )


def cuda_recipes() -> Iterable[Recipe]:
    """The sources under tests/corpus/cuda."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, major, minor = nvrtc.nvrtcVersion()
    compiler = f"nvrtc {major}.{minor}"
    for name, architectures in CUDA_SOURCES:
        path = HERE / "cuda" / f"{name}.cu"
        for arch in architectures:
            yield Recipe(
                name=f"cuda_{name}_{arch.replace('_', '')}",
                arch=arch,
                source=str(path.relative_to(REPOSITORY)),
                compiler=compiler,
                key=key_of((path,), compiler, arch),
                make=lambda p=path, a=arch: (compile_cuda(nvrtc, p, a), {}),
            )


def compile_cuda(nvrtc: Any, path: Path, arch: str) -> bytes:
    """The cubin of a CUDA C++ file; raises `RuntimeError` with the compiler's log."""
    nvidia = importlib.import_module("nvidia")
    include = Path(next(iter(nvidia.__path__))) / "cu13" / "include"
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo", f"-I{include}"]
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{path} for {arch}: {log.decode(errors='replace')}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def prebuilt_recipes() -> Iterable[Recipe]:
    """Cubins of compilers that are not installed here, kept as files (see prebuilt/README.md)."""
    for path in sorted((HERE / "prebuilt").glob("*.cubin.xz")):
        name = path.name.removesuffix(".cubin.xz")
        arch = re.search(r"_sm(\d+a?)_", name)
        yield Recipe(
            name=f"prebuilt_{name}",
            arch=f"sm_{arch.group(1)}" if arch else "",
            source=str(path.relative_to(REPOSITORY)),
            compiler=name.rsplit("_", 1)[1],
            key=key_of((path,)),
            make=lambda p=path: (lzma.decompress(p.read_bytes()), {}),
        )


def entry_functions(cubin: bytes) -> list[str]:
    """Names of the kernels in an ELF64 cubin: function symbols with the entry flag, 0x10."""
    table = int.from_bytes(cubin[0x28:0x30], "little")
    entry_size, count = (int.from_bytes(cubin[at : at + 2], "little") for at in (0x3A, 0x3C))
    headers = [cubin[table + i * entry_size :][:entry_size] for i in range(count)]

    def body(header: bytes) -> bytes:
        start = int.from_bytes(header[0x18:0x20], "little")
        return cubin[start : start + int.from_bytes(header[0x20:0x28], "little")]

    kernels: list[str] = []
    for header in headers:
        if int.from_bytes(header[4:8], "little") != 2:  # SHT_SYMTAB
            continue
        names = body(headers[int.from_bytes(header[0x28:0x2C], "little")])
        symbols = body(header)
        for at in range(0, len(symbols), 24):
            if symbols[at + 4] & 15 == 2 and symbols[at + 5] & 0x10:  # STT_FUNC, STO_CUDA_ENTRY
                start = int.from_bytes(symbols[at : at + 4], "little")
                kernels.append(names[start : names.index(b"\0", start)].decode())
    return sorted(kernels)


def key_of(sources: Iterable[Path], *settings: str) -> str:
    """A hash of this builder's inputs: the sources' contents and the settings."""
    mixed = hashlib.sha256()
    for part in (*(path.read_bytes() for path in sources), *(text.encode() for text in settings)):
        mixed.update(hashlib.sha256(part).digest())
    return mixed.hexdigest()


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, then rename: a reader never sees half a file."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    began = time.monotonic()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIRECTORY
    built = build_corpus(target, report=print)
    print(f"{len(built)} cubins in {target} ({time.monotonic() - began:.1f} s)")
