"""Keeps ptxas from waiting for matmuls earlier than the schedule says.

A wait for matmuls (`Join`) has no register operands, so ptxas 13.x schedules it as early as it can:
far above the arithmetic that stands before it in the PTX, which was there to run beside the
matmul. `hold(x)` right before the wait reads what was computed since the last matmul or wait and,
if it were one value of 2^32, would sleep for a nanosecond: an instruction with an effect, which
neither the wait nor the arithmetic can pass. It costs a comparison.

*requires*  steps in the order of the schedule
*keeps*     every value and every wait; only machine code before and after a wait stays apart
"""

from __future__ import annotations

from itertools import product

from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import Step

Computed = tuple[Values, Step]


class Holds:
    """What was computed since the last matmul or wait, as steps are written one by one."""

    def __init__(self) -> None:
        self._computed: list[Computed] = []

    def forget(self) -> None:
        """Nothing counts as computed before here."""
        self._computed = []

    def before(self, values: Values, step: Step) -> list[str]:
        """The lines to write before the code of a step."""
        if step.action == "Run" and step.op is not None and step.op.dst is not None:
            self._computed.append((values, step))
        if step.action not in ("Issue", "Join"):
            return []
        ends = _ends(self._computed) if step.action == "Join" else []
        self.forget()
        return [f"hold({', '.join(ends)});"] if ends else []


def _ends(computed: list[Computed]) -> list[str]:
    """Elements that stand for everything computed: results that nothing else computed reads.

    A reduction depends on every element of its source; of a tile that nothing reduces, the first
    and last element must do.
    """
    found: dict[str, None] = {}
    for number, (values, step) in enumerate(computed):
        var = step.op.dst if step.op is not None else None
        if var is None or any(_reads(later, var.name) for later in computed[number + 1 :]):
            continue
        extents = values.extents(var.type)
        for corner in product(*({0, extent - 1} for extent in extents)):
            found[c_name(var.name) + "".join(f"[{at}]" for at in corner)] = None
    return list(found)


def _reads(one: Computed, name: str) -> bool:
    values, step = one
    sources = () if step.op is None else values.placement.fusion.sources(step.op)
    return any(var.name == name for var in sources)
