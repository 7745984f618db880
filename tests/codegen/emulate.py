"""Emitted kernels run on the emulated machine, as the tests of this folder ask for it."""

from warploom.emulate.kernel import Library
from warploom.emulate.report import Fault

__all__ = ["Fault", "compile_all", "run"]


def compile_all(sources, _folder):
    """Kernels compiled together."""
    return Library(sources)


def run(library, number, source, program, arrays, scalars=None, blocks=2, seed=1):
    """Every array as the kernel leaves it; raises `Fault`."""
    return library.run(number, program, arrays, scalars, blocks, seed)
