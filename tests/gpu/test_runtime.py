"""The runtime on a real GPU: the sections of bench/runtime_smoke.py, each a test."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def smoke() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("runtime_smoke", BENCH / "runtime_smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Smoke()
    yield made
    made.gpu.close()


@pytest.mark.parametrize(
    "section",
    ["clock", "fills", "launches", "errors", "search_path", "timing", "checking", "outcomes"],
)
def test_section(smoke: Any, section: str) -> None:
    assert getattr(smoke, section)()
