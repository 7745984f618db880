"""Candidates run in processes that are forked from one that has loaded torch."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def server_of_the_judge() -> None:
    """There is one such process in a process, and one that a search has started has not loaded what
    candidates need: each of them took seconds to begin. It is stopped, and the judge starts its
    own."""
    server: Any = forkserver._forkserver
    server._stop()
