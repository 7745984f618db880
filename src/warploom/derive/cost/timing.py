"""Time of a kernel on a GPU: the slowest of its pipes and memory levels, with wave quantisation.

Work that overlaps perfectly costs the maximum over pipes (the serial sum is
pessimistic). It is a model for choosing sizes, calibrated by nothing; measurements live in bench/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from warploom.derive.cost.cost import FULL, Accounting, columns, numbers, traffic, transfers
from warploom.derive.cost.counts import exact_transfers
from warploom.derive.cost.gpu import Gpu, element_bytes
from warploom.derive.cost.integers import Score, choose
from warploom.derive.cost.posynomial import Posynomial, total
from warploom.derive.cost.work import operations, shared_reads
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError

LAUNCH = 2.0e-6
"""Seconds a dependent kernel launch costs on the stream: a model, not a measurement."""
FRAGMENTS: dict[str, tuple[int, int, int]] = {
    "Ampere": (64, 8, 32),
    "Hopper": (64, 8, 32),
    "Blackwell": (128, 16, 32),
}
"""Tensor-core fragment by architecture: rows, columns, bytes of the contracted axis.

PTX ISA: mma.m16n8k16, of which a warp usually stacks four; wgmma.m64nNk16 (N a multiple of 8),
tcgen05.mma m128nNk16 (N a multiple of 16); k is 32 bytes of every element type.
"""
LINE = 128
"""Bytes of a memory line, and of a row of the widest shared-memory swizzle: what is contiguous in
an array is loaded and stored in whole ones, which coalesces."""
COLUMN_CHUNK = 16
"""Columns of a tile: a fragment's, and two of them so that stores are 32-byte sectors."""
REGISTER_SHARE = 0.8
"""Of the register file for tiles: the rest is addresses, the producer and values in flight. The
largest tiles in use agree: 128 x 176 attention takes 196 of 240 registers a thread."""
WARP_GROUP = 128
WARP_GROUP_ROWS = 64
"""Rows of a tile that one warp group (128 threads) computes on Hopper."""
MOST_REGISTERS, PRODUCER_REGISTERS, WORKING_REGISTERS, MASK_REGISTERS = 240, 24, 36, 40
"""Registers a thread: the most `setmaxnreg` gives in multiples of 8, what the loading group keeps,
what a computing thread needs besides its tiles (so that two groups get `REGISTER_SHARE`), and what
a mask's coordinates and the second copy of a masked tile take."""
EXPOSED = 0.02
"""Share of every pipe's time that overlap does not hide: a model. It breaks ties towards tiles
that move less."""
ACCUMULATOR = 4
"""Bytes of a computed value: accumulation is fp32."""


@dataclass(frozen=True)
class Estimate:
    """Seconds by resource; `seconds` is their maximum times wave quantisation, plus what is apart:
    launches and the merging of split sums (`apart`)."""

    parts: Mapping[str, float]
    waves: float
    seconds: float
    joules: float
    apart: float

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def time_score(gpu: Gpu, dtype: str) -> Score:
    """Seconds as a score for the integer search (vectorised over tiles)."""
    size = element_bytes(dtype)

    def score(kernel: Kernel, values: Mapping[str, Any]) -> Any:
        groups: Any = 1.0
        for loop in kernel.loops:
            if loop.kind != "stream":
                groups = groups * np.ceil(kernel.body.size[loop.axis] / values[loop.symbol])
        pipes = _pipe_seconds(kernel, gpu, dtype, lambda part: part.grid(values))
        parts = [traffic(kernel).grid(values) * size / gpu.l2_rate, *pipes.values()]
        slowest: Any = 0.0
        for part in parts:
            slowest = np.maximum(slowest, part)
        slowest = np.where(_held_by_groups(kernel, gpu, values), slowest, np.inf)
        rounded = np.ceil(groups / gpu.sms) * gpu.sms / groups
        merged = _merge_seconds(kernel, gpu, values)
        return np.maximum(slowest * rounded, dram_seconds(kernel, gpu, dtype)) * 1.0 + (
            LAUNCH + merged + EXPOSED * sum(parts)
        )

    return score


def _pipe_seconds(
    kernel: Kernel, gpu: Gpu, dtype: str, count: Callable[[Posynomial], Any]
) -> dict[str, Any]:
    """Seconds of each pipe inside the SMs; `count` evaluates an amount at the kernel's tiles."""
    work, clocks = operations(kernel), gpu.sms * gpu.clock
    shared = count(shared_reads(kernel, FRAGMENTS[gpu.family][0])) * element_bytes(dtype)
    return {
        "tensor": count(work["tensor"]) / gpu.flops(dtype),
        "shared": shared / gpu.shared_rate,
        "special": count(work["special"]) / (gpu.special * clocks),
        "fp": count(work["fp"]) / (gpu.lanes(dtype) * clocks),
    }


