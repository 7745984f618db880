"""Whether a rewritten program means what the textbook does, on arrays of numbers.

Both are interpreted in float64, where casts round nothing, so that what is left is the order of
sums. Elements of which the textbook gives no number are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from warploom.errors import CheckFailed
from warploom.tile import Program, interpret
from warploom.tile.evaluate import Value
from warploom.tile.widen import widened

ROUNDING = 1e-9  # relative: what float64 leaves of sums of some thousand terms


def check_meaning(
    textbook: Program,
    rewritten: Program,
    arrays: Mapping[str, Value],
    scalars: Mapping[str, float] | None = None,
) -> float:
    """The largest difference relative to the largest number of an array; raises `CheckFailed` where
    that is more than rounding."""
    right = interpret(widened(textbook), arrays, scalars)
    found = interpret(widened(rewritten), arrays, scalars)
    worst = 0.0
    for op in textbook.ops():
        if op.array is None or not op.kind.startswith("store"):
            continue
        name = op.array.name
        number = np.isfinite(right[name])
        if not number.any():
            continue
        scale = float(np.abs(right[name][number]).max()) or 1.0
        off = float(np.abs(found[name][number] - right[name][number]).max()) / scale
        if not off <= ROUNDING:
            raise CheckFailed(
                f"{textbook.name}: the rewritten program gives {name} with a difference of "
                f"{off:.1e}, expected at most {ROUNDING:.0e}"
            )
        worst = max(worst, off)
    return worst
