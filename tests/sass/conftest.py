"""The corpus of real cubins, decoded once a session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from warploom.sass.cubin import Cubin, load
from warploom.sass.kernel import Kernel, decode_all

BUILDER = Path(__file__).parents[1] / "corpus" / "build.py"


@pytest.fixture(scope="session")
def corpus() -> list[Path]:
    """Every cubin of the corpus, built when it is not there."""
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
