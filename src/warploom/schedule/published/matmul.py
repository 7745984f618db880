"""Matrix product loop bodies: the main loop, and output tiles with an epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph
from warploom.schedule.published.body import Body


def gemm(
    costs: CostTable,
    *,
    rows: int = 0,
    columns: int = 0,
    depth: int = 64,
    subtiles: int = 2,
    dtype: str = "bf16",
    dram: float = 0.1,
) -> Graph:
    """One step of C += A B: a rows x columns tile, `depth` of the sum, sub-tiles of the rows.

    rows, columns   0: 128 x 256 on Hopper, 256 x 128 on Blackwell, 128 x 128 on Ampere
    dram            part of the operand bytes that misses L2
    """
    rows = rows or (256 if costs.tensor_memory else 128)
    columns = columns or (256 if costs.family == "hopper" else 128)
    body = Body("gemm", costs, dtype)
    body.load("A", rows * depth * body.element, dram)
    body.load("B", columns * depth * body.element, dram)
    for x in range(subtiles):
        name = body.mma(
            f"C{x}", "mma", (rows // subtiles, columns, depth), accumulates=f"C{x}", subtile=x
        )
        body.edge("A", name)
        body.edge("B", name)
        body.accumulate(name)
    params: dict[str, Any] = {"rows": rows, "columns": columns, "depth": depth}
    params |= {"subtiles": subtiles, "dtype": dtype, "dram": dram}
    return body.graph(2 * rows * columns * depth, params)


def gemm_epilogue(
    costs: CostTable,
    *,
    rows: int = 0,
    columns: int = 0,
    depth: int = 64,
    steps: int = 16,
    slots: int = 2,
    subtiles: int = 2,
    dtype: str = "bf16",
    dram: float = 0.1,
) -> Graph:
    """A persistent kernel's iteration: one output tile, its whole sum, activation and store.

    The `steps` main-loop steps of a sub-tile are one product; overlap is between the epilogue of
    one tile and the main loop of another (CUTLASS calls it ping-pong). An operand buffer holds
    `slots` steps and its transfer occupies the engine for all steps.
    """
    rows = rows or (256 if costs.tensor_memory else 128)
    columns = columns or (128 if costs.family != "ampere" else 64)
    body = Body("gemm_epilogue", costs, dtype)
    part = rows // subtiles
    for x in range(subtiles):
        load = body.load(f"T{x}", (part + columns) * depth * body.element, dram, x)
        _repeat(body, load, steps, slots)
        main = body.mma(f"C{x}", "main_loop", (part, columns, depth * steps), subtile=x)
        body.edge(load, main)
        value = body.read(main, part * columns, x)
        if value != main:
            body.edge(value, main, 1, kind="order")
        active = body.lanes(
            f"E{x}", "epilogue", part * columns, per_element=2, into=value, subtile=x
        )
        body.edge(value, active)
        narrow = body.narrow(f"N{x}", "convert", part * columns, subtile=x)
        body.edge(active, narrow)
        staged = body.stage(f"W{x}", "stage", part * columns, body.element, x)
        body.edge(narrow, staged)
        sent = body.store(f"Z{x}", part * columns * body.element, 1.0, x)
        body.edge(staged, sent, blocking=True)
        body.edge(sent, staged, 1, kind="order", blocking=True)
    params: dict[str, Any] = {"rows": rows, "columns": columns, "depth": depth, "steps": steps}
    params |= {"subtiles": subtiles, "dtype": dtype, "dram": dram}
    return body.graph(2 * rows * columns * depth * steps, params)


def _repeat(body: Body, name: str, steps: int, slots: int) -> None:
    """One node for `steps` equal loads: the units serve them all, the first one's latency shows."""
    node = body.nodes[name]
    uses = tuple(replace(use, cycles=use.cycles * steps) for use in node.uses)
    memory = {memory: slots * size for memory, size in node.memory.items()}
    body.nodes[name] = replace(node, uses=uses, memory=memory)
