"""Issue of a stretch of instructions by a few warps of one scheduler partition.

At most one instruction a cycle, in order within a warp, greedily from the same warp while `stay` is
set, else from the one that issued longest ago. An instruction issues when its warp's stall has
passed, its scoreboards are zero and its pipe is free.

Latencies and intervals: measured on an H200 where the micro-benchmarks of `bench/calibration`
reach (marked in the tables), otherwise arXiv 2503.20481 (table 2), the CUDA C++ Programming Guide
(throughput per SM), arXiv 2501.12084 and 2402.13499 (Hopper). Loads are taken as L2 hits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from warploom.sass.decode.control import NO_SCOREBOARD, SCOREBOARDS, Control
from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.opcodes import Pipe

# Cycles from issue until the result (first) or the sources (second) are released. Measured (first):
# LDG 282 (L2), LDS 23, SHFL 24, MUFU, F2I, POPC and FLO 17.
LATENCIES: Final[Mapping[str, tuple[int, int]]] = {
    "LDG": (282, 12),
    "LD": (282, 12),
    "LDL": (40, 12),
    "LDS": (23, 10),
    "LDSM": (33, 10),
    "LDGSTS": (282, 14),
    "STG": (16, 16),
    "ST": (16, 16),
    "STL": (16, 16),
    "STS": (14, 14),
    "STSM": (18, 16),
    "ATOM": (400, 14),
    "ATOMG": (400, 14),
    "ATOMS": (60, 14),
    "RED": (16, 14),
    "SHFL": (24, 10),
    "LDC": (30, 10),
    "S2R": (24, 10),
    "S2UR": (24, 10),
    "MUFU": (17, 12),
    "I2F": (20, 12),
    "F2I": (17, 12),
    "F2F": (20, 12),
    "POPC": (17, 10),
    "FLO": (17, 10),
    "DADD": (18, 8),
    "DMUL": (18, 8),
    "DFMA": (18, 8),
}
DEFAULT_LATENCY: Final = (30, 12)

# Cycles a warp instruction occupies its pipe in one of the four partitions. Measured: all but the
# uniform, constant and asynchronous pipes; memory operations for 32 bits a lane without conflicts.
OCCUPANCY: Final[Mapping[Pipe, int]] = {
    Pipe.FMA: 1,
    Pipe.IMAD: 2,
    Pipe.ALU: 2,
    Pipe.HALF: 1,
    Pipe.MMA: 16,
    Pipe.FP64: 2,
    Pipe.UNIFORM: 2,
    Pipe.XU: 8,
    Pipe.LSU: 4,
    Pipe.CONSTANT: 4,
    Pipe.ASYNC: 1,
    Pipe.CONTROL: 1,
    Pipe.UNKNOWN: 1,
}
BYTES_PER_CYCLE_TENSOR: Final = 4096  # FLOP per cycle and SM, 16-bit operands, Hopper
BARRIER_CYCLES: Final = 20  # measured with one warp a partition


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model needs of one instruction; independent of its control field."""

    pipe: Pipe
    occupancy: int
    result: int
    sources: int
    group: bool
    commits: bool
    retires: int  # warp-group matrix groups that may stay in flight; -1: does not wait
    barrier: bool
    copies: bool  # commits a group of asynchronous copies
    copies_left: int  # copy groups that may stay in flight; -1: does not wait


@dataclass
class _Warp:
    """One warp's progress."""

    ready: int = 0
    place: int = 0
    boards: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SCOREBOARDS)])
    groups: list[int] = field(default_factory=list[int])
    copies: list[int] = field(default_factory=list[int])
    stay: bool = False
    issued: int = -1


