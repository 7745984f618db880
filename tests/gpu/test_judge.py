"""The judge on a GPU: right candidates pass and are timed, work on another stream is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.judge import judge

BENCH = Path(__file__).parents[2] / "bench" / "judged"
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FILES = {
    "problem.py": (
        "import torch\nfrom warploom import tile as t\nfrom warploom.judge import Problem\n"
        "problem = Problem(lambda x: torch.softmax(x, -1), inputs={'x': t.array(t.FP32, 'm n')},\n"
        "    outputs={'y': t.array(t.FP32, 'm n')}, sizes=[{'m': 5, 'n': 37}],\n"
        "    timed=[{'m': 1024, 'n': 512}])\n"
    ),
    "candidates.py": (
        "import torch\n\n"
        "def right(x):\n    return torch.softmax(x, -1)\n\n"
        "def other_stream(x):\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n        return torch.softmax(x, -1)\n\n"
        "def default_stream(x):\n"
        "    with torch.cuda.stream(torch.cuda.default_stream()):\n"
        "        return torch.softmax(x, -1)\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def test_a_right_candidate_passes_and_is_timed(folder: Path) -> None:
    verdict = judge(f"{folder / 'candidates.py'}:right", str(folder / "problem.py"), "gpu")
    assert verdict.passed, str(verdict)
    (timed,) = verdict.timed
    assert 0.1 < timed.share < 1.0 and 0.8 < timed.timed.ratio.median < 1.25
    assert timed.timed.control.low < 1.05 and timed.timed.control.high > 0.95


@pytest.mark.parametrize("name", ["other_stream", "default_stream"])
def test_work_on_another_stream_is_found(folder: Path, name: str) -> None:
    verdict = judge(f"{folder / 'candidates.py'}:{name}", str(folder / "problem.py"), "gpu")
    # Which check is first to see it depends on which of the two streams wins.
    races = {"late", "unwritten", "values", "burst", "state"}
    assert races & set(verdict.checks), str(verdict)


@pytest.mark.parametrize(("name", "check"), [("row_sum_0", ""), ("row_sum_2", "values")])
def test_a_kernel_of_cuda_is_compiled_and_launched(name: str, check: str) -> None:
    verdict = judge(str(BENCH / f"{name}.toml"), f"{BENCH / 'problems.py'}:row_sum", "gpu")
    assert verdict.checks == ((check,) if check else ()), str(verdict)
