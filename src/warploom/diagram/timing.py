"""Time of a kernel on a GPU: the slowest of its pipes and memory levels, with wave quantisation.

Work that overlaps perfectly costs the maximum over pipes (handbook 4.2: the serial sum is
pessimistic). It is a model for choosing sizes, calibrated by nothing; measurements live in bench/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from warploom.diagram.cost import FULL, Accounting, numbers, traffic
from warploom.diagram.counts import exact_transfers
from warploom.diagram.gpu import Gpu, element_bytes
from warploom.diagram.graph import Diagram
from warploom.diagram.hierarchy import ENERGY
from warploom.diagram.integers import Score, choose
from warploom.diagram.kernel import Kernel
from warploom.diagram.work import operations
from warploom.errors import InputError

LAUNCH = 2.0e-6
"""Seconds a dependent kernel launch costs on the stream: a model, not a measurement."""
ROW_CHUNK = 16
"""Tensor-core fragments are 16 x 16 values (docs/tile.md): the least useful tile side."""


@dataclass(frozen=True)
class Estimate:
    """Seconds by resource; `seconds` is their maximum times wave quantisation, plus the launch."""

    parts: Mapping[str, float]
    waves: float
    seconds: float
    joules: float

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def time_score(gpu: Gpu, dtype: str) -> Score:
    """Seconds as a score for the integer search (vectorised over tiles)."""
    size = element_bytes(dtype)

    def score(kernel: Kernel, values: Mapping[str, Any]) -> Any:
        work = operations(kernel)
        groups: Any = 1.0
        for loop in kernel.loops:
            if loop.kind != "stream":
                groups = groups * np.ceil(kernel.body.size[loop.axis] / values[loop.symbol])
        parts = [
            traffic(kernel).grid(values) * size / gpu.l2_rate,
            work["tensor"].grid(values) / gpu.flops(dtype),
            work["special"].grid(values) / (gpu.special * gpu.sms * gpu.clock),
            work["fp"].grid(values) / (gpu.lanes(dtype) * gpu.sms * gpu.clock),
        ]
        slowest: Any = 0.0
        for part in parts:
            slowest = np.maximum(slowest, part)
        rounded = np.ceil(groups / gpu.sms) * gpu.sms / groups
        # Ties (one resource binds for many tiles) go to the tile that moves least.
        return np.maximum(slowest * rounded, dram_seconds(kernel, gpu, dtype)) * 1.0 + (
            LAUNCH + 1e-3 * sum(parts)
        )

    return score


def energy_score(gpu: Gpu, dtype: str) -> Score:
    """Joules to move data (the law of equation 2 with J per value) as a score."""
    size = element_bytes(dtype)
    joules = {name: value for name, value, _ in ENERGY}

    def score(kernel: Kernel, values: Mapping[str, Any]) -> Any:
        outside = dram_seconds(kernel, gpu, dtype) * gpu.dram_rate * joules["dram"]
        return outside + traffic(kernel).grid(values) * size * joules["l2"]

    return score


def energy_floor(gpu: Gpu, dtype: str) -> Any:
    """A lower bound of `energy_score`: the border once into and out of the SMs."""
    joules = {name: value for name, value, _ in ENERGY}
    del gpu

    def floor(body: Diagram, crossing: int) -> float:
        del body
        return crossing * element_bytes(dtype) * (joules["dram"] + joules["l2"])

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
    """On-chip values one group may hold: shared memory of a block plus the register file.

    Registers hold accumulators and score tiles, shared memory the streamed slices; a quarter of the
    registers is left for addresses, fragments in flight and the producer.
    """
    return (gpu.block_bytes + 0.75 * gpu.register_bytes) / element_bytes(dtype)


def accounting() -> Accounting:
    """Streamed slices are double buffered on a GPU."""
    return Accounting(FULL.intermediates, FULL.statistics, buffers=2)


def multiples(kernel_axes: Mapping[str, int], dtype: str) -> dict[str, int]:
    """Tile divisors: the tensor-core fragment side, twice that for one-byte types."""
    side = ROW_CHUNK * (2 if element_bytes(dtype) <= 1 else 1)
    return {axis: side for axis, size in kernel_axes.items() if size >= side}


def estimate(kernel: Kernel, gpu: Gpu, dtype: str) -> Estimate:
    """The time and energy of a kernel with its tiles."""
    size = element_bytes(dtype)
    work = {pipe: numbers(kernel, part) for pipe, part in operations(kernel).items()}
    filled = sum(exact_transfers(kernel).values()) * size
    parts = {
        "dram": dram_seconds(_untiled(kernel), gpu, dtype),
        "l2": filled / gpu.l2_rate,
        "tensor": work["tensor"] / gpu.flops(dtype),
        "special": work["special"] / (gpu.special * gpu.sms * gpu.clock),
        "fp": work["fp"] / (gpu.lanes(dtype) * gpu.sms * gpu.clock),
    }
    groups = math.prod(
        -(-kernel.body.size[each.axis] // kernel.tile[each.symbol])
        for each in kernel.loops
        if each.kind != "stream"
    )
    waves = math.ceil(groups / gpu.sms) * gpu.sms / groups
    inside = max(parts["l2"], parts["tensor"], parts["special"], parts["fp"]) * waves
    joules = {name: value for name, value, _ in ENERGY}
    energy = parts["dram"] * gpu.dram_rate * joules["dram"] + filled * joules["l2"]
    return Estimate(parts, waves, max(parts["dram"], inside) + LAUNCH, energy)


def _untiled(kernel: Kernel) -> Kernel:
    """The kernel without tiles, so that equal nests share one cached answer."""
    return replace(kernel, tiles=())
