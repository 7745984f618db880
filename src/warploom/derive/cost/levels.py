"""What a kernel costs in every level of one GPU's memory, per pipe, and how much of it an SM holds.

Lines of text for a reader; the numbers are those of `timing`, `counts` and `hardware`. The line
on clusters is Theorem 3 with real tiles: blocks that forward to each other draw as one larger tile.
"""

from __future__ import annotations

from collections.abc import Iterator

from warploom.derive.cost.cost import numbers
from warploom.derive.cost.counts import exact_traffic
from warploom.derive.cost.gpu import Gpu, element_bytes
from warploom.derive.cost.hardware import Recipe, ceiling, clock_table, configure, interval
from warploom.derive.cost.timing import ACCUMULATOR, FRAGMENTS, WARP_GROUP_ROWS, Estimate, row_axis
from warploom.derive.cost.work import pipe_of, shared_reads
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError

PAIR = 2
"""Blocks of the cluster that is looked at."""
ROWS_A_WARP = 16


def level_lines(kernel: Kernel, machine: Gpu, dtype: str, cost: Estimate) -> Iterator[str]:
    """Bytes, time and energy by level, then what a pair of blocks would save."""
    size = element_bytes(dtype)
    read = numbers(kernel, shared_reads(kernel, FRAGMENTS[machine.family][0])) * size
    moved = {
        "dram": cost.parts["dram"] * machine.dram_rate,
        "l2": exact_traffic(kernel) * size,
        "shared": read,
    }
    joules = {"dram": "dram", "l2": "l2", "shared": "smem"}
    for level, amount in moved.items():
        if amount:
            yield (
                f"{level:9} {amount / 1e6:.4g} MB in {1e6 * cost.parts[level]:.1f} us, "
                f"{1e3 * amount * machine.joules[joules[level]]:.3g} mJ"
            )
    if machine.family != "Ampere" and (best := _pair(kernel)):
        axis, saved = best
        yield (
            f"cluster   blocks in pairs along {axis} that forward to each other draw "
            f"{100 * saved:.0f} % less from L2"
        )


def _pair(kernel: Kernel) -> tuple[str, float] | None:
    """(the group axis along which a pair of blocks saves most, the share of traffic saved)."""
    whole = exact_traffic(kernel)
    best: tuple[str, float] | None = None
    for loop in kernel.loops:
        wide = PAIR * kernel.tile.get(loop.symbol, 0)
        if loop.kind != "group" or not wide or wide > kernel.body.size[loop.axis]:
            continue
        saved = 1 - exact_traffic(kernel.tiled({**kernel.tile, loop.symbol: wide})) / whole
        if best is None or saved > best[1]:
            best = (loop.axis, saved)
    return best if best is not None and best[1] > 0 else None


def recipe_of(kernel: Kernel, machine: Gpu, dtype: str) -> Recipe | None:
    """How `--gpu` lays a kernel on an SM: 64 rows a warp group (16 a warp on Ampere), operands in
    `dtype`, sums in fp32. None where no matrix product names the rows."""
    products = [n for n in kernel.body.nodes if pipe_of(kernel, n) == "tensor"]
    products = [n for n in products if n.kind == "contract"]
    rows = {row_axis(kernel.body, node) for node in products} - {""}
    if len(rows) != 1 or not kernel.stream_index:
        return None
    given = [array.name for array in kernel.body.inputs]
    made = [name for node in products for name in node.inputs if name in kernel.body.node]
    tile = ROWS_A_WARP if machine.family == "Ampere" else WARP_GROUP_ROWS
    types = tuple((name, dtype) for name in dict.fromkeys((*given, *made)))
    return Recipe(rows.pop(), tile, types, "fp32", (), 2, staging=False)


def sm_lines(kernel: Kernel, machine: Gpu, dtype: str) -> Iterator[str]:
    """Clocks by pipe for one row and slice, the interval they overlap in, and warps on an SM."""
    recipe = recipe_of(kernel, machine, dtype)
    if recipe is None:
        return
    uses = clock_table(kernel, recipe, machine)
    clocks = interval(uses)
    longest = max(clocks, key=lambda pipe: clocks[pipe])
    parts = ", ".join(f"{pipe} {clock:.2f}" for pipe, clock in clocks.items())
    yield (
        f"overlap   {parts} clocks a row and slice: {longest} is the interval, the others hide in "
        f"it; ceiling {ceiling(uses, machine) / 1e12:.0f} TFLOP/s"
    )
    try:
        held = configure(kernel, recipe, machine)
    except InputError:
        return
    warps = 1 if machine.family == "Ampere" else 4
    each = held.registers_per_group / (32 * warps) / ACCUMULATOR
    shared = "" if held.by_shared == float("inf") else f"shared memory holds {held.by_shared:.1f}, "
    yield (
        f"SM        {held.groups * warps} warps of {recipe.row_tile // warps} rows, in groups of "
        f"{warps}: {shared}registers hold {held.by_registers:.1f} groups ({each:.0f} a thread in "
        "tiles)"
    )
