"""Warps of several warp groups on one scheduler partition: a walk of their machine code.

An SM has four partitions, each with one warp of every warp group, one dispatch port, its pipes and
a quarter of the tensor core. The four run alike, so one stands for all. The rules, each measured on
an H200 (`bench/partition.py`, raw figures in bench/results/raw/partition-h200.json):

    dispatch    in order within a warp; while an instruction's `stay` is set its warp goes on, else
                the warp that waited longest does; special functions are served in turn
    pipes       busy for an instruction's occupancy (`timing.issue`)
    matmuls     one after the other in the order of their issue, at most `queue` of all warps
                unfinished; for a slot of the queue warps take turns. The issue itself holds the
                port for `matmul_port` cycles; the first after an ARRIVE holds its warp for `hold`
    beside      while a matmul runs, register reads meet: an instruction holds the port for
                `port[pipe]` cycles and its own warp for `warp[pipe]`, a special function its pipe
                `special` times as long, and delays the matmul by `delays[pipe]`
    A in registers   a matmul takes `registers_extra` cycles more unless another warp's is queued

Loads, barriers and named barriers are gates: the caller's `Gates` says when they open. The walk is
deterministic; where groups settle depends on when they start, so callers try several starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from warploom.errors import CheckFailed
from warploom.sass.decode.control import NO_SCOREBOARD, SCOREBOARDS, Control
from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.steady import MATRIX, SteadyLoop
from warploom.sass.timing.issue import Cost, cost_of

READERS: Final = frozenset({Pipe.FMA, Pipe.IMAD, Pipe.HALF, Pipe.ALU, Pipe.XU, Pipe.LSU})
SHAPE: Final = re.compile(r"\.64x(\d+)x(\d+)")
COLUMNS_A_CYCLE: Final = 2  # of 64 rows and 32 bytes of depth: 1024 bf16 products a cycle and SM


@dataclass(frozen=True)
class PartitionCosts:
    """Cycles of the rules above; the defaults are Hopper's."""

    queue: int = 7
    matmul_port: float = 6.0
    hold: float = 25.0
    start_shared: float = 30.0  # issue to begin, A in shared memory
    start_registers: float = 10.0
    readable: float = 10.0  # end of a matmul to the end of its wait
    registers_extra: float = 4.0
    special: float = 1.26
    jump: float = 5.0  # a taken branch beyond its stall
    poll: float = 30.0  # one look at a barrier that is open
    port: Mapping[Pipe, float] = field(
        default_factory=lambda: _by_pipe(fma=1.5, alu=3.5, special=3.0, memory=3.5)
    )
    warp: Mapping[Pipe, float] = field(
        default_factory=lambda: _by_pipe(fma=2.1, alu=4.0, special=0.0, memory=0.0)
    )
    delays: Mapping[Pipe, float] = field(
        default_factory=lambda: _by_pipe(fma=0.55, alu=0.05, special=0.25, memory=0.05)
    )


def _by_pipe(fma: float, alu: float, special: float, memory: float) -> Mapping[Pipe, float]:
    lanes = dict.fromkeys((Pipe.FMA, Pipe.IMAD, Pipe.HALF), fma)
    return {**lanes, Pipe.ALU: alu, Pipe.XU: special, Pipe.LSU: memory}


class Gates(Protocol):
    """When waits of the code are over: loads, slots, turns. Times are cycles."""

    def opens(self, group: int, number: int) -> float | None:
        """When the wait number so and so of a group's pass sequence is over; None: not known yet.

        Waits are counted from 0 over all passes, in the order of the code.
        """
        ...

    def signals(self, group: int, number: int, now: float) -> None:
        """A group gives its signal of that number (an arrival), counted likewise."""
        ...


class Open:
    """Gates that are always open."""

    def opens(self, group: int, number: int) -> float | None:
        """At once."""
        del group, number
        return 0.0

    def signals(self, group: int, number: int, now: float) -> None:
        """Nobody waits for it."""
        del group, number, now


@dataclass(frozen=True)
class Slot:
    """One instruction as a partition sees it; what does not depend on the order is worked out."""

    cost: Cost
    control: Control
    matmul: float  # tensor-core cycles; 0 for other instructions
    from_registers: bool
    reads: bool  # registers, through the operand ports
    arrives: bool  # opens a batch of matmuls
    gate: bool
    signal: bool
    jumps: bool


