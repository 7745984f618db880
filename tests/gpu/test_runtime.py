"""The runtime on a real GPU: the sections of bench/runtime_smoke.py, each a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench import runtime_smoke

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def smoke() -> Iterator[Any]:
    made = runtime_smoke.Smoke()
    yield made
    made.gpu.close()


@pytest.mark.parametrize(
    "section",
    ["clock", "fills", "launches", "errors", "search_path", "timing", "checking", "outcomes"],
)
def test_section(smoke: Any, section: str) -> None:
    assert getattr(smoke, section)()
