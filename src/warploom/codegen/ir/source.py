"""An emitted kernel: its text, and what compiling and launching it must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warploom.tile import Array, Index


@dataclass(frozen=True)
class CudaSource:
    """A kernel's text and what a launch must know.

    parameters      in order: {"kind": map|dim|pointer|stride|counter|scalar, ...}
    dependent       may start before the previous grid of its stream has ended
    shared_bytes    dynamic shared memory; threads and cluster are blocks' shapes
    moves_registers   whether groups begin with equally many registers and then change them
    declared_threads  threads in the kernel's launch bounds, where they are fewer (`analysis.entry`)
    """

    name: str
    text: str
    parameters: tuple[dict[str, Any], ...]
    shared_bytes: int
    threads: int
    cluster: int
    grid: tuple[tuple[str, Index], ...]
    cluster_axis: str
    persistent: bool
    arrays: tuple[Array, ...]
    dependent: bool = False
    declared_threads: int = 0
    moves_registers: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def file(self) -> str:
        """The name of the file it is written to."""
        return f"{self.name}.cu"
