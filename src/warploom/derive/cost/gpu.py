"""A GPU as this floor sees it: rates and capacities read from the machine floor, in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from warploom.errors import InputError
from warploom.machine import load

BYTES: dict[str, float] = {
    "fp4": 0.5,
    "fp8": 1,
    "fp16": 2,
    "bf16": 2,
    "tf32": 4,
    "fp32": 4,
    "fp64": 8,
}
"""Bytes of one value."""


@dataclass(frozen=True, eq=False)
class Gpu:
    """Capacities in bytes, rates in units a second for the whole device unless said otherwise."""

    name: str
    reference: str
    """What `gpu` was asked for: a name, or the path of a file."""
    family: str
    """Architecture (Ampere, Hopper, Blackwell): decides the tensor-core fragment."""
    sms: int
    clock: float
    """SM clock at which tensor peaks are stated, Hz."""
    block_bytes: float
    """Shared memory one block may ask for."""
    store_bytes: float
    """Combined L1 and shared store of one SM (the paper's M for 'least b')."""
    register_bytes: float
    dram_rate: float
    l2_rate: float
    l2_bytes: float
    shared_rate: float
    tensor: Mapping[str, float]
    """FLOP per clock and SM by element type."""
    special: float
    """Special-function results per clock and SM."""
    joules: Mapping[str, float]
    """Joules a byte by where it comes from: "dram", "l2", "smem" (published models)."""
    fp: Mapping[str, float]
    """Operations per clock and SM on the ordinary lanes, a fused multiply-add counted as two."""

    def flops(self, dtype: str) -> float:
        """Tensor-core peak in FLOP/s; raises `InputError` for a type the GPU has no unit for."""
        if dtype not in self.tensor:
            raise InputError(
                f"{self.name} has no {dtype} tensor core: it has {', '.join(self.tensor)}"
            )
        return self.tensor[dtype] * self.sms * self.clock

    def lanes(self, dtype: str) -> float:
        """FP operations per clock and SM; types without lanes of their own compute in fp16."""
        return self.fp.get(dtype, self.fp.get("fp16", self.fp["fp32"]))

    def values(self, dtype: str, level: str = "block") -> float:
        """How many values of a type fit a level ("block", "store", "registers", "l2")."""
        size = {
            "block": self.block_bytes,
            "store": self.store_bytes,
            "registers": self.register_bytes,
            "l2": self.l2_bytes,
        }[level]
        return size / element_bytes(dtype)


def element_bytes(dtype: str) -> float:
    """Bytes of one value; raises `InputError` for an unknown type."""
    if dtype not in BYTES:
        raise InputError(f"no element type {dtype!r}: known are {', '.join(BYTES)}")
    return BYTES[dtype]


@cache
def gpu(name: str) -> Gpu:
    """A GPU of the machine floor by its name or the path of its .toml file; raises `InputError`
    with the nearest names, or with what the file lacks."""
    machine = load(name)
    clock = (machine.get("clock.tensor") or machine.value("clock.boost")) * 1e6
    tensor = {t: machine.value(f"tensor.{t}") for t in BYTES if f"tensor.{t}" in machine}
    lanes = {t: 2 * machine.value(f"lanes.{t}") for t in BYTES if f"lanes.{t}" in machine}
    sms = machine.integer("sm.count")
    dram = machine.value("dram.bandwidth")
    l2 = machine.get("l2.bandwidth")
    if l2 is None:
        clocks = machine.get("l2.bytes_per_clk")
        l2 = clocks * clock if clocks is not None else 3.5 * dram
    return Gpu(
        machine.name,
        name,
        machine.text("arch.family"),
        sms,
        clock,
        machine.value("smem.per_block_max"),
        machine.get("l1.size") or machine.value("smem.per_sm"),
        4 * machine.value("registers.per_sm"),
        dram,
        l2,
        machine.value("l2.size"),
        machine.value("smem.bytes_per_clk") * clock * sms,
        tensor,
        machine.value("mufu.rate"),
        {level: 1e-12 * machine.value(f"energy.{level}") for level in ("dram", "l2", "smem")},
        lanes,
    )
