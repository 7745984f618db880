"""A recurrence of one's own: a memory that turns towards what it is told.

Each row mixes the memory S of a head and its own outer product by a rotation,

    S_t = cos(θ_t) S_(t-1) + sin(θ_t) k_t v_tᵀ,    o_t = q_t S_t,

so independent rows keep its size at any angle. The gate may be nothing or negative. Nobody says how
to cut it into chunks: the floor reads the pair (decay, state) off the step and derives that.

warploom derive examples/derive_my_recurrence.py:diagram --gpu h200 --dtype bf16 --build out/turn
warploom run examples/derive_my_recurrence.py:diagram --on cpu
warploom emulate examples/derive_my_recurrence.py:diagram --seeds 2
warploom optimize examples/derive_my_recurrence.py:diagram --effort quick -o out/turning
"""

from __future__ import annotations

from warploom.derive import derive_on, recurrence
from warploom.derive.formula.frontend import apply, build, contract, tensor

q, k, v = tensor("q", "t h d"), tensor("k", "t h d"), tensor("v", "t h e")
angle = tensor("angle", "t h", "fp32")
keep, take = apply("cos", angle), apply("sin", angle)
row = take * contract(k, v, out=("t", "h", "d", "e"))
state = recurrence("t", "h d e", lambda before: keep * before + row)
diagram = build(
    "turning_memory",
    {"o": contract(q, state, out=("t", "h", "e"))},
    sizes={"t": 4096, "h": 132, "d": 64, "e": 64},
)

if __name__ == "__main__":
    print(derive_on(diagram, "h200", "bf16", streams=1))
