"""What a search for a streaming form finds: a lemma and its terms (`lemmas.discover`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.derive.lemmas.cascade import Scalar


@dataclass(frozen=True)
class Term:
    """One streamed part: result += h * first(state), with `basis` moved by `matrix` (rows k x k).

    `join` is the map that applies a correction: "mul" for sums and means, "add" for max and min.
    `matrix` is empty when the basis does not depend on a running value.
    """

    factor: Any
    basis: tuple[Any, ...]
    matrix: tuple[tuple[Any, ...], ...]
    join: str


@dataclass(frozen=True)
class Lemma:
    """What was found for one dependent reduction: its terms, and the search's own account."""

    name: str
    scalar: Scalar
    terms: tuple[Term, ...]
    tried: int
    registered: bool = False

    @property
    def cost(self) -> tuple[int, int]:
        """(number of accumulators, operations in corrections and factors): less is better."""
        states = sum(len(term.basis) for term in self.terms)
        work = sum(
            int(sympy().count_ops(entry))
            for term in self.terms
            for row in term.matrix
            for entry in row
        )
        return states, work
