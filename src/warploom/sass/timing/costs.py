"""Cycles of instructions and of one scheduler partition, from `costs.toml`, which says whence."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from warploom.sass.decode.opcodes import Pipe


@dataclass(frozen=True)
class Beside:
    """What an instruction beside a matmul costs: cycles of port and warp, delay of the matmul."""

    port: float
    warp: float
    delay: float


@dataclass(frozen=True)
class PartitionCosts:
    """Cycles; `latency` by opcode from issue to (result, sources read), `occupancy` of a pipe."""

    latency: Mapping[str, tuple[int, int]]
    occupancy: Mapping[Pipe, int]
    beside: Mapping[Pipe, Beside]
    queue: int
    columns: int
    matmul_port: float
    hold: float
    start_shared: float
    start_registers: float
    readable: float
    registers_extra: float
    special: float
    jump: float
    poll: float
    barrier: float

    def latency_of(self, opcode: str) -> tuple[int, int]:
        """(cycles to the result, cycles until the sources were read) of an opcode by its name."""
        return self.latency.get(opcode) or self.latency["other"]


@cache
def hopper() -> PartitionCosts:
    """The costs that ship, measured on an H200 where the file says so."""
    text = files("warploom.sass.timing").joinpath("costs.toml").read_text()
    data: dict[str, Any] = tomllib.loads(text)
    rules = data["partition"]
    beside = {Pipe(pipe): Beside(*cycles) for pipe, cycles in rules.pop("beside").items()}
    return PartitionCosts(
        latency={name: (result, sources) for name, (result, sources) in data["latency"].items()},
        occupancy={Pipe(pipe): cycles for pipe, cycles in data["occupancy"].items()},
        beside=beside,
        **rules,
    )
