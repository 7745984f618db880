"""From a formula to an IO-aware derivation: fusion, nests, tiles, cost, bound, drawing, program.

    from warploom.derive import build, derive, softmax, tensor

    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    print(derive(build("attention", softmax(q @ k.T) @ v), memory=116224))

See docs/derive.md for the map of the modules.
"""

from warploom.derive.compare import compare_gpus
from warploom.derive.derive import Derivation, by_hand, derive, derive_on
from warploom.derive.formula.frontend import Expr, build, einsum, softmax, tensor
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula
from warploom.derive.lemmas.recurrence import recurrence
from warploom.derive.show.drawing import draw

__all__ = [
    "Derivation",
    "Diagram",
    "Expr",
    "build",
    "by_hand",
    "compare_gpus",
    "derive",
    "derive_on",
    "draw",
    "einsum",
    "formula",
    "recurrence",
    "softmax",
    "tensor",
]
