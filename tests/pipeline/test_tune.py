"""`warploom tune` end to end under the model, and its bad inputs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.cli.tune import parse_duration
from warploom.errors import InputError
from warploom.integrations.deploy import FolderStore, content_key
from warploom.pipeline.targets import read_target
from warploom.pipeline.tune import tune
from warploom.pipeline.tuned import TuneSettings
from warploom.sass.aliasing import AliasMode
from warploom.sass.cubin import load
from warploom.sass.verify import verify

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tune_gemm_leaky_relu.py"


@pytest.fixture(scope="module")
def small() -> Path:
    """A small real cubin of the corpus."""
    folder = ROOT / "build" / "corpus"
    spec = importlib.util.spec_from_file_location(
        "warploom_corpus_builder", ROOT / "tests" / "corpus" / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    module.build_corpus()
    return folder / "triton_softmax_1x4096_w8_s1_sm90.cubin"


def _run(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_search_leaves_a_legal_deployable_cubin(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    report = tune(target, TuneSettings("greedy", "model", 60.0, candidates=150), tmp_path)
    assert report.changed and report.speedup > 1.0
    original, tuned = load(tmp_path / "original.cubin"), load(tmp_path / "tuned.cubin")
    assert original.data == small.read_bytes()
    verdict = verify(original, tuned, mode=AliasMode.TRITON)
    assert verdict.legal and verdict.moved + verdict.control_edits > 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["result"]["speedup_is"] == "modelled, not measured"
    assert manifest["result"]["timing_verdict"] == "not measured"
    store = FolderStore(tmp_path / "store")
    assert store.lookup(content_key(original.data)) == tuned.data
    assert "moved" in (tmp_path / "diff.txt").read_text()
    assert (tmp_path / "diff.html").read_text().lstrip().startswith("<!")


def test_the_same_seed_gives_the_same_cubin(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    settings = TuneSettings("anneal", "model", 60.0, candidates=40, seed=7)
    first = tune(target, settings, tmp_path / "a").cubin.data
    assert tune(target, settings, tmp_path / "b").cubin.data == first


def test_resume_goes_on_from_the_best(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    first = tune(target, TuneSettings("greedy", "model", 60.0, candidates=80), tmp_path)
    again = TuneSettings("greedy", "model", 60.0, candidates=40, seed=1, resume=True)
    assert tune(target, again, tmp_path).speedup >= first.speedup


def test_a_folder_of_another_kernel_is_not_resumed(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    tune(target, TuneSettings("greedy", "model", 60.0, candidates=30), tmp_path)
    other = small.parent / "triton_rmsnorm_2x4096_w8_s2_sm90.cubin"
    settings = TuneSettings("greedy", "model", 60.0, candidates=10, resume=True)
    with pytest.raises(InputError, match="another kernel"):
        tune(read_target(str(other), None, None), settings, tmp_path)


def test_the_example_is_a_target() -> None:
    target = read_target(f"{EXAMPLE}:kernel", None, None, arch=80)
    assert target.cubin.sm == 80 and target.launch is not None
    assert target.launch.block == (256, 1, 1)


BAD = [
    (["tune", "nothing.cubin", "-o", "{out}"], "nothing.cubin"),
    (["tune", "nothing", "-o", "{out}"], "expected FILE.cubin, a build folder or file.py:object"),
    (["tune", "{cubin}", "-o", "{out}", "--search", "luck"], "expected one of random"),
    (["tune", "{cubin}", "-o", "{out}", "--budget", "soon"], "expected a time such as"),
    (["tune", "{cubin}", "-o", "{out}", "--samples", "-1"], "--samples -1, expected 0 or more"),
    (
        ["tune", "{cubin}", "-o", "{out}", "--candidates", "0"],
        "--candidates 0, expected at least 1",
    ),
    (["tune", "{cubin}", "-o", "{out}", "--alias", "none"], "expected strict or triton"),
    (["tune", "{cubin}", "-o", "{out}", "--kernel", "other"], "has no kernel 'other'"),
    (["tune", "{cubin}", "-o", "{out}", "--measure", "gpu"], "needs the launch"),
    (["tune", "{cubin}", "-o", "{out}", "--measure", "luck"], "expected gpu or model"),
    (["tune", "{cubin}", "-o", "{out}", "--resume", "--measure", "model"], "no earlier search"),
    (["tune", "{example}:nothing", "-o", "{out}"], "has no object called 'nothing'"),
    (["tune", "{example}:M", "-o", "{out}"], "expected a CapturedKernel"),
    (["tune", "{cubin}", "-o", "/proc/nowhere", "--measure", "model"], "cannot write"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, small: Path, tmp_path: Path
) -> None:
    names = {"cubin": small, "out": tmp_path / "out", "example": EXAMPLE}
    result = _run([argument.format(**names) for argument in arguments])
    assert isinstance(result.exception, InputError), result.output
    assert message in str(result.exception)
    assert result.exception.exit_code == 2
    assert not (tmp_path / "out" / "tuned.cubin").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("5m", 300), ("2h", 7200)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
