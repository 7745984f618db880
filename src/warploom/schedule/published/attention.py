"""Attention loop bodies: forward, causal steady state, backward.

Sources: Dao, FlashAttention-2 (arXiv 2307.08691) for the algorithm; Shah et al., FlashAttention-3
(arXiv 2407.08608) for its shape on Hopper; FlashAttention-4 for Blackwell, where each sub-tile is
128 rows, P overwrites the columns of S and the accumulator is rescaled in tensor memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph
from warploom.schedule.published.body import Body


def attention(
    costs: CostTable,
    *,
    rows: int = 0,
    keys: int = 128,
    head: int = 128,
    subtiles: int = 2,
    dtype: str = "bf16",
    emulate: float = 0.0,
    mask: bool = False,
) -> Graph:
    """One key block of softmax(Q K^T) V for `rows` query rows in `subtiles` parts.

    rows    0: 64 a sub-tile, on Blackwell 128; Q stays in shared memory outside the loop
    emulate part of the exponentials computed on the fp32 lanes
    mask    apply a causal mask to every block (its steady state on the diagonal)
    """
    rows = rows or subtiles * (128 if costs.tensor_memory else 64)
    name = "attention_causal" if mask else "attention"
    body = Body(name, costs, dtype)
    part = rows // subtiles
    for operand in ("K", "V"):
        body.load(operand, keys * head * body.element)
    for x in range(subtiles):
        _softmax_chain(body, x, part, keys, head, emulate, mask)
    params: dict[str, Any] = {"rows": rows, "keys": keys, "head": head, "subtiles": subtiles}
    params |= {"dtype": dtype, "emulate": emulate}
    return body.graph(4 * rows * keys * head, params)


def _softmax_chain(
    body: Body, x: int, rows: int, keys: int, head: int, emulate: float, mask: bool
) -> None:
    tile = rows * keys
    tensor_memory = body.costs.tensor_memory
    scores = body.mma(f"S{x}", "qk", (rows, keys, head), subtile=x)
    body.edge("K", scores)
    raw = body.read(scores, tile, x)
    if mask:
        masked = body.lanes(f"D{x}", "mask", tile, into=raw, subtile=x)
        body.edge(raw, masked)
        raw = masked
    top = body.row_reduce(f"M{x}", "row_max", rows, keys, x)
    alpha = body.exponential(f"A{x}", "alpha", rows, subtile=x)
    shifted = body.lanes(f"U{x}", "scale_shift", tile, into=raw, subtile=x)
    power = body.exponential(f"P{x}", "exp2", tile, emulated=emulate, into=shifted, subtile=x)
    total = body.row_reduce(f"R{x}", "row_sum", rows, keys, x)
    narrow = body.narrow(f"C{x}", "convert", tile, subtile=x)
    for src, dst in ((raw, top), (raw, shifted), (top, alpha), (top, shifted), (shifted, power)):
        body.edge(src, dst)
    for src, dst in ((power, total), (alpha, total), (power, narrow)):
        body.edge(src, dst)
    body.edge(top, top, 1)
    body.edge(total, total, 1)
    if tensor_memory:
        _rescale_in_tensor_memory(body, x, rows, keys, head, scores, narrow, alpha)
        return
    scaled = body.lanes(f"X{x}", "rescale", rows * head, into=f"O{x}", subtile=x)
    product = body.mma(
        f"O{x}", "pv", (rows, head, keys), from_registers=True, accumulates=scaled, subtile=x
    )
    body.edge(narrow, product)
    body.edge("V", product)
    body.edge(alpha, scaled)
    body.edge(product, scaled, 1)
    body.edge(scaled, product)


def _rescale_in_tensor_memory(
    body: Body, x: int, rows: int, keys: int, head: int, scores: str, narrow: str, alpha: str
) -> None:
    """P over the columns of S; the accumulator is rescaled in place each block."""
    stored = body.write(f"W{x}", "p_store", rows * keys, body.element, scores, x)
    body.edge(narrow, stored)
    body.edge(f"L{scores}", stored, kind="order")
    body.edge(scores, stored, kind="alias")
    scaled = body.rescale(f"X{x}", rows * head, f"O{x}", x)
    product = body.mma(f"O{x}", "pv", (rows, head, keys), accumulates=scaled, subtile=x)
    body.edge(product, scaled, 1)
    body.edge(alpha, scaled)
    body.edge(stored, product, blocking=True)
    body.edge("V", product)
    body.edge(scaled, product, blocking=True)
    # The next scores overwrite P once the tensor core, which runs in order, is past reading it.
    body.edge(product, scores, 1, kind="order", delay=body.nodes[product].uses[0].cycles)
    body.edge(f"L{scores}", scores, 1, kind="order")


def attention_backward(
    costs: CostTable,
    *,
    queries: int = 0,
    keys: int = 128,
    head: int = 128,
    subtiles: int = 2,
    dtype: str = "bf16",
) -> Graph:
    """One query block of the backward pass for a resident block of `keys` keys and values.

    Five products: S = K Q^T, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K. Sub-tiles split
    the keys (the columns of a 128-lane tile on Blackwell); dQ needs both parts of dS through
    shared memory and leaves by bulk reduction. `queries` 0: 64, on Blackwell 128.
    """
    queries = queries or (128 if costs.tensor_memory else 64)
    body = Body("attention_backward", costs, dtype)
    for operand in ("Q", "G"):
        body.load(operand, queries * head * body.element)
    if costs.tensor_memory:
        _backward_tensor_memory(body, queries, keys, head, subtiles)
    else:
        _backward_registers(body, queries, keys, head, subtiles)
    params = {"queries": queries, "keys": keys, "head": head, "subtiles": subtiles, "dtype": dtype}
    return body.graph(10 * queries * keys * head, params)


def _backward_registers(body: Body, queries: int, keys: int, head: int, subtiles: int) -> None:
    part = keys // subtiles
    tile = part * queries
    for x in range(subtiles):
        scores = body.mma(f"S{x}", "qk", (part, queries, head), subtile=x)
        body.edge("Q", scores)
        power = body.exponential(f"P{x}", "exp2", tile, into=scores, subtile=x)
        body.edge(scores, power)
        grad = body.mma(f"H{x}", "dp", (part, queries, head), subtile=x)
        body.edge("G", grad)
        narrow = body.narrow(f"C{x}", "convert_p", tile, subtile=x)
        body.edge(power, narrow)
        values = body.mma(
            f"dV{x}",
            "dv",
            (part, head, queries),
            from_registers=True,
            accumulates=f"dV{x}",
            subtile=x,
        )
        body.edge(narrow, values)
        body.edge("G", values)
        body.accumulate(values)
        delta = body.lanes(f"F{x}", "ds", tile, per_element=2, into=grad, subtile=x)
        body.edge(grad, delta)
        body.edge(power, delta)
        small = body.narrow(f"E{x}", "convert_ds", tile, subtile=x)
        body.edge(delta, small)
        staged = body.stage(f"W{x}", "ds_store", tile, body.element, x)
        body.edge(small, staged)
        weights = body.mma(
            f"dK{x}",
            "dk",
            (part, head, queries),
            from_registers=True,
            accumulates=f"dK{x}",
            subtile=x,
        )
        body.edge(small, weights)
        body.edge("Q", weights)
        body.accumulate(weights)
    for x in range(subtiles):
        query = body.mma(f"dQ{x}", "dq", (queries, head // subtiles, keys), subtile=x)
        for y in range(subtiles):
            body.edge(f"W{y}", query, blocking=True)
            body.edge(query, f"W{y}", 1, kind="order")
        out = body.stage(f"Y{x}", "dq_stage", queries * head // subtiles, 4, x)
        body.edge(query, out)
        sent = body.store(f"Z{x}", queries * head // subtiles * 4, subtile=x)
        body.edge(out, sent, blocking=True)
        body.edge(sent, out, 1, kind="order", blocking=True)


def _backward_tensor_memory(body: Body, queries: int, keys: int, head: int, subtiles: int) -> None:
    part = queries // subtiles
    tile = part * keys
    body.mma("S", "qk", (keys, queries, head))
    body.edge("Q", "S")
    body.mma("H", "dp", (keys, queries, head))
    body.edge("G", "H")
    body.mma("dV", "dv", (keys, head, queries), accumulates="dV")
    body.mma("dK", "dk", (keys, head, queries), accumulates="dK")
    body.mma("dQ", "dq", (queries, head, keys))
    body.edge("G", "dV")
    body.edge("Q", "dK")
    body.accumulate("dV")
    body.accumulate("dK")
    for x in range(subtiles):
        _backward_half(body, x, tile)
        # dQ takes the columns of dP once every half of dP has been read, and frees them in turn.
        body.edge(f"LH{x}", "dQ", kind="order")
        out = body.read("dQ", queries * head // subtiles, x)
        body.nodes[f"LQ{x}"] = _renamed(body, out, f"LQ{x}")
        staged = body.stage(f"Y{x}", "dq_stage", queries * head // subtiles, 4, x)
        body.edge(f"LQ{x}", staged)
        body.edge(f"LQ{x}", "H", 1, kind="order")
        sent = body.store(f"Z{x}", queries * head // subtiles * 4, subtile=x)
        body.edge(staged, sent, blocking=True)
        body.edge(sent, staged, 1, kind="order", blocking=True)


def _backward_half(body: Body, x: int, tile: int) -> None:
    for product in ("S", "H"):
        loaded = body.read(product, tile, x)
        body.nodes[f"L{product}{x}"] = _renamed(body, loaded, f"L{product}{x}")
    power = body.exponential(f"P{x}", "exp2", tile, into=f"LS{x}", subtile=x)
    narrow = body.narrow(f"C{x}", "convert_p", tile, subtile=x)
    stored = body.stage(f"V{x}", "p_store", tile, body.element, x)
    delta = body.lanes(f"F{x}", "ds", tile, per_element=2, into=f"LH{x}", subtile=x)
    small = body.narrow(f"E{x}", "convert_ds", tile, subtile=x)
    staged = body.stage(f"W{x}", "ds_store", tile, body.element, x)
    body.edge(f"LS{x}", power)
    body.edge(power, narrow)
    body.edge(narrow, stored)
    body.edge(stored, "dV", blocking=True)
    body.edge(f"LH{x}", delta)
    body.edge(power, delta)
    body.edge(delta, small)
    body.edge(small, staged)
    for reader in ("dK", "dQ"):
        body.edge(staged, reader, blocking=True)
        body.edge(reader, staged, 1, kind="order", blocking=True)
    body.edge("dV", stored, 1, kind="order", blocking=True)
    body.edge(f"LS{x}", "S", 1, kind="order")


def _renamed(body: Body, old: str, new: str) -> Any:
    """Move the node and edge that `read` just made to a name of this half."""
    node = body.nodes.pop(old)
    edge = body.edges.pop()
    body.edges.append(replace(edge, dst=new))
    return replace(node, id=new)
