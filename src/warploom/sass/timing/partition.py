"""Warps of several warp groups on one scheduler partition: a walk of their machine code.

An SM has four partitions, each with one warp of every warp group, one dispatch port, its pipes and
a quarter of the tensor core. The four run alike, so one stands for all. The rules, each measured on
an H200 (`bench/partition.py`, raw figures in bench/results/raw/partition-h200.json; the cycles are
in `costs.toml`):

    dispatch    in order within a warp; while an instruction's `stay` is set its warp goes on, else
                the warp that waited longest does; special functions are served in turn
    pipes       busy for an instruction's occupancy
    matmuls     one after the other in the order of their issue, at most `queue` of all warps
                unfinished; for a slot of the queue warps take turns. The issue itself holds the
                port for `matmul_port` cycles; the first after an ARRIVE holds its warp for `hold`
    beside      while a matmul runs, register reads meet: an instruction holds the port and its own
                warp longer, a special function its pipe `special` times as long, and delays the
                matmul
    A in registers   a matmul takes `registers_extra` cycles more unless another warp's is queued

Loads, barriers and named barriers of a loop are gates: the caller's `Gates` says when they open.
The walk is deterministic; where groups settle depends on when they start, so callers try several
starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple, Protocol

from warploom.errors import CheckFailed
from warploom.sass.decode.control import NO_SCOREBOARD, SCOREBOARDS, Control
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.timing.costs import PartitionCosts, hopper
from warploom.sass.timing.slots import Line, Slot


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


GATE, SIGNAL, MATMUL = "gate", "signal", "matmul"


class Mark(NamedTuple):
    """A group goes through a gate, gives a signal, or has issued a matmul: the number of that kind,
    over all passes, and when."""

    group: int
    kind: str
    number: int
    cycle: float


class Issued(NamedTuple):
    """An instruction of a group: its place in the code, and when it issued."""

    group: int
    place: int
    cycle: float


@dataclass(slots=True)
class Matmul:
    """A matrix instruction on the tensor core; `number` is that of its commit, as in `Mark`."""

    begin: float
    end: float
    group: int
    number: int = 0


@dataclass(slots=True)
class _Warp:
    group: int
    code: Sequence[Line]
    ready: float
    place: int = 0
    boards: list[float] = field(default_factory=lambda: [0.0] * SCOREBOARDS)  # when they are zero
    committed: list[Matmul] = field(default_factory=list[Matmul])
    copies: list[float] = field(default_factory=list[float])
    arrived: bool = False
    stay: bool = False
    issued: float = -1.0
    special: float = -1.0  # when it last had the special-function pipe
    matmul: float = -1.0  # when it last issued one
    gates: int = 0
    signals: int = 0
    matmuls: int = 0
    ends: list[float] = field(default_factory=list[float])


# What the future of a partition with one warp depends on, in cycles from its clock: ready,
# boards, committed (place in the queue, or -1, and end), copies, arrived; pipes, port, queue.
State = tuple[
    float,
    tuple[float, ...],
    tuple[tuple[int, float], ...],
    tuple[float, ...],
    bool,
    tuple[tuple[Pipe, float], ...],
    float,
    tuple[tuple[float, float], ...],
]
IDLE: State = (0.0, (0.0,) * SCOREBOARDS, (), (), False, (), 0.0, ())
NEVER = (inf, inf)  # the preference of no warp
SETTLED = 1e-6  # cycles: passes that differ by less took as long
DIGITS = 6  # of a state's cycles: states that differ by a sum's rounding are one


class Partition:
    """The walk of one warp a group. `groups` are their loops, `starts` when each begins."""

    def __init__(
        self,
        groups: Sequence[Sequence[Line]],
        starts: Sequence[float],
        costs: PartitionCosts | None = None,
        gates: Gates | None = None,
    ) -> None:
        self.costs, self.gates = costs or hopper(), gates or Open()
        self.warps = [
            _Warp(number, code, start)
            for number, (code, start) in enumerate(zip(groups, starts, strict=True))
        ]
        self.pipes: dict[Pipe, float] = {}
        self.port = 0.0
        self.clock = 0.0
        self.queue: list[Matmul] = []
        self.current = self.warps[0]
        self.marks: list[Mark] = []
        self.issued: list[Issued] = []
        self.matmuls: list[Matmul] = []

    def run(self, passes: int, settled: int = 0) -> tuple[tuple[float, ...], ...]:
        """Ends of the passes of each group, until every group has made so many; or fewer, where the
        last `settled` ones of every group all took the same cycles.

        Raises `CheckFailed` when every group waits at a gate that nothing opens.
        """
        while True:
            warp = self._next()
            if warp.place:
                continue
            if all(len(one.ends) >= passes for one in self.warps):
                break
            if settled and self._is_settled(settled):
                break
        return tuple(tuple(warp.ends) for warp in self.warps)

    def _next(self) -> _Warp:
        """The warp whose instruction comes next, which has issued."""
        first, chosen, rank = inf, None, NEVER
        for warp in self.warps:
            moment = self._earliest(warp)
            if moment is None or moment > first:
                continue
            own = self._preference(warp)
            if moment < first or own < rank:
                first, chosen, rank = moment, warp, own
        if chosen is None:
            raise CheckFailed("the walk halts: every group waits at a gate")
        self.issue(chosen, first)
        return chosen

    def _is_settled(self, count: int) -> bool:
        """Whether the last passes of all groups, so many, took as long."""
        ends = [warp.ends[-count - 1 :] for warp in self.warps]
        if any(len(own) <= count for own in ends):
            return False
        took = [after - before for own in ends for before, after in pairwise(own)]
        return max(took) - min(took) <= SETTLED

    def _preference(self, warp: _Warp) -> tuple[float, float]:
        slot = warp.code[warp.place][0]
        if slot.matmul:
            return 0.5, warp.matmul
        if slot.pipe is Pipe.XU:
            return 0.7, warp.special
        return (0.0 if warp is self.current and warp.stay else 1.0), warp.issued

    def _earliest(self, warp: _Warp) -> float | None:
        slot, control = warp.code[warp.place]
        moment = max(warp.ready, self.clock)
        wait = control.wait
        if wait:
            for number, zero in enumerate(warp.boards):
                if zero > moment and wait >> number & 1:
                    moment = zero
        if slot.matmul:
            left = [one for one in self.queue if one.end > moment]
            if len(left) >= self.costs.queue:
                moment = left[len(left) - self.costs.queue].end
            return moment
        free = self.pipes.get(slot.pipe, 0.0)
        moment = max(moment, free)
        if slot.reads and self.port > moment:
            moment = self.port
        if slot.retires >= 0 and len(warp.committed) > slot.retires:
            last = warp.committed[len(warp.committed) - slot.retires - 1]
            moment = max(moment, last.end + self.costs.readable)
        if slot.copies_left >= 0 and len(warp.copies) > slot.copies_left:
            moment = max(moment, warp.copies[len(warp.copies) - slot.copies_left - 1])
        if slot.gate:
            opens = self.gates.opens(warp.group, warp.gates)
            return None if opens is None else max(moment, opens)
        return moment

    def issue(self, warp: _Warp, now: float) -> None:
        """The warp's next instruction issues at `now`."""
        slot, control = warp.code[warp.place]
        self.issued.append(Issued(warp.group, warp.place, now))
        held = float(max(1, control.stall))
        if slot.matmul:
            held = max(held, self._matmul(warp, slot, now))
        elif slot.reads and self.queue:
            held = max(held, self._beside(warp, slot, now))
        else:
            self.pipes[slot.pipe] = now + slot.occupancy
            if slot.pipe is Pipe.XU:
                warp.special = now
        if slot.retires >= 0:
            warp.committed = warp.committed[-slot.retires :] if slot.retires else []
        if slot.copies_left >= 0:
            warp.copies = warp.copies[-slot.copies_left :] if slot.copies_left else []
        self._outstanding(warp, slot, control, now)
        warp.ready = now + max(held, slot.pause) + (self.costs.jump if slot.jumps else 0.0)
        warp.stay, warp.issued = control.stay, now
        if slot.arrives:
            warp.arrived = True
        if slot.gate:
            self.marks.append(Mark(warp.group, GATE, warp.gates, now))
            warp.gates += 1
        if slot.commits:
            self.marks.append(Mark(warp.group, MATMUL, warp.matmuls, now))
            warp.matmuls += 1
        if slot.signal:
            self.marks.append(Mark(warp.group, SIGNAL, warp.signals, now))
            self.gates.signals(warp.group, warp.signals, now)
            warp.signals += 1
        warp.place += 1
        if warp.place == len(warp.code):
            warp.place = 0
            warp.ends.append(now)
        self.current, self.clock = warp, now + 1

    @staticmethod
    def _outstanding(warp: _Warp, slot: Slot, control: Control, now: float) -> None:
        if slot.copies:
            warp.copies.append(now + slot.result)
        elif control.write_sb != NO_SCOREBOARD:
            warp.boards[control.write_sb] = max(warp.boards[control.write_sb], now + slot.result)
        if control.read_sb != NO_SCOREBOARD:
            warp.boards[control.read_sb] = max(warp.boards[control.read_sb], now + slot.sources)

    def _matmul(self, warp: _Warp, slot: Slot, now: float) -> float:
        costs = self.costs
        self.queue = [one for one in self.queue if one.end > now]
        busy = slot.matmul
        if slot.from_registers and all(one.group == warp.group for one in self.queue):
            busy += costs.registers_extra
        start = costs.start_registers if slot.from_registers else costs.start_shared
        free = self.queue[-1].end if self.queue else 0.0
        begin = max(now + start, free)
        one = Matmul(begin, begin + busy, warp.group, warp.matmuls)
        self.matmuls.append(one)
        self.queue.append(one)
        if slot.commits:
            warp.committed.append(one)
        warp.matmul = now
        self.port = max(self.port, now + costs.matmul_port)
        first, warp.arrived = warp.arrived, False
        return costs.hold if first else 0.0

    def _beside(self, warp: _Warp, slot: Slot, now: float) -> float:
        """An instruction that reads registers; the cycles a running matmul makes it hold its
        warp."""
        pipe, occupancy, held = slot.pipe, float(slot.occupancy), 0.0
        late = [one for one in self.queue if one.end > now]
        if late and late[0].begin <= now:
            costs = self.costs.beside[pipe]
            self.port, held = now + costs.port, costs.warp
            occupancy *= self.costs.special if pipe is Pipe.XU else 1.0
            for one in late:
                if one.begin > now:
                    one.begin += costs.delay
                one.end += costs.delay
        if pipe is Pipe.XU:
            warp.special = now
        self.pipes[pipe] = now + occupancy
        return held

    # --- one warp, a stretch at a time ------------------------------------------------------

    def state(self) -> State:
        """What of the past the future of the one warp depends on."""
        (warp,), now = self.warps, self.clock
        queue = [one for one in self.queue if one.end > now]
        places = {id(one): place for place, one in enumerate(queue)}

        def left(moment: float) -> float:
            return round(moment - now, DIGITS) if moment > now else 0.0

        readable = self.costs.readable
        committed = [(places.get(id(one), -1), left(one.end + readable)) for one in warp.committed]
        return (
            left(warp.ready),
            tuple([left(zero) for zero in warp.boards]),
            tuple(committed),
            tuple([left(one) for one in warp.copies]),
            warp.arrived,
            tuple(
                [(pipe, left(self.pipes[pipe])) for pipe in Pipe if self.pipes.get(pipe, 0) > now]
            ),
            left(self.port),
            tuple([(left(one.begin), left(one.end)) for one in queue]),
        )

    @classmethod
    def resumed(cls, code: Sequence[Line], state: State) -> Partition:
        """One warp before `code`, its past as `state` tells; the clock begins at 0."""
        ready, boards, committed, copies, arrived, pipes, port, queue = state
        walk = cls([code], [ready])
        walk.queue = [Matmul(begin, end, 0) for begin, end in queue]
        walk.pipes, walk.port = dict(pipes), port
        (warp,) = walk.warps
        warp.boards, warp.copies, warp.arrived = list(boards), list(copies), arrived
        readable = walk.costs.readable
        warp.committed = [
            walk.queue[place] if place >= 0 else Matmul(0.0, end - readable, 0)
            for place, end in committed
        ]
        return walk
