"""Chunked recurrences: linear attention and the SSD step of Mamba-2.

Each iteration takes one chunk of the sequence, computes the part inside the chunk like attention
without softmax, adds what the running state contributes, and updates the state.
Sources: Yang et al., Gated Linear Attention (arXiv 2312.06635), section 3; Dao and Gu, Transformers
are SSMs (arXiv 2405.21060), section 6 (the block decomposition of SSD).
"""

from __future__ import annotations

from typing import Any

from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph
from warploom.schedule.published.body import Body


def linear_attention(
    costs: CostTable,
    *,
    chunk: int = 64,
    key: int = 128,
    value: int = 128,
    dtype: str = "bf16",
) -> Graph:
    """O = mask(Q K^T) V + Q H; H += K^T V, for one chunk of one head."""
    return _chunk("linear_attention", costs, chunk, key, value, dtype, decay=False)


def ssd(
    costs: CostTable,
    *,
    chunk: int = 64,
    state: int = 128,
    value: int = 64,
    dtype: str = "bf16",
) -> Graph:
    """O = (L o C B^T) X + decay C H; H = decay H + (decay B)^T X, for one chunk of one head.

    L[i, j] = exp(a_i - a_j) from cumulative sums a: chunk^2 exponentials a chunk.
    """
    return _chunk("ssd", costs, chunk, state, value, dtype, decay=True)


def _chunk(
    name: str, costs: CostTable, chunk: int, key: int, value: int, dtype: str, *, decay: bool
) -> Graph:
    body = Body(name, costs, dtype)
    element = body.element
    body.load("Q", chunk * key * element, 1.0)
    body.load("K", chunk * key * element, 1.0)
    body.load("V", chunk * value * element, 1.0)
    scores = body.mma("S", "qk", (chunk, chunk, key))
    body.edge("Q", scores)
    body.edge("K", scores)
    raw = body.read(scores, chunk * chunk)
    if raw != scores:
        body.edge(raw, scores, 1, kind="order")
    masked = body.lanes("D", "mask", chunk * chunk, into=raw)
    body.edge(raw, masked)
    if decay:
        _decays(body, chunk, masked)
    narrow = body.narrow("C", "convert", chunk * chunk)
    body.edge(masked, narrow)
    operand = narrow
    if costs.tensor_memory:
        operand = body.stage("W", "p_store", chunk * chunk, element, None)
        body.edge(narrow, operand)
    _state(body, chunk, key, value, decay=decay)
    # O starts with Q H and adds the part inside the chunk: two products, one accumulator.
    outer = body.mma("O", "q_state", (chunk, value, key))
    body.edge("Q", outer)
    body.edge("B", outer, 1, blocking=True)
    body.edge(outer, "B", 0, kind="order", blocking=True)
    inner = body.mma("I", "pv", (chunk, value, chunk), accumulates=outer)
    body.edge(operand, inner, blocking=operand != narrow)
    if operand != narrow:
        body.edge(inner, operand, 1, kind="order", blocking=True)
    body.edge("V", inner)
    body.edge(outer, inner, delay=body.nodes[outer].uses[0].cycles, blocking=False)
    result = body.read(inner, chunk * value)
    if result != inner:
        body.edge(result, outer, 1, kind="order")
    out = body.narrow("N", "convert_o", chunk * value)
    body.edge(result, out)
    if decay:
        body.edge("E", out)
    staged = body.stage("Y", "o_stage", chunk * value, element, None)
    body.edge(out, staged)
    sent = body.store("Z", chunk * value * element, 1.0)
    body.edge(staged, sent, blocking=True)
    body.edge(sent, staged, 1, kind="order", blocking=True)
    flops = 2 * chunk * (chunk * key + chunk * value + 2 * key * value)
    params: dict[str, Any] = {"chunk": chunk, "key": key, "value": value, "dtype": dtype}
    return body.graph(flops, params)


def _decays(body: Body, chunk: int, masked: str) -> None:
    """exp of the differences of cumulative sums, and the decay of the whole chunk."""
    body.load("T", chunk * 4, 1.0)
    sums = body.row_reduce("A", "cumulative_sum", chunk, 32, None)
    body.edge("T", sums)
    factors = body.exponential("L", "decay", chunk * chunk)
    body.edge(sums, factors)
    body.edge(factors, masked)
    gate = body.exponential("E", "state_decay", chunk)
    body.edge(sums, gate)


def _state(body: Body, chunk: int, key: int, value: int, *, decay: bool) -> None:
    """H (+ decay) += K^T V, and its copy B in 16 bits for the next chunk's product."""
    state = key * value
    body.mma("H", "state", (key, value, chunk), accumulates="X" if decay else "H")
    body.edge("K", "H")
    body.edge("V", "H")
    if not decay:
        body.accumulate("H")
    held = body.read("H", state)
    narrow = body.narrow("G", "convert_h", state)
    body.edge(held, narrow)
    body.stage("B", "h_store", state, body.element, None)
    body.edge(narrow, "B")
    if held != "H":
        body.edge(held, "H", 1, kind="order", blocking=True)
    if decay:
        _decay_state(body, state)


def _decay_state(body: Body, state: int) -> None:
    """H times the chunk's decay before the product adds to it."""
    if body.costs.tensor_memory:
        body.rescale("X", state, "H", None)
    else:
        body.lanes("X", "decay_h", state, into="H")
    body.edge("H", "X", 1)
    body.edge("E", "X")
    body.edge("X", "H", blocking=body.costs.tensor_memory)
