"""`warploom bench` starts modules that exist, from the folder in which Python finds them."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.cli.bench import BENCHMARKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_a_module_of_the_source_tree(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], Path]] = []

    def start(command: list[str], cwd: Path, check: bool) -> Any:
        started.append((command, cwd))
        if "--out" in command:
            out = Path(command[command.index("--out") + 1])
            (out if out.suffix else out / BENCHMARKS[name].evidence).write_text("[]")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("warploom.runtime.driver.device_count", lambda: 1)
    monkeypatch.setattr("warploom.cli.bench.subprocess.run", start)
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["bench", name], catch_exceptions=False)
    assert len(started) == 1 + BENCHMARKS[name].builds
    for (_, dash, module, *_), cwd in started:
        found = importlib.util.find_spec(module)
        assert dash == "-m" and found is not None and found.origin is not None
        assert Path(found.origin).is_relative_to(cwd / "bench") and cwd == ROOT
