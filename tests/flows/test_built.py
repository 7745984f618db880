"""`warploom build`, then `warploom tune` on its folder, then the tuned kernel deployed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import warploom
from warploom.cli import app
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.flows.built import read_build, write_build_note
from warploom.flows.targets import read_target
from warploom.integrations.deploy import FolderStore
from warploom.integrations.triton_swap import KernelNotStored
from warploom.runtime.kernel import image_of
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import verify
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.players import PLAYERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GEMM as `warploom build` leaves it."""
    out = tmp_path_factory.mktemp("built") / "gemm"
    done = CliRunner().invoke(app, ["build", "gemm", "-o", str(out), "--set", "tile=128,128,64"])
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def moved(folder: Path) -> bytes:
    """The same kernel in another order: any legal state will do here."""
    cubin = parse(read_build(folder).built.cubin, "gemm")
    budget = Budget(60.0, candidates=20)
    found = run_search(
        cubin,
        PLAYERS["random"],
        ModelEvaluator(cubin, "gemm"),
        budget,
        SearchOptions("gemm", AliasMode.TRITON),
    )
    return next(c.cubin for _, c in found.best if c.cubin != cubin.data)


def test_a_build_folder_is_a_target_with_a_launch(folder: Path) -> None:
    target = read_target(str(folder), None, None, sizes={"m": "512"})
    assert target.kernel == "gemm" and target.launch is not None
    assert next(b for b in target.launch.buffers if b.name == "a").shape == (512, 4096)
    assert target.build is not None and target.build.configuration == {"tile": "128,128,64"}


def test_tuning_a_folder_leaves_a_result_like_any_other(folder: Path, tmp_path: Path) -> None:
    arguments = ["tune", str(folder), "-o", str(tmp_path), "--measure", "model"]
    done = CliRunner().invoke(app, [*arguments, "--search", "random", "--candidates", "12"])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["kernel"] == "gemm" and manifest["launch"]["shared_bytes"] > 100_000
    assert manifest["result"]["errors_against_float64"] == "not measured"


def test_a_tuned_kernel_is_a_build_folder_again(folder: Path, moved: bytes, tmp_path: Path) -> None:
    build = read_build(folder)
    build.with_cubin(moved, tmp_path)
    again = Built.read(tmp_path)
    assert again.cubin == moved and again.source.parameters == build.built.source.parameters
    assert read_build(tmp_path).sizes({}) == build.sizes({})
    original = parse(build.built.cubin, "original")
    assert verify(original, parse(moved, "tuned"), "gemm", AliasMode.TRITON).legal


def test_an_installed_store_is_asked_when_a_kernel_is_loaded(
    folder: Path, moved: bytes, tmp_path: Path
) -> None:
    original = read_build(folder).built.cubin
    FolderStore(tmp_path).put(original, moved, "gemm", "sm_90a")
    try:
        warploom.install(tmp_path)
        assert image_of("gemm", original) == moved
        warploom.install(tmp_path, on_miss="raise")
        with pytest.raises(KernelNotStored, match="no tuned cubin is stored"):
            image_of("gemm", moved)
    finally:
        warploom.uninstall()
    assert image_of("gemm", original) == original


def test_what_is_no_build_folder_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no manifest"):
        read_target(str(tmp_path), None, None)
    with pytest.raises(InputError, match="expected one of its sizes"):
        read_target(str(folder), None, None, sizes={"rows": "3"})
    with pytest.raises(InputError, match="is kernel gemm"):
        read_target(str(folder), "attention", None)
    read_build(folder).with_cubin(read_build(folder).built.cubin, tmp_path)
    (tmp_path / "build.json").unlink()
    with pytest.raises(InputError, match="run warploom build or optimize again"):
        read_target(str(tmp_path), None, None)


def test_a_note_of_another_cubin_is_refused(folder: Path, moved: bytes, tmp_path: Path) -> None:
    """A kernel written over a built one by something that leaves the old build.json."""
    note = json.loads((folder / "build.json").read_text())
    assert set(note) == {"kernel", "settings", "gpu", "schedule", "cubin_sha256"}
    build = read_build(folder).with_cubin(moved, tmp_path)
    assert read_target(str(tmp_path), None, None).cubin.data == moved
    (tmp_path / "build.json").write_text((folder / "build.json").read_text())
    with pytest.raises(InputError, match=r"build\.json describes another cubin than .*gemm\.cubin"):
        read_target(str(tmp_path), None, None)
    write_build_note(tmp_path, "gemm", build.settings, "h200", build.built)
    assert read_target(str(tmp_path), None, None).cubin.data == moved
