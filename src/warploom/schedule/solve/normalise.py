"""The paper's cost normalisation, kept to measure what it loses; our solver does not need it.

Given cycles C find small integers C' minimising F with |C[i] C'[j] - C[j] C'[i]| <= F for all
pairs and 1 <= sum C' <= U. Source: Soi et al. (arXiv 2512.18134), cost normalisation, U = 300;
handbook section 6.2 for what happens when it is read literally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from warploom.errors import InputError
from warploom.schedule.solve.solver import Effort, new_model, run


@dataclass(frozen=True)
class Normalised:
    """Small costs in the order given, their worst cross-product error and if that is proved."""

    costs: tuple[int, ...]
    error: int
    proved: bool

    @property
    def collapsed(self) -> int:
        """How many costs became 0: operations the small problem believes are free."""
        return sum(cost == 0 for cost in self.costs)


def normalise(cycles: Sequence[int], most: int = 300, effort: Effort | None = None) -> Normalised:
    """Least-error small costs; equal cycles get equal costs.

    Raises `InputError` for cycles that are not positive.
    """
    if not cycles or min(cycles) <= 0:
        raise InputError(f"normalise: cycles {list(cycles)[:5]}, expected numbers above 0")
    model = new_model()
    values = sorted(set(cycles))
    small = {value: model.new_int_var(0, most, f"c{value}") for value in values}
    total = sum(small[value] for value in cycles)
    model.add(total >= 1)
    model.add(total <= most)
    error = model.new_int_var(0, max(values) * most, "F")
    for first, second in combinations(values, 2):
        difference = first * small[second] - second * small[first]
        model.add(difference <= error)
        model.add(difference >= -error)
    model.minimize(error)
    answer = run(model, effort or Effort(20), small.values())
    if not answer.found:
        raise InputError(f"normalise: no small costs with sum <= {most} for {len(cycles)} cycles")
    result = tuple(answer.values[small[value].index] for value in cycles)
    return Normalised(result, answer.value, answer.status == "OPTIMAL")
