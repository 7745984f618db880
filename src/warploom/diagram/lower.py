"""From a derived kernel to a tile program with the same meaning.

*requires* a kernel with tiles, without a split axis, whose tiles have at most two axes once batch
groups are cut to one. *after*: group loops are the grid, the stream loop is a loop, states are
tiles updated in place, corrections stand before the sums they correct. Axes that a tile does not
divide are masked with the reduction's identity, so any size works. Accumulation is fp32, operands
of matrix products are rounded to `dtype`; `check` runs the tile floor's interpreter against the
diagram's float64 meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from warploom import tile as tl
from warploom.diagram.evaluate import compare, evaluate, random_inputs
from warploom.diagram.graph import Diagram
from warploom.diagram.kernel import Kernel, Loop
from warploom.diagram.legal import group
from warploom.diagram.tracing import Lowering, clean
from warploom.errors import InputError


def lower(kernel: Kernel, dtype: str = "bf16") -> tl.Program:
    """The tile program of one kernel. Raises `InputError` naming the box that has no tile form."""
    if kernel.splits:
        raise InputError(
            f"kernel {kernel.name} splits axis {kernel.splits[0]!r} across cores; lower "
            "`unsplit(kernel)` or derive with split=False"
        )
    flat, batch = batched_to_one(kernel)
    for node in flat.body.nodes:
        if node.kind in ("view", "scan") or node.op == "topk":
            raise InputError(f"box {node.name!r} ({node.op}) has no tile form; keep it on the host")
    kind = tl.dtype(dtype)
    arrays = {
        clean(a.name): tl.array(
            kind if a.name in _roots(flat) else tl.FP32, " ".join(map(clean, a.axes))
        )
        for a in flat.body.inputs
    }
    for name in flat.body.outputs:
        axes = flat.body.axes_of(name)
        arrays[clean(name)] = tl.array(tl.FP32, " ".join(clean(a) for a in axes))

    def program(**given: tl.Array) -> None:
        Lowering(flat, given, kind, batch).run()

    return tl.trace(program, arrays, name=clean(f"{flat.body.name}_{kernel.name}"))


def _roots(kernel: Kernel) -> frozenset[str]:
    """Arrays stored in the element type: all external ones."""
    return frozenset(kernel.body.array)


def unsplit(kernel: Kernel) -> Kernel:
    """The same kernel with its split axes streamed by one core."""
    loops = tuple(loop for loop in kernel.loops if loop.kind != "split")
    tiles = tuple((s, t) for s, t in kernel.tiles if s in {each.symbol for each in loops})
    return replace(kernel, loops=loops, tiles=tiles)


def batched_to_one(kernel: Kernel) -> tuple[Kernel, frozenset[str]]:
    """(the kernel with every batch axis grouped one at a time, those axes).

    A batch axis is carried by both operands of a product, or is a further row axis of one: the
    tile language multiplies two-axis tiles.
    """
    batch: dict[str, None] = {}
    for node in kernel.body.nodes:
        if node.kind not in ("contract", "scan_contract") or len(node.inputs) < 2:
            continue
        frames = [set(kernel.body.axes_of(name)) for name in node.inputs]
        both = frames[0].intersection(*frames[1:]) - set(node.over) - {str(node.attr("time"))}
        batch |= dict.fromkeys(axis for axis in kernel.body.axes_of(node.name) if axis in both)
        for frame in frames:
            rows = [a for a in kernel.body.axes_of(node.name) if a in frame and a not in batch]
            batch |= dict.fromkeys(rows[:-1])
    axes = [axis for axis in batch if group(kernel.body, axis) is None]
    looped = {loop.axis: loop for loop in kernel.loops}
    fresh = tuple(Loop(axis, "group") for axis in axes if axis not in looped)
    kept = frozenset(a for a in axes if a not in looped or looped[a].kind == "group")
    widened = replace(kernel, loops=(*fresh, *kernel.loops))
    tiles = {
        loop.symbol: 1 if loop.axis in kept else kernel.tile[loop.symbol] for loop in widened.loops
    }
    return widened.tiled(tiles), kept


def check(
    diagram: Diagram, kernels: tuple[Kernel, ...], dtype: str = "bf16", seed: int = 0
) -> float:
    """Run all kernels' tile programs in the interpreter; the largest error relative to each output.

    Inputs are rounded to `dtype` first, so what remains is accumulation and operand rounding.
    """
    kind = tl.dtype(dtype)
    arrays = {
        name: np.asarray(tl.round_to(kind, value.astype(np.float32)), np.float64)
        for name, value in random_inputs(diagram, seed).items()
    }
    memory: dict[str, Any] = {clean(name): value for name, value in arrays.items()}
    for kernel in kernels:
        program = lower(kernel, dtype)
        for name in kernel.body.outputs:
            shape = [kernel.body.size[a] for a in kernel.body.axes_of(name)]
            memory[clean(name)] = np.zeros(shape, np.float32)
        wanted = {spec.name: memory[spec.name] for spec in program.arrays}
        memory.update(tl.interpret(program, wanted))
    got = {name: memory[clean(name)] for name in diagram.outputs}
    return compare(got, evaluate(diagram, arrays))
