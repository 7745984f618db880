"""`warploom doctor` works anywhere, exits 0, and says what to install."""

from __future__ import annotations

import importlib
import json

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.errors import ToolMissing

RUNNER = CliRunner()
module = importlib.import_module("warploom.cli.doctor")


def test_everything_looked_for_has_a_line() -> None:
    done = RUNNER.invoke(app, ["doctor"])
    assert done.exit_code == 0
    for name in ("python", "nvdisasm", "ptxas", "nvcc", "nvrtc", "cuda-bindings", "torch"):
        assert f"  {name}" in done.output


def test_json_has_the_groups() -> None:
    done = RUNNER.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    report = json.loads(done.output)
    assert {"here", "gpu", "tool", "package", "install"} <= set(report)
    assert all(entry["found"] for entry in report["here"])


def test_what_is_missing_comes_with_one_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ToolMissing(f"{name} is not here")

    monkeypatch.setattr(module, "find", missing)
    done = RUNNER.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    installs = json.loads(done.output)["install"]
    assert "pip install 'warploom[compile]'" in installs
    assert len(set(installs)) == len(installs)


def test_no_bindings_is_said_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise ToolMissing("cuda-bindings is not here")

    monkeypatch.setattr(module, "device_count", missing)
    done = RUNNER.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "none visible" in done.output
    assert "cuda-bindings is not here" in done.output
