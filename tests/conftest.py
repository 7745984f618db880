"""The corpus of real cubins, built and decoded once a session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from warploom.sass.decode import kernel
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.decode.disassembly import Listing, disassemble
from warploom.sass.decode.kernel import Kernel, decode_all
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules import verify
from warploom.sass.rules.verify import Verifier

BUILDER = Path(__file__).parent / "corpus" / "build.py"


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

    @cache
    def find(start: str) -> Cubin:
        return load(next(path for path in corpus if path.name.startswith(start)))

    return find


@pytest.fixture(scope="session")
def kernels_of(cubin_of: Callable[[str], Cubin]) -> Callable[[str], list[Kernel]]:
    """The kernels of a cubin of the corpus."""

    @cache
    def find(start: str) -> list[Kernel]:
        return list(decode_all(cubin_of(start)).values())

    return find


_LISTINGS: dict[tuple[str, bool], dict[str, Listing]] = {}


@pytest.fixture(scope="module")
def disassembled_once() -> Iterator[None]:
    """One run of nvdisasm for each file and process: the same bytes give the same text."""

    def listing(cubin: Cubin, with_source: bool = False) -> dict[str, Listing]:
        key = (cubin.digest, with_source)
        if key not in _LISTINGS:
            _LISTINGS[key] = disassemble(cubin, with_source)
        return _LISTINGS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "disassemble", listing)
        patch.setattr(verify, "disassemble", listing)
        yield


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