@dataclass
class _Matmul:
    begin: float
    end: float
    group: int


@dataclass
class _Warp:
    group: int
    slots: tuple[Slot, ...]
    ready: float
    place: int = 0
    boards: list[list[float]] = field(default_factory=lambda: [[] for _ in range(SCOREBOARDS)])
    committed: list[_Matmul] = field(default_factory=list[_Matmul])
    arrived: bool = False
    stay: bool = False
    issued: float = -1.0
    special: float = -1.0  # when it last had the special-function pipe
    matmul: float = -1.0  # when it last issued one
    gates: int = 0
    signals: int = 0
    ends: list[float] = field(default_factory=list[float])

    @property
    def slot(self) -> Slot:
        return self.slots[self.place]


def slots_of(loop: SteadyLoop) -> tuple[Slot, ...]:
    """A steady loop as slots. Gates are its barrier polls and named-barrier waits, signals its
    barrier arrivals, in the order of the code. Of a named barrier that each group takes under
    another number, one behind the other under guards, the first stands for all."""
    found: list[Slot] = []
    guarded = ""
    for item, jumps in zip(loop.instructions, loop.jumps, strict=True):
        if item.base == "BAR" and item.line.guard and item.line.opcode == guarded:
            continue
        slot = _slot(item, jumps)
        if slot.gate or slot.signal or slot.matmul:
            guarded = item.line.opcode if item.base == "BAR" and item.line.guard else ""
        found.append(slot)
    return tuple(found)


def _slot(item: Instruction, jumps: bool) -> Slot:
    cost, opcode = cost_of(item), item.line.opcode
    matmul = 0.0
    if item.base in MATRIX:
        shape = SHAPE.search(opcode)
        if shape is None:
            raise CheckFailed(f"{item}: a matrix instruction of unknown shape")
        matmul = int(shape.group(1)) / COLUMNS_A_CYCLE
    sources = item.line.operands.replace(" ", "").split(",")
    return Slot(
        cost=cost,
        control=item.control,
        matmul=matmul,
        from_registers=bool(matmul) and not sources[1].startswith("gdesc"),
        reads=cost.pipe in READERS,
        arrives=opcode.startswith("WARPGROUP.ARRIVE"),
        gate=opcode.startswith(("SYNCS.PHASECHK", "BAR.SYNC")),
        signal=opcode.startswith(("SYNCS.ARRIVE", "BAR.ARV")),
        jumps=jumps,
    )


