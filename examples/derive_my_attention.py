"""A formula of one's own: attention with a soft cap on the scores and a gate on the output.

warploom derive examples/derive_my_attention.py:diagram --gpu h200 --svg my_attention.svg
"""

from __future__ import annotations

from warploom.derive.derive import derive_on
from warploom.derive.formula.frontend import apply, build, softmax, tensor

q, k, v, gate = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e"), tensor("G", "q e")
capped = apply("tanh", (q @ k.T) * 0.02) * 50.0
diagram = build(
    "gated_attention",
    (softmax(capped) @ v) * apply("sigmoid", gate),
    sizes={"q": 4096, "x": 4096, "d": 128, "e": 128},
)

if __name__ == "__main__":
    print(derive_on(diagram, "h200"))
