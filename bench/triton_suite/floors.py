"""The bounds no instruction order can beat: bytes over bandwidth, operations over unit rates."""

from __future__ import annotations

from bench.triton_suite.common import Shape, SuiteKernel
from warploom.machine import Machine


def floors_us(
    kernel: SuiteKernel, machine: Machine, shape: Shape | None = None
) -> dict[str, float]:
    """Microseconds that each unit needs at least, at the clock the tensor peaks are stated for.

    `dram` uses the measured copy bandwidth where the machine has one; data that stays in the L2
    cache between launches can go below it.
    """
    sizes = shape or kernel.shape
    bandwidth = machine.get("dram.copy_bandwidth") or machine.value("dram.bandwidth")
    floors = {"dram": kernel.bytes_moved(sizes) / bandwidth * 1e6}
    cycles = machine.value("sm.count") * machine.value("clock.tensor")  # per microsecond
    if kernel.unit == "tensor":
        floors["tensor"] = kernel.flops(sizes) / (machine.value(f"tensor.{kernel.dtype}") * cycles)
    if count := kernel.exponentials(sizes):
        floors["mufu"] = count / (machine.value("mufu.rate") * cycles)
    return floors


def describe_floors(floors: dict[str, float], measured_us: float) -> str:
    """Such as `dram 31.4 us (84 % of the measured time)`, the largest first."""
    ranked = sorted(floors.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{unit} {micros:.1f} us ({100 * micros / measured_us:.0f} %)" for unit, micros in ranked
    )