def cost_of(item: Instruction) -> Cost:
    info = item.effects.info
    result, sources = LATENCIES.get(info.name, DEFAULT_LATENCY)
    text = item.line.operands.replace(" ", "")
    group = info.pipe is Pipe.ASYNC
    occupancy = OCCUPANCY[info.pipe]
    if group:
        shape = re.search(r"\.64x(\d+)x(\d+)", item.line.opcode)
        columns, depth = (int(shape.group(1)), int(shape.group(2))) if shape else (128, 16)
        result = max(16, 2 * 64 * columns * depth // BYTES_PER_CYCLE_TENSOR)
        if depth >= 32:
            result //= 2  # 8-bit operands run at twice the rate
    width = re.search(r"\.(64|128)(?=\.|$)", item.line.opcode)
    if info.pipe is Pipe.LSU and width:
        occupancy *= int(width.group(1)) // 32 // (2 if width.group(1) == "128" else 1)
    retires = -1
    if item.line.opcode.startswith("WARPGROUP.DEPBAR"):
        retires = int(text.rsplit(",", 1)[-1], 16)
    copies_left = -1
    if item.base == "DEPBAR" and text.startswith("SB0"):
        copies_left = int(text.rsplit(",", 1)[-1], 16)
    return Cost(
        pipe=info.pipe,
        occupancy=occupancy,
        result=result,
        sources=sources,
        group=group,
        commits=group and "gsb0" in text,
        retires=retires,
        barrier=item.base == "BAR",
        copies=item.base == "LDGDEPBAR",
        copies_left=copies_left,
    )


class Simulation:
    """Issue of one block's instructions by a few warps, `rounds` times over."""

    def __init__(
        self, costs: list[Cost], controls: tuple[Control, ...], rounds: int, warps: int
    ) -> None:
        self.costs, self.controls, self.rounds = costs, controls, rounds
        self.warps = [_Warp() for _ in range(warps)]
        self.length = len(costs) * rounds
        self.pipes: dict[Pipe, int] = {}
        self.tensor = 0
        self.clock = 0
        self.marks = [0] * (rounds + 1)
        self.current = self.warps[0]
        self.at_barrier: list[_Warp] = []

    def run(self) -> float:
        """Cycles of one round in the steady state (of the only one, when there is one)."""
        while any(warp.place < self.length for warp in self.warps):
            chosen = self._choose()
            if chosen is None:
                self._open_barrier()
                continue
            warp, self.clock = chosen
            self._issue(warp)
            self.clock += 1
        if self.rounds > 1:
            return (self.marks[self.rounds] - self.marks[1]) / (self.rounds - 1)
        return float(self.marks[self.rounds])

    def _choose(self) -> tuple[_Warp, int] | None:
        """The warp that issues next and when: greedy while it stays, else the longest idle."""
        best: _Warp | None = None
        best_key = (1 << 60, 0, 0)
        for warp in self.warps:
            if warp.place >= self.length or warp in self.at_barrier:
                continue
            when = max(self._earliest(warp), self.clock)
            preferred = warp is self.current and warp.stay
            key = (when, 0 if preferred else 1, warp.issued)
            if key < best_key:
                best, best_key = warp, key
        return None if best is None else (best, best_key[0])

    def _open_barrier(self) -> None:
        for warp in self.at_barrier:
            warp.ready = max(warp.ready, self.clock + BARRIER_CYCLES)
        self.at_barrier = []

    def _issue(self, warp: _Warp) -> None:
        place = warp.place % len(self.costs)
        cost, control, now = self.costs[place], self.controls[place], self.clock
        if cost.retires >= 0:
            warp.groups = warp.groups[-cost.retires :] if cost.retires else []
        if cost.copies_left >= 0:
            warp.copies = warp.copies[-cost.copies_left :] if cost.copies_left else []
        if cost.group:
            self.tensor = max(self.tensor, now) + cost.result
            if cost.commits:
                warp.groups.append(self.tensor)
        if cost.copies:
            warp.copies.append(now + LATENCIES["LDGSTS"][0])
        elif control.write_sb != NO_SCOREBOARD:
            warp.boards[control.write_sb].append(now + cost.result)
        if control.read_sb != NO_SCOREBOARD:
            warp.boards[control.read_sb].append(now + cost.sources)
        self.pipes[cost.pipe] = now + cost.occupancy
        warp.ready = now + max(1, control.stall)
        warp.stay, warp.issued = control.stay, now
        warp.place += 1
        if warp.place % len(self.costs) == 0:
            finished = warp.place // len(self.costs)
            self.marks[finished] = max(self.marks[finished], warp.ready)
        self.current = warp
        if cost.barrier:
            self.at_barrier.append(warp)
            running = [w for w in self.warps if w.place < self.length or w in self.at_barrier]
            if len(self.at_barrier) == len(running):
                self._open_barrier()

    def _earliest(self, warp: _Warp) -> int:
        place = warp.place % len(self.costs)
        cost, control = self.costs[place], self.controls[place]
        when = max(warp.ready, self.pipes.get(cost.pipe, 0))
        for number in range(SCOREBOARDS if control.wait else 0):
            if control.wait >> number & 1 and warp.boards[number]:
                when = max(when, *warp.boards[number])
                warp.boards[number] = [t for t in warp.boards[number] if t > when]
        if cost.retires >= 0 and len(warp.groups) > cost.retires:
            when = max(when, warp.groups[len(warp.groups) - cost.retires - 1])
        if cost.copies_left >= 0 and len(warp.copies) > cost.copies_left:
            when = max(when, warp.copies[len(warp.copies) - cost.copies_left - 1])
        return when
