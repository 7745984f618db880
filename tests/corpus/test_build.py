"""The corpus builds, says what it built, and builds nothing twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ARCHITECTURES = {"sm_80", "sm_90a", "sm_100a"}


def load_builder() -> ModuleType:
    """`build.py` of this folder as a module."""
    spec = importlib.util.spec_from_file_location(
        "warploom_corpus_builder", Path(__file__).with_name("build.py")
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder() -> Any:
    """The builder module."""
    return load_builder()


@pytest.fixture(scope="module")
def corpus(builder: Any) -> list[Any]:
    """The entries of the shared corpus under build/corpus."""
    return builder.build_corpus()


def test_covers_compilers_and_architectures(corpus: list[Any]) -> None:
    assert len(corpus) >= 24
    assert {entry.arch for entry in corpus} == ARCHITECTURES
    assert sum(entry.arch == "sm_90a" for entry in corpus) >= 15
    origins = {entry.name.split("_")[0] for entry in corpus}
    assert origins == {"triton", "cuda", "prebuilt"}


def test_every_entry_is_an_elf_with_the_named_kernels(builder: Any, corpus: list[Any]) -> None:
    for entry in corpus:
        cubin = (builder.DEFAULT_DIRECTORY / entry.file).read_bytes()
        assert cubin[:4] == b"\x7fELF", entry.name
        assert builder.digest(cubin) == entry.sha256, entry.name
        assert entry.kernels, entry.name
        for kernel in entry.kernels:
            assert b".text." + kernel.encode() + b"\0" in cubin, entry.name


def test_several_kernels_in_one_cubin(corpus: list[Any]) -> None:
    by_name = {entry.name: entry for entry in corpus}
    several = by_name["cuda_several_sm90a"]
    assert several.kernels == ["bytes", "gather", "saxpy", "stencil", "transpose"]


def test_nothing_is_built_twice(builder: Any, corpus: list[Any]) -> None:
    lines: list[str] = []
    again = builder.build_corpus(report=lines.append)
    assert lines == []
    assert again == corpus


def test_a_damaged_file_is_built_again(builder: Any, tmp_path: Path) -> None:
    recipe = next(iter(builder.prebuilt_recipes()))
    entry = builder.bring_up_to_date(tmp_path, recipe, {}, lambda line: None)
    path = tmp_path / entry.file
    path.write_bytes(b"not a cubin")
    lines: list[str] = []
    builder.bring_up_to_date(tmp_path, recipe, {entry.name: entry}, lines.append)
    assert len(lines) == 1
    assert builder.digest(path.read_bytes()) == entry.sha256
