"""Compiled kernels of the tests go to a cache of the test run's own."""

from tests.codegen.conftest import cubin_cache

__all__ = ["cubin_cache"]