def _merge_seconds(kernel: Kernel, gpu: Gpu, values: Mapping[str, Any]) -> Any:
    """What a split costs besides: its parts (fp32) written and read by a second launch."""
    if not kernel.splits:
        return 0.0
    crossing = [part for name, part in transfers(kernel).items() if name.endswith("(partial)")]
    volume = total(crossing).grid(values) * ACCUMULATOR
    return LAUNCH + volume / np.where(volume > gpu.l2_bytes, gpu.dram_rate, gpu.l2_rate)


def energy_score(gpu: Gpu, dtype: str) -> Score:
    """Joules to move data (the law of equation 2 with J per value) as a score."""
    size = element_bytes(dtype)

    def score(kernel: Kernel, values: Mapping[str, Any]) -> Any:
        outside = dram_seconds(kernel, gpu, dtype) * gpu.dram_rate * gpu.joules["dram"]
        outside = np.where(_held_by_groups(kernel, gpu, values), outside, np.inf)
        return outside + traffic(kernel).grid(values) * size * gpu.joules["l2"]

    return score


def _held_by_groups(kernel: Kernel, gpu: Gpu, values: Mapping[str, Any]) -> Any:
    """Whether the computed tiles fit the registers of the warp groups that share their rows.

    A row tile of 64 is one group of 128 threads and cannot use the whole register file; one of 256
    is four groups, and leaves each thread few. True where no matrix product sets the rows. A chunk
    of a recurrence has whole fragments of rows.
    """
    whole: Any = True
    for node in kernel.body.nodes:
        if node.kind == "scan_contract":
            time = str(node.attr("time"))
            rows = values.get(f"s_{time}", kernel.body.size[time])
            whole = whole & ((rows <= WARP_GROUP_ROWS) | (rows % WARP_GROUP_ROWS == 0))
    products = [n for n in kernel.body.nodes if n.kind == "contract" and len(n.inputs) == 2]
    rows = {row_axis(kernel.body, n) for n in products} - {""}
    if gpu.family == "Ampere" or len(rows) != 1:
        return whole
    (axis,) = rows
    index = kernel.depth_of_axis.get(axis)
    symbol = axis if index is None else kernel.loops[index].symbol
    # Fewer rows than a fragment has are padded to it.
    tile = np.maximum(values.get(symbol, kernel.body.size[axis]), WARP_GROUP_ROWS)
    values = {**values, symbol: tile}
    groups = np.ceil(tile / WARP_GROUP_ROWS)
    threads = WARP_GROUP * groups
    registers = gpu.register_bytes / ACCUMULATOR - WARP_GROUP * PRODUCER_REGISTERS
    taken = set(kernel.splits) - set(kernel.stream_index)  # parts in one slice, masked at the end
    working = WORKING_REGISTERS + MASK_REGISTERS * (bool(kernel.bound_by) + 2 * bool(taken))
    each = np.minimum(MOST_REGISTERS, np.floor(registers / threads / 8) * 8) - working
    inside = columns(kernel, Accounting(FULL.intermediates, FULL.statistics, 2, (1.0, 1.0)))
    held: Any = 0.0
    for name, column in inside.items():
        if name != "shared memory":
            held = np.maximum(held, column.grid(values))
    return whole & (held <= each * threads)


def energy_floor(gpu: Gpu, dtype: str) -> Any:
    """A lower bound of `energy_score`: the border once into and out of the SMs."""

    def floor(body: Diagram, crossing: int) -> float:
        del body
        return crossing * element_bytes(dtype) * (gpu.joules["dram"] + gpu.joules["l2"])

    return floor


@cache
def dram_seconds(kernel: Kernel, gpu: Gpu, dtype: str) -> float:
    """Time on the DRAM interface: Theorem 2, all SMs' memory together act as one cache level.

    Never below compulsory traffic, and equal to it when everything fits L2.
    """
    size = element_bytes(dtype)
    least = sum(kernel.body.elements(a.name) for a in kernel.body.inputs)
    least += sum(kernel.body.elements(o) for o in kernel.body.outputs)
    if least * size <= gpu.l2_bytes:
        return least * size / gpu.dram_rate
    try:
        moved = choose(kernel, gpu.values(dtype) * gpu.sms).score
    except InputError:
        moved = float(least)
    return max(moved, 1.0) * size / gpu.dram_rate


def floor_seconds(gpu: Gpu, dtype: str) -> Any:
    """A lower bound of `time_score` for the structure search: the border once over DRAM."""

    def floor(body: Diagram, crossing: int) -> float:
        del body
        return crossing * element_bytes(dtype) / gpu.dram_rate

    return floor


def capacity(gpu: Gpu, dtype: str) -> float:
    """On-chip values one group may hold: shared memory of a block plus its share of registers,
    both counted in stored values."""
    return (gpu.block_bytes + REGISTER_SHARE * gpu.register_bytes) / element_bytes(dtype)


