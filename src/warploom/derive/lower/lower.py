"""From a derived kernel to tile programs with the same meaning.

*requires* a kernel with tiles of at most two axes once batch groups are cut to one. *after*: group
loops are the grid, the stream loop is a loop, states are tiles updated in place, corrections stand
before the sums they correct. A split kernel gives two programs: the parts, and their merge. Axes
that a tile does not divide are masked with the reduction's identity, so any size works.
Accumulation is fp32, operands of matrix products are rounded to `dtype`; `check` runs the tile
floor's interpreter against the diagram's float64 meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from warploom import tile as tl
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.kernel.legal import MOST_UNROLLED, group, walked
from warploom.derive.lower.boxes import clean
from warploom.derive.lower.merging import merge
from warploom.derive.lower.tracing import Lowering, part_name, partial
from warploom.errors import InputError


def lower(kernel: Kernel, dtype: str = "bf16", out: str = "fp32") -> tl.Program:
    """The tile program of a kernel without a split axis (`programs` takes any kernel).

    `out` is the element type outputs are stored in. Raises `InputError` naming the box that has no
    tile form.
    """
    if kernel.splits:
        raise InputError(
            f"kernel {kernel.name} splits axis {kernel.splits[0]!r} across cores and is two "
            "programs: use `programs(kernel)`, or lower `unsplit(kernel)`"
        )
    return programs(kernel, dtype, out)[0]


def programs(
    kernel: Kernel, dtype: str = "bf16", out: str = "fp32", types: Mapping[str, str] | None = None
) -> tuple[tl.Program, ...]:
    """The tile programs of a kernel, to be run in order: one, or parts and merge of a split.

    Arrays are of `dtype` where the formula names no type, outputs of `out`, but for those that
    `types` names.
    """
    flat, points = batched_to_one(_stepped(kernel))
    unrolled = _unrolled(flat)
    kind, given = tl.dtype(dtype), types or {}

    def spec(name: str, usual: str) -> tl.Array:
        axes = " ".join(clean(axis) for axis in flat.body.axes_of(name))
        if not axes:
            raise InputError(f"array {name!r} has no axis, so no tile form: give it one, as a head")
        return tl.array(tl.dtype(given.get(name, usual)), axes)

    inputs = {clean(one.name): spec(one.name, one.dtype or dtype) for one in flat.body.inputs}
    outputs = {clean(name): spec(name, out) for name in flat.body.outputs}
    name = clean(f"{flat.body.name}_{kernel.name}")

    def whole(**given: tl.Array) -> None:
        Lowering(flat, given, kind, points, unrolled).run()

    if not flat.splits:
        return (tl.trace(whole, {**inputs, **outputs}, name=name),)
    (axis,) = flat.splits
    parts = {
        partial(n.name): tl.array(tl.FP32, " ".join([part_name(axis), *(clean(a) for a in n.axes)]))
        for n in flat.parts
    }

    def second(**given: tl.Array) -> None:
        merge(Lowering(flat, given, kind, points, unrolled))

    late = {clean(n): inputs[clean(n)] for n in flat.finishing if clean(n) in inputs}
    # The merge knows the length of the split axis from an array it loads nothing of.
    source = next(name for name, spec in inputs.items() if clean(axis) in spec.dims)
    return (
        tl.trace(whole, {**_without(inputs, flat.after_merge), **parts}, name=f"{name}_parts"),
        tl.trace(
            second, {**parts, **late, source: inputs[source], **outputs}, name=f"{name}_merge"
        ),
    )


def _without(inputs: dict[str, tl.Array], names: frozenset[str]) -> dict[str, tl.Array]:
    """The arrays but those that only the merge reads."""
    gone = {clean(name) for name in names}
    return {name: spec for name, spec in inputs.items() if name not in gone}


def unsplit(kernel: Kernel) -> Kernel:
    """The same kernel with its split axes streamed by one core."""
    loops = tuple(loop for loop in kernel.loops if loop.kind != "split")
    tiles = tuple((s, t) for s, t in kernel.tiles if s in {each.symbol for each in loops})
    return replace(kernel, loops=loops, tiles=tiles)


def _stepped(kernel: Kernel) -> Kernel:
    """Scans along time one step at a time; split axes streamed in slices that divide a part."""
    loops, tiles = list(kernel.loops), dict(kernel.tiles)
    for node in kernel.body.nodes:
        if node.kind == "scan" and kernel.scan_axis(node) not in kernel.splits:
            step = Loop(kernel.scan_axis(node), "stream")
            if step not in loops:
                loops.append(step)
            tiles[step.symbol] = 1
    for axis in kernel.splits:
        step, width = Loop(axis, "stream"), tiles[f"w_{axis}"]
        if step not in loops:
            # A part taken whole is a stream of one slice, outside of the other streams.
            loops.insert(kernel.outer, step)
            tiles[step.symbol] = width
        if width % tiles[step.symbol]:
            nearest = width // tiles[step.symbol] * tiles[step.symbol]
            raise InputError(
                f"kernel {kernel.name}: parts of {axis!r} are {width} long, not a multiple of its "
                f"slices of {tiles[step.symbol]}; nearest is {max(nearest, tiles[step.symbol])}"
            )
    return replace(kernel, loops=tuple(loops)).tiled(tiles)


def _unrolled(kernel: Kernel) -> frozenset[str]:
    """Axes walked while tracing: the k of a top-k, and all but one driving axis of a window."""
    found: set[str] = set()
    for node in kernel.body.nodes:
        if node.op == "topk":
            found.add(str(node.attr("axis")))
        if node.kind == "view":
            for _, terms in node.attr("map"):
                found |= walked(kernel, terms)
    for axis in found:
        if axis in kernel.depth_of_axis or kernel.body.size[axis] > MOST_UNROLLED:
            raise InputError(
                f"kernel {kernel.name}: axis {axis!r} of {kernel.body.size[axis]} would be walked "
                f"while tracing: keep it out of the loops and at most {MOST_UNROLLED} long"
            )
    return frozenset(found)


def batched_to_one(kernel: Kernel) -> tuple[Kernel, frozenset[str]]:
    """(the kernel with every batch axis grouped one at a time, those axes and stepped ones).

    A batch axis is carried by both operands of a product, or is a further row axis of one: the
    tile language multiplies two-axis tiles.
    """
    stepped = {kernel.scan_axis(n) for n in kernel.body.nodes if n.kind == "scan"}
    batch: dict[str, None] = {}
    for node in kernel.body.nodes:
        if node.kind not in ("contract", "scan_contract") or len(node.factors) < 2:
            continue
        frames = [set(kernel.body.axes_of(name)) for name in node.factors]
        both = frames[0].intersection(*frames[1:]) - set(node.over) - {str(node.attr("time"))}
        batch |= dict.fromkeys(axis for axis in kernel.body.axes_of(node.name) if axis in both)
        for frame in frames:
            rows = [a for a in kernel.body.axes_of(node.name) if a in frame and a not in batch]
            long = [a for a in rows if kernel.body.size[a] > 1] or rows
            batch |= dict.fromkeys(a for a in rows if a not in long[-1:])
    axes = [axis for axis in batch if group(kernel.body, axis) is None and axis not in stepped]
    looped = {loop.axis: loop for loop in kernel.loops}
    fresh = tuple(Loop(axis, "group") for axis in axes if axis not in looped)
    kept = frozenset(a for a in axes if a not in looped or looped[a].kind == "group")
    widened = replace(kernel, loops=(*fresh, *kernel.loops))
    tiles = {
        loop.symbol: 1 if loop.axis in kept else kernel.tile[loop.symbol] for loop in widened.loops
    }
    return widened.tiled(tiles), kept | stepped


def check(
    diagram: Diagram,
    kernels: tuple[Kernel, ...],
    dtype: str = "bf16",
    seed: int = 0,
    traced: Callable[[Kernel], Kernel] = lambda kernel: kernel,
) -> float:
    """Run all kernels' tile programs in the interpreter; the largest error relative to each output.

    `traced` may change the tiles a program is traced with (rows padded to a fragment), never the
    sizes it runs at. Inputs are rounded to their types first, so what remains is accumulation and
    operand rounding.
    """
    arrays = {
        name: rounded(value, diagram.array[name].dtype or dtype)
        for name, value in random_inputs(diagram, seed).items()
    }
    memory: dict[str, Any] = {clean(name): value for name, value in arrays.items()}
    for kernel in kernels:
        sizes = {clean(axis): size for axis, size in kernel.body.sizes}
        for loop in kernel.loops:
            if loop.kind == "split":
                width = kernel.tile[loop.symbol]
                sizes[part_name(loop.axis)] = -(-kernel.body.size[loop.axis] // width)
        for program in programs(traced(kernel), dtype):
            for spec in program.arrays:
                if spec.name not in memory or spec.name in map(clean, kernel.body.outputs):
                    memory[spec.name] = np.zeros([sizes[d] for d in spec.dims], np.float32)
            wanted = {spec.name: memory[spec.name] for spec in program.arrays}
            memory.update(tl.interpret(program, wanted))
    got = {name: memory[clean(name)] for name in diagram.outputs}
    return compare(got, evaluate(diagram, arrays))


def rounded(value: Any, dtype: str) -> Any:
    """Numbers as an array of an element type has them, in float64."""
    return np.asarray(tl.round_to(tl.dtype(dtype), value.astype(np.float32)), np.float64)
