"""Compiled kernels of the tests go to a cache of the test run's own."""

import pytest


@pytest.fixture(autouse=True)
def cubin_cache(tmp_path_factory, monkeypatch):
    """Keep the user's cache out of the tests."""
    root = tmp_path_factory.getbasetemp().parent / "warploom-cubins"
    monkeypatch.setenv("WARPLOOM_CACHE", str(root))
