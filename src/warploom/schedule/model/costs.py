"""What an operation costs on a machine: rates from `machine/`, the rest from data/costs.toml.

A cost may be an interval. Every constraint only gets tighter when a cost grows, so a schedule
solved at the high ends is legal for every value inside (`at("high")`), and the interval solved at
the low ends bounds from below what better knowledge could gain (`at("low")`).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, cast

from warploom.errors import InputError
from warploom.machine import Machine, load
from warploom.schedule.model.target import WARP_GROUP, GroupSpec, Target, Unit

ENDS = ("low", "nominal", "high")
KIB = 1024
ISSUE_LANES = 32  # lanes a warp instruction serves


@dataclass(frozen=True)
class Cost:
    """One scheduling cost: its value, the interval it is believed in, unit and source."""

    value: float
    low: float
    high: float
    unit: str
    kind: str
    source: str

    def at(self, end: str) -> float:
        """The low end, the nominal value or the high end."""
        return self.value if end == "nominal" else self.low if end == "low" else self.high


@cache
def _tables() -> Mapping[str, Mapping[str, Cost]]:
    text = resources.files("warploom.schedule").joinpath("data/costs.toml").read_text()
    families = tomllib.loads(text).items()
    return {
        family: {name: _cost(name, entry) for name, entry in entries.items()}
        for family, entries in families
    }


def _cost(name: str, entry: Mapping[str, Any]) -> Cost:
    value = float(entry["value"])
    low, high = float(entry.get("low", value)), float(entry.get("high", value))
    if not 0 <= low <= value <= high:
        raise InputError(f"cost {name}: expected 0 <= low <= value <= high, got {entry}")
    return Cost(value, low, high, str(entry["unit"]), str(entry["kind"]), str(entry["source"]))


@dataclass(frozen=True)
class CostTable:
    """Costs of one machine at one end of their intervals."""

    machine: Machine
    family: str
    costs: Mapping[str, Cost]
    end: str = "nominal"

    def at(self, end: str) -> CostTable:
        """The same table read at the low, nominal or high end of every interval."""
        if end not in ENDS:
            raise InputError(f"costs at {end!r}, expected one of {', '.join(ENDS)}")
        return replace(self, end=end)

    def override(self, source: str, **values: float | tuple[float, float, float]) -> CostTable:
        """The table with other values: `override("run 7", load_latency=(480, 520, 700))`.

        Underscores stand for the dot of a key's name where it has one. A triple is low, value,
        high; a number is exact.
        """
        costs = dict(self.costs)
        for keyword, given in values.items():
            name = keyword if keyword in costs else keyword.replace("_", ".", 1)
            if name not in costs:
                raise InputError(
                    f"unknown cost {keyword!r}, expected one of {', '.join(sorted(costs))}"
                )
            low, value, high = given if isinstance(given, tuple) else (given, given, given)
            entry = {"value": value, "low": low, "high": high, "unit": costs[name].unit}
            costs[name] = _cost(name, {**entry, "kind": "measured", "source": source})
        return replace(self, costs=costs)

    def value(self, name: str) -> float:
        """A cost at this table's end; raises `InputError` naming what the family has."""
        if name not in self.costs:
            raise InputError(
                f"machine {self.machine.name} ({self.family}) has no cost {name!r}, "
                f"expected one of {', '.join(sorted(self.costs))}"
            )
        return self.costs[name].at(self.end)

    def cycles(self, name: str, count: float = 1.0) -> int:
        """A cost times a count, rounded up to whole cycles."""
        return math.ceil(self.value(name) * count - 1e-9)

    def rate(self, key: str) -> float:
        """A number of the machine."""
        return self.machine.value(key)

    def tensor(self, flops: float, dtype: str = "bf16") -> int:
        """Tensor-core cycles of that many multiply-add operations (2 each)."""
        return math.ceil(flops / self.rate(f"tensor.{dtype}"))

    def lanes(self, elements: float) -> int:
        """FP32-lane cycles of one instruction on that many elements."""
        return math.ceil(elements / self.rate("lanes.fp32"))

    def comparisons(self, elements: float) -> int:
        """Cycles of one maximum on that many fp32 elements."""
        return self.cycles("max.per_1024", elements / 1024)

    def exponentials(self, elements: float) -> int:
        """Special-function cycles of that many exp2."""
        return math.ceil(elements / self.rate("mufu.rate"))

    def issue_slots(self, elements: float) -> int:
        """Cycles the four schedulers need to issue one instruction on that many elements."""
        return math.ceil(elements / ISSUE_LANES / self.rate("issue.rate"))

    def shared(self, size: float) -> int:
        """Shared-memory port cycles for that many bytes."""
        return math.ceil(size / self.rate("smem.bytes_per_clk"))

    @property
    def tensor_memory(self) -> bool:
        """Whether accumulators live in tensor memory (tcgen05)."""
        return self.family == "blackwell"


def costs(gpu: str | Machine, end: str = "nominal") -> CostTable:
    """The cost table of a machine by name."""
    machine = load(gpu) if isinstance(gpu, str) else gpu
    family = machine.text("arch.family").lower()
    if family not in _tables():
        raise InputError(
            f"machine {machine.name} is of family {family!r}, scheduling costs are known for "
            f"{sorted(_tables())}"
        )
    return CostTable(machine, family, _tables()[family], end)


def target(table: CostTable, compute_groups: int = 0, registers: int = 0) -> Target:
    """One block on one SM of the table's machine.

    `compute_groups` 4-warp groups are on offer (0: 3 on Hopper and Ampere, 4 on Blackwell, where
    one-warp groups can issue tcgen05 too); `registers` lowers the limit of a thread.
    """
    machine = table.machine
    units = [Unit("TC"), Unit("SFU"), Unit("ALU"), Unit("TMA")]
    units += [Unit("STORE"), Unit("SMEM", rate=True), Unit("ISSUE", rate=True)]
    units += [Unit("DRAM", rate=True)]
    memories = {"smem": int(machine.value("smem.per_block_max"))}
    own = table.family != "ampere"
    groups = [GroupSpec("load", 1, loads=True)] if own else []
    if table.tensor_memory:
        units.append(Unit("TMEM"))
        memories["tmem"] = int(machine.value("tmem.columns"))
        groups.append(GroupSpec("issue", 1))
    wide = compute_groups or (4 if table.tensor_memory else 3)
    groups += [GroupSpec(f"compute{index}", WARP_GROUP) for index in range(wide)]
    limit = int(machine.value("registers.per_thread_max"))
    if registers and not 24 <= registers <= limit:
        raise InputError(f"{registers} registers a thread, expected 24 to {limit}")
    return Target(
        machine.name,
        tuple(units),
        memories,
        tuple(groups),
        registers_per_thread=registers or limit,
        reserved_registers=table.cycles("registers.reserved"),
        register_pool=int(machine.value("registers.per_sm")) if own else 0,
        own_load_group=own,
    )


def read_overrides(text: str) -> dict[str, float | tuple[float, float, float]]:
    """Parse `load.latency=520,mma.issue=10:16:30` (low:value:high) of a command line."""
    found: dict[str, float | tuple[float, float, float]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        try:
            numbers = [float(number) for number in value.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 3):
            raise InputError(f"cost {item!r}, expected name=value or name=low:value:high")
        triple = cast("tuple[float, float, float]", tuple(numbers))
        found[name] = numbers[0] if len(numbers) == 1 else triple
    return found
