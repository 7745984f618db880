"""The corpus of real cubins, built and disassembled once; where what tests compile is kept."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache as memo
from hashlib import sha256
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import warploom
from warploom.files import cache_folder, read_kept, write_text_atomically
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.decode.kernel import Kernel, decode_all
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier
from warploom.toolchain import Tool

# A background job of a shell ignores Ctrl-C, and its children inherit that: tests that send
# one to a child would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BUILDER = Path(__file__).parent / "corpus" / "build.py"
KEPT = cache_folder() / "tests"  # of all clones of the repository
WEEK = 7 * 86400.0  # seconds
PACKAGE = Path(warploom.__file__).parent
# A folder of the cache -> what calls the compiler whose results it holds.
COMPILED = {
    "cubin": (
        *sorted((PACKAGE / "codegen" / "compile").glob("*.py")),
        PACKAGE / "codegen" / "analysis" / "entry.py",
        PACKAGE / "runtime" / "nvrtc.py",
        PACKAGE / "files.py",
    ),
    "emulate": (PACKAGE / "emulate" / "build.py", PACKAGE / "files.py"),
}


# Threads of torch wait for each other by spinning, one a processor, and tests run beside tests: on
# two processors the blocks of the examples took twice the time of one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The collector of cycles comes less often: over decoded cubins it took a sixth of the time.
gc.set_threshold(100_000, 50, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pages come first, whose tests are the longest: at the end one process would wait for the
    other's."""
    items.sort(key=lambda item: item.path.name != "test_documents.py")


def pytest_collection_finish() -> None:
    """Let the collector of cycles leave alone what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests make goes to one cache of this run, which its processes share, unless the
    environment names one (that has kernels for a GPU machine without a compiler).

    Schedules and points in it are as good as the code that made them, so they end with the run.
    Compiled code is kept in the user's cache for a week, for this clone and others: its key is its
    source, its compiler and what calls that.
    """
    if "WARPLOOM_CACHE" in os.environ:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    run = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warploom-cache"
    run.mkdir(exist_ok=True)
    for path in (*(KEPT / "compiled").rglob("*"), *(KEPT / "listings").glob("*")):
        with contextlib.suppress(OSError):  # another process may have been here
            if path.is_file() and time.time() - path.stat().st_mtime > WEEK:
                path.unlink()
    for name, sources in COMPILED.items():
        code = b"".join(path.read_bytes() for path in sources)
        kept = KEPT / "compiled" / f"{name}-{sha256(code).hexdigest()[:16]}"
        kept.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (run / name).symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_CACHE", str(run))
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own: what it keeps is nobody else's."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def listings() -> Iterator[None]:
    """What nvdisasm says of a file is kept beside compiled code: a run takes half a second."""
    run, listed = Tool.run, KEPT / "listings"

    def kept(
        tool: Tool, *args: str, timeout: float = 300.0, folder: Path | None = None
    ) -> CompletedProcess[str]:
        image = Path(args[-1])
        if tool.name != "nvdisasm" or not image.is_file():
            return run(tool, *args, timeout=timeout, folder=folder)
        asked = repr((tool.version, tool.path.stat().st_size, args[:-1])).encode()
        path = listed / f"{sha256(asked + image.read_bytes()).hexdigest()}.json"
        if (text := read_kept(path)) is not None:
            return CompletedProcess(args, 0, *json.loads(text))
        done = run(tool, *args, timeout=timeout)
        # Of an older ELF it warns that it analyses no data flow. What it refuses it names by the
        # file, which is another one the next time.
        if not done.returncode:
            write_text_atomically(path, json.dumps([done.stdout, done.stderr]))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tool, "run", kept)
        yield


@pytest.fixture(scope="session")
def corpus() -> list[Path]:
    """Every cubin of the corpus, built when it is not there (the builder takes a file lock)."""
    spec = importlib.util.spec_from_file_location("warploom_corpus_builder", BUILDER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [module.DEFAULT_DIRECTORY / entry.file for entry in module.build_corpus()]


@pytest.fixture(scope="session")
def cubin_of(corpus: list[Path]) -> Callable[[str], Cubin]:
    """A cubin of the corpus by the start of its file name."""

    @memo
    def find(start: str) -> Cubin:
        return load(next(path for path in corpus if path.name.startswith(start)))

    return find


@pytest.fixture(scope="session")
def kernels_of(cubin_of: Callable[[str], Cubin]) -> Callable[[str], list[Kernel]]:
    """The kernels of a cubin of the corpus."""

    @memo
    def find(start: str) -> list[Kernel]:
        return list(decode_all(cubin_of(start)).values())

    return find


@pytest.fixture(scope="session")
def verifier_of() -> Callable[[Cubin, str, AliasMode], Verifier]:
    """A verifier for one kernel of a cubin, kept for the session."""
    known: dict[tuple[str, str, AliasMode], Verifier] = {}

    def find(cubin: Cubin, name: str, mode: AliasMode = AliasMode.STRICT) -> Verifier:
        key = (cubin.digest, name, mode)
        if key not in known:
            known[key] = Verifier(cubin, name, mode)
        return known[key]

    return find
