"""Group choices that every schedule as good as the best so far shares: found, proved and fixed.

*requires*  a model whose stages so far are constraints, and a schedule that meets them
*before -> after*  who runs what is free -> what all remaining schedules agree on is fixed
*keeps*  every schedule of the model: a choice is fixed only when its opposite is refuted

Once traffic is minimal most operations have one home left. The solver does not see that by itself,
and the stages on times are an order of magnitude slower while it keeps moving operations around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.solver import Effort, Linear, Style, run

PROBES = 4  # where more choices are equally good, little would be fixed
WORK = Style(work=0.3)


def fix_backbone(
    it: Encoding, values: Mapping[int, int], effort: Callable[[float], Effort]
) -> bool:
    """Fix the common choices; False when that could not be decided in the time given.

    `values` is any schedule of the model by variable index, `effort(part)` a part of what time is
    left.
    """
    common: list[Linear] = [literal for literal in it.member.values() if values[literal.index]]
    for _ in range(PROBES):
        if not common:
            return True
        other = it.model.clone()
        other.clear_objective()
        other.add_bool_or([literal.negated() for literal in common])
        answer = run(other, effort(0.1), it.member.values(), values, WORK)
        if answer.status == "INFEASIBLE":
            for literal in common:
                it.model.add(literal == 1)
            return True
        if not answer.found:
            return False
        common: list[Linear] = [literal for literal in common if answer.values[literal.index]]
    return False
