"""The Pareto front of memory against transfer: what more memory buys, structure included.

Each memory size is derived on its own, so the front may change its fusion, its nest and its tiles
from point to point (attention: unfused below about 0.69 d², fused above, one pass at the end).
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.derive.derive import Derivation, derive
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError

MEMORIES = tuple(float(2**power) for power in range(8, 25))
"""Values of fast memory that are tried, unless told otherwise."""


def front(
    diagram: Diagram, memories: Sequence[float] = MEMORIES, lemmas: bool = True
) -> tuple[Derivation, ...]:
    """Derivations by memory such that none moves as little with less memory.

    Raises `InputError` when nothing fits the largest.
    """
    found: list[Derivation] = []
    refused: InputError | None = None
    for memory in sorted(memories):
        try:
            made = derive(diagram, memory=memory, lemmas=lemmas)
        except InputError as error:
            refused = error
            continue
        if not found or made.traffic < found[-1].traffic:
            found.append(made)
    if not found:
        raise refused or InputError("give at least one memory size")
    return tuple(found)


def front_table(found: Sequence[Derivation]) -> str:
    """The front as text: memory, values moved, percent of the bound there, kernels and tiles."""
    lines = [f"{'memory':>10} {'moved':>12} {'% of bound':>11}  {'bound':12} kernels"]
    for made in found:
        tiles = "; ".join(
            ",".join(f"{symbol}={size}" for symbol, size in kernel.tiles) or "whole"
            for kernel in made.kernels
        )
        lines.append(
            f"{made.capacity:10.0f} {made.traffic:12.5g} {made.percent_of_bound:11.1f}  "
            f"{made.bound.name:12} {len(made.kernels)}: {tiles}"
        )
    return "\n".join(lines)