class Partition:
    """The walk of one warp a group. `groups` are their loops, `starts` when each begins."""

    def __init__(
        self,
        groups: Sequence[tuple[Slot, ...]],
        starts: Sequence[float],
        costs: PartitionCosts | None = None,
        gates: Gates | None = None,
    ) -> None:
        self.costs, self.gates = costs or PartitionCosts(), gates or Open()
        self.warps = [
            _Warp(number, slots, start)
            for number, (slots, start) in enumerate(zip(groups, starts, strict=True))
        ]
        self.pipes: dict[Pipe, float] = {}
        self.port = 0.0
        self.clock = 0.0
        self.queue: list[_Matmul] = []
        self.current = self.warps[0]

    def run(self, passes: int) -> tuple[tuple[float, ...], ...]:
        """Ends of the passes of each group, until every group has made so many.

        Raises `CheckFailed` when every group waits at a gate that nothing opens.
        """
        while any(len(warp.ends) < passes for warp in self.warps):
            chosen: tuple[tuple[float, float, float], _Warp] | None = None
            for warp in self.warps:
                moment = self._earliest(warp)
                if moment is None:
                    continue
                key = (moment, *self._preference(warp))
                if chosen is None or key < chosen[0]:
                    chosen = (key, warp)
            if chosen is None:
                raise CheckFailed("the walk halts: every group waits at a gate")
            self._issue(chosen[1], chosen[0][0])
        return tuple(tuple(warp.ends) for warp in self.warps)

    def _preference(self, warp: _Warp) -> tuple[float, float]:
        slot = warp.slot
        if slot.matmul:
            return 0.5, warp.matmul
        if slot.cost.pipe is Pipe.XU:
            return 0.7, warp.special
        return (0.0 if warp is self.current and warp.stay else 1.0), warp.issued

    def _earliest(self, warp: _Warp) -> float | None:
        slot = warp.slot
        cost, control = slot.cost, slot.control
        moment = max(warp.ready, self.clock)
        if control.wait:
            for number in range(SCOREBOARDS):
                if control.wait >> number & 1 and warp.boards[number]:
                    moment = max(moment, *warp.boards[number])
        if slot.matmul:
            left = [one for one in self.queue if one.end > moment]
            if len(left) >= self.costs.queue:
                moment = left[len(left) - self.costs.queue].end
            return moment
        moment = max(moment, self.pipes.get(cost.pipe, 0.0))
        if slot.reads:
            moment = max(moment, self.port)
        if cost.retires >= 0 and len(warp.committed) > cost.retires:
            last = warp.committed[len(warp.committed) - cost.retires - 1]
            moment = max(moment, last.end + self.costs.readable)
        if slot.gate:
            opens = self.gates.opens(warp.group, warp.gates)
            return None if opens is None else max(moment, opens)
        return moment

    def _issue(self, warp: _Warp, now: float) -> None:
        slot = warp.slot
        cost, control, costs = slot.cost, slot.control, self.costs
        held = float(max(1, control.stall))
        if slot.matmul:
            held = max(held, self._matmul(warp, slot, now))
        else:
            held = max(held, self._other(warp, slot, now))
        if cost.retires >= 0:
            warp.committed = warp.committed[-cost.retires :] if cost.retires else []
        for number in range(SCOREBOARDS):
            warp.boards[number] = [one for one in warp.boards[number] if one > now]
        result = costs.poll if slot.gate else cost.result
        if control.write_sb != NO_SCOREBOARD:
            warp.boards[control.write_sb].append(now + result)
        if control.read_sb != NO_SCOREBOARD:
            warp.boards[control.read_sb].append(now + cost.sources)
        warp.ready = now + held + (costs.jump if slot.jumps else 0.0)
        warp.stay, warp.issued = control.stay, now
        warp.arrived = warp.arrived or slot.arrives
        if slot.gate:
            warp.gates += 1
        if slot.signal:
            self.gates.signals(warp.group, warp.signals, now)
            warp.signals += 1
        warp.place += 1
        if warp.place == len(warp.slots):
            warp.place = 0
            warp.ends.append(now)
        self.current, self.clock = warp, now + 1

    def _matmul(self, warp: _Warp, slot: Slot, now: float) -> float:
        costs = self.costs
        self.queue = [one for one in self.queue if one.end > now]
        busy = slot.matmul
        if slot.from_registers and all(one.group == warp.group for one in self.queue):
            busy += costs.registers_extra
        start = costs.start_registers if slot.from_registers else costs.start_shared
        free = self.queue[-1].end if self.queue else 0.0
        begin = max(now + start, free)
        one = _Matmul(begin, begin + busy, warp.group)
        self.queue.append(one)
        if slot.cost.commits:
            warp.committed.append(one)
        warp.matmul = now
        self.port = max(self.port, now + costs.matmul_port)
        first, warp.arrived = warp.arrived, False
        return costs.hold if first else 0.0

    def _other(self, warp: _Warp, slot: Slot, now: float) -> float:
        pipe, occupancy, held = slot.cost.pipe, float(slot.cost.occupancy), 0.0
        if slot.reads:
            late = [one for one in self.queue if one.end > now]
            if late and late[0].begin <= now:
                self.port = now + self.costs.port[pipe]
                held = self.costs.warp[pipe]
                occupancy *= self.costs.special if pipe is Pipe.XU else 1.0
                self._delay(late, now, self.costs.delays[pipe])
            if pipe is Pipe.XU:
                warp.special = now
        self.pipes[pipe] = now + occupancy
        return held

    def _delay(self, late: Sequence[_Matmul], now: float, cycles: float) -> None:
        for one in late:
            if one.begin > now:
                one.begin += cycles
            one.end += cycles
