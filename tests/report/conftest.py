"""One report for all tests of this room: a GEMM of the library, built without a GPU."""

from pathlib import Path

import pytest

from warploom.flows.optimize import optimize
from warploom.flows.optimized import OptimizeSettings


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `optimize gemm`."""
    folder = tmp_path_factory.mktemp("report")
    sizes = {"m": "512", "n": "512", "k": "256", "batch": "1"}
    optimize(OptimizeSettings("gemm", settings=sizes, measure="none"), folder)
    return folder / "report.html"