def accounting(gpu: Gpu, dtype: str) -> Accounting:
    """Loaded tiles fit shared memory, streamed ones twice (double buffered); computed tiles fit
    the registers in fp32. Weights make both limits `capacity`."""
    whole = capacity(gpu, dtype)
    shared = whole * element_bytes(dtype) / gpu.block_bytes
    inside = whole * ACCUMULATOR / (REGISTER_SHARE * gpu.register_bytes)
    return Accounting(FULL.intermediates, FULL.statistics, 2, (shared, inside))


def multiples(diagram: Diagram, gpu: Gpu, dtype: str) -> dict[str, int]:
    """Tile divisors by the part an axis plays in matrix products (rows, columns or summed) and in
    memory (whole lines where it is contiguous).

    Axes that both operands carry (heads) are no sides of a fragment, nor are axes shorter than
    what they would be rounded to.
    """
    rows, columns, depth = FRAGMENTS[gpu.family]
    summed = max(COLUMN_CHUNK, int(depth / element_bytes(dtype)))
    wanted: dict[str, int] = {}
    short: set[str] = set()
    for node in diagram.nodes:
        if node.kind not in ("contract", "scan_contract") or len(node.factors) < 2:
            continue
        sides, first = _sides(diagram, node)
        # Of several row axes one makes the rows of a fragment; the others are cut to one.
        parts = {a: max(columns, COLUMN_CHUNK) for a in sides if a not in first}
        parts |= dict.fromkeys(node.over, summed)
        if row := row_axis(diagram, node):
            parts[row] = rows
        if node.kind == "scan_contract":
            # The rows of a chunk are rows of its scores and columns, those of the state lie along
            # the last axis of v.
            parts = {a: max(columns, COLUMN_CHUNK) for a in sides} | dict.fromkeys(
                node.over, summed
            )
            parts[str(node.attr("time"))] = rows
            width = state_rows(diagram, node)
            parts[width] = min(rows, diagram.size[width])
            short |= {width} if parts[width] < rows else set()
        for axis, multiple in parts.items():
            wanted[axis] = math.lcm(wanted.get(axis, 1), multiple)
    line = int(LINE / element_bytes(dtype))
    for name in (*diagram.array, *diagram.outputs):
        axes = diagram.axes_of(name)
        if len(axes) > 1 and axes[-1] in wanted and axes[-1] not in short:
            wanted[axes[-1]] = math.lcm(wanted[axes[-1]], line)
    return {a: m for a, m in wanted.items() if diagram.size[a] >= m}


def row_axis(diagram: Diagram, product: Node) -> str:
    """The axis that makes the rows of a product's fragments: of the result's axes on the side of
    its first one, the innermost that is longer than one; "" when there is none."""
    sides, first = _sides(diagram, product)
    return next((a for a in reversed(sides) if a in first and diagram.size[a] > 1), "")


def state_rows(diagram: Diagram, node: Node) -> str:
    """The axis along which the rows of a chunked contraction's state lie."""
    time, value = str(node.attr("time")), diagram.axes_of(node.factors[2])
    return [axis for axis in value if axis != time][-1]


def _sides(diagram: Diagram, product: Node) -> tuple[list[str], list[str]]:
    """(result axes without batch axes, those that come from the operand with the first of them)."""
    frames = [set(diagram.axes_of(name)) for name in product.factors]
    batch = frames[0].intersection(*frames[1:]) - set(product.over)
    sides = [a for a in product.axes if a not in batch]
    home = next((f for f in frames if sides and sides[0] in f), set[str]())
    return sides, [a for a in sides if a in home]


def estimate(kernel: Kernel, gpu: Gpu, dtype: str) -> Estimate:
    """The time and energy of a kernel with its tiles."""
    size = element_bytes(dtype)
    filled = sum(exact_transfers(kernel).values()) * size
    parts = {
        "dram": dram_seconds(_untiled(kernel), gpu, dtype),
        "l2": filled / gpu.l2_rate,
        **_pipe_seconds(kernel, gpu, dtype, partial(numbers, kernel)),
    }
    groups = math.prod(
        -(-kernel.body.size[each.axis] // kernel.tile[each.symbol])
        for each in kernel.loops
        if each.kind != "stream"
    )
    waves = math.ceil(groups / gpu.sms) * gpu.sms / groups
    inside = max(seconds for name, seconds in parts.items() if name != "dram") * waves
    sizes = {**kernel.body.size, **kernel.tile}
    merged = float(_merge_seconds(kernel, gpu, {k: float(v) for k, v in sizes.items()}))
    energy = parts["dram"] * gpu.dram_rate * gpu.joules["dram"] + filled * gpu.joules["l2"]
    apart = LAUNCH + merged
    return Estimate(parts, waves, max(parts["dram"], inside) + apart, energy, apart)


def _untiled(kernel: Kernel) -> Kernel:
    """The kernel without tiles, so that equal nests share one cached answer."""
    return replace(kernel, tiles=())
