"""An emitted kernel: its text, and what compiling and launching it must know."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.runtime.interface import Signature


@dataclass(frozen=True)
class CudaSource(Signature):
    """A kernel's text and what a launch must know.

    moves_registers   whether groups begin with equally many registers and then change them
    declared_threads  threads in the kernel's launch bounds, where they are fewer (`analysis.entry`)
    """

    text: str
    declared_threads: int = 0
    moves_registers: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def file(self) -> str:
        """The name of the file it is written to."""
        return f"{self.name}.cu"
