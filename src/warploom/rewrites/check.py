"""Whether a rewritten program, or several in turn, mean what the textbook does.

Both are interpreted in float64, where casts round nothing, so that what is left is the order of
sums. Elements of which the textbook gives no number are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from warploom.errors import CheckFailed
from warploom.tile import Program, interpret
from warploom.tile.evaluate import Value
from warploom.tile.widen import widened

ROUNDING = 1e-9  # relative: what float64 leaves of sums of some thousand terms


def check_meaning(
    textbook: Program,
    rewritten: Program | Sequence[Program],
    arrays: Mapping[str, Value],
    scalars: Mapping[str, float] | None = None,
) -> float:
    """The largest difference relative to the largest number of an array; raises `CheckFailed` where
    that is more than rounding. What one of several programs stores the next ones read."""
    right = _run(textbook, arrays, scalars)
    found = dict(arrays)
    for program in [rewritten] if isinstance(rewritten, Program) else rewritten:
        found |= _run(program, found, scalars)
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


def _run(
    program: Program, arrays: Mapping[str, Value], scalars: Mapping[str, float] | None
) -> Mapping[str, Value]:
    """Its arrays after it ran, in float64."""
    own = {one.name: arrays[one.name] for one in program.arrays}
    return interpret(widened(program), own, scalars)
