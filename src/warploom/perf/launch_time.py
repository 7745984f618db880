"""How long a launch takes: its tasks on the GPU's SMs, from what the machine code of one takes.

    task    head + sum over loops of iterations * cycles + tail + its stores, while all SMs store
    launch  the tasks in the order of the plan on the SMs, in rounds or the next free one,
            between the launch with its first copies and its last stores;
            no less than its traffic at the rate of DRAM;
            and that of the kernel which adds up sums that go through memory
    clock   the highest at which the energy of all that leaves the power below its limit

Cycles come from the replay of the machine code (`perf.replay`), iterations from a task's place in
the grid, so causal masks and tails are as long as they are: a group whose own rows are through
leaves its share of the SM to the others. What is different among the
bytes that all SMs ask L2 for at a time follows from the order of the tasks, and so does what L2 has
lost until it is asked for again. The limit is that of short bursts (`power.burst`); a kernel that
runs alone for longer gets less (`power.limit`). The costs are probes of the machine
(bench/calibrate_schedule.py, bench/calibrate_launch.py); none was fitted to a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warploom.perf.frame import bytes_of, loads_of
from warploom.perf.gates import Rates
from warploom.perf.launch_tasks import (
    LaunchTasks,
    Numbers,
    makespan,
    shared_cycles,
    task_cycles,
    valued,
)
from warploom.perf.places import PLACES, shares
from warploom.perf.replay import RULES, Ends, Prediction, Replay
from warploom.schedule.model.costs import costs
from warploom.tile import Op

# Version of these rules and of the replay's: predictions by other ones are not used again.
MODEL = f"17.{RULES}"
KIB = 1024
NOTED = 0.002  # share of a time that is worth a word


@dataclass(frozen=True)
class LaunchTime:
    """Microseconds of a launch, and what it is made of.

    tasks, iterations   of all the launch, over all its loops
    overhead            share of the tasks' cycles outside of their loops
    busy                share of the SMs' time, from the first to the last, in which they have tasks
    memory              microseconds that the arrays take at DRAM's rate: a floor
    mhz                 the clock
    work                cycles of tasks on one SM, or cluster of them, on average
    alone               microseconds without that floor
    """

    microseconds: float
    tasks: int
    iterations: int
    overhead: float
    busy: float
    memory: float
    mhz: float
    work: float = 0.0
    alone: float = 0.0

    @property
    def limits(self) -> str:
        """What limits it, in words."""
        if self.microseconds <= self.memory:
            return "reading and writing its arrays"
        if self.busy < 0.85:
            return f"SMs without a task: they are busy {self.busy:.0%} of the time"
        if self.overhead > 0.25:
            return f"beginnings and ends of tasks: {self.overhead:.0%} of their time"
        return "its loops"


@dataclass(frozen=True)
class Launch(LaunchTasks):
    """The time of a launch. `limit` is the power that holds the clock: that of the first
    milliseconds, or the board's (`power.limit`) for a kernel that runs alone for longer.
    """

    limit: str = "power.burst"

    def rates(self) -> Rates:
        """Of each load the cycles in which an SM gets a KiB, while all of them load: as fast as its
        own way takes them, or as L2 reads for all, whichever takes longer for the loads of a
        loop; tasks on average."""
        found: dict[str, float] = {}
        for loop in {strip.loops[-1:] for strip in self.strips}:
            sizes = {
                strip.op.label: size
                for strip, size in zip(self.strips, self.frame.asked, strict=True)
                if strip.loops[-1:] == loop
            }
            own = {name: float(np.mean(self._own[name])) for name in sizes}
            every = {name: self._every[name] for name in sizes}

            def whole(rates: Rates, sizes: Mapping[str, float] = sizes) -> float:
                return sum(size * rates[name] for name, size in sizes.items())

            found |= max(own, every, key=whole)
        return found

    @cached_property
    def _every(self) -> Mapping[str, float]:
        """Cycles of a KiB of each load, as L2 reads for all SMs."""
        rate = costs(self.gpu).value("load.per_kib_all")
        return {strip.op.label: rate * self.read[strip.op.label] for strip in self.strips}

    @cached_property
    def _own(self) -> Mapping[str, Numbers | float]:
        """Cycles of a KiB of each load of each task, as they come to one SM."""
        table = costs(self.gpu)
        # Of other places than a line's first byte the slowest: where all SMs share a tile. Loops of
        # four GEMMs that such loads hold up were counted 9 to 15 % above those shared by 11.
        slow = table.at("high")
        rates = [(slow if place else table).value(f"load.per_kib{place}") for place in PLACES]
        return {
            strip.op.label: np.dot(places, rates)
            for strip, places in zip(self.strips, self._places, strict=True)
        }

    @cached_property
    def _places(self) -> list[Numbers]:
        """Of each strip, [tasks or 1, places of a line]: shares of its rows that begin there."""
        return [self._begun(strip.op) for strip in self.strips]

    def _begun(self, op: Op) -> Numbers:
        assert op.array is not None
        size, start = op.array.dtype.bytes, op.spans[-1].start
        first = np.zeros(1, int)  # where it begins may not be known before a task reads it
        if not start.symbols() - self.known.keys():
            first = np.atleast_1d(np.asarray(valued(start, self.known) * size))
        return shares(self.sizes[op.array.dims[-1]] * size, first)

    @cached_property
    def link(self) -> list[Numbers]:
        """Cycles in which an iteration's loads of each loop come to an SM, by task."""
        own, every = ([np.zeros(len(self.order)) for _ in self.trips] for _ in range(2))
        for strip, size in zip(self.strips, self.frame.asked, strict=True):
            for loop in strip.loops[-1:]:
                own[loop] += size / KIB * self._own[strip.op.label]
                every[loop] += size / KIB * self._every[strip.op.label]
        return [np.maximum(*pair) for pair in zip(own, every, strict=True)]

    def floor(self, replay: Replay) -> float:
        """Microseconds that `time` is not below: with an L2 that loses nothing."""
        return self._time(replay, self.once).microseconds

    def least(self, replay: Replay) -> float:
        """Microseconds that the launch is not below: its tasks with copies that never hold them up
        and bytes that are near; those that are taken by whoever is free, without one waiting."""
        clusters = self._tasks(replay, copied=False)[:: self.plan.cluster[1]]
        dynamic = self.plan.tile_scheduler == "dynamic"
        work = float(clusters.sum()) / self.places
        whole = work if dynamic else makespan(clusters, self.places, self.plan.tile_scheduler)
        return whole / self._clock(replay, whole, 0.0, near=True)

    def _tasks(self, replay: Replay, copied: bool = True) -> Numbers:
        """Cycles of each task. Where loads come more slowly than a replayed iteration runs, an
        iteration takes as long as they do; without `copied` as if they took no time."""
        tasks = np.full(len(self.order), self._ends(replay.ends))
        for at, one in self._walked(replay):
            least = np.maximum(0, self.trips[at] - one.ahead) * (self.link[at] if copied else 0.0)
            tasks += np.maximum(
                shared_cycles(np.maximum(0, self.parts[at] - one.ahead), one), least
            )
        return tasks

    def _walked(self, replay: Replay) -> list[tuple[int, Prediction]]:
        """Loops by number, with what was replayed of them; the replay may be of another form of the
        program, which has a loop more."""
        names = [loop.index for loop in self.program.loops()]
        return [(at, replay.loops[name]) for at, name in enumerate(names) if name in replay.loops]

    def time(self, replay: Replay) -> LaunchTime:
        """The time of the launch, from what its machine code takes."""
        return self._time(replay, self.traffic)

    def _time(self, replay: Replay, traffic: float) -> LaunchTime:
        tasks = self._tasks(replay)
        ends = self._ends(replay.ends)
        clusters = tasks[:: self.plan.cluster[1]]
        whole = makespan(clusters, self.places, self.plan.tile_scheduler)
        work = float(clusters.sum())
        around = self._around(replay.ends)
        mhz = self._clock(replay, whole + around, traffic)
        memory = traffic / self.machine.value("dram.copy_bandwidth") * 1e6
        gap = "launch.gap_clusters" if self.plan.cluster[1] > 1 else "launch.gap"
        launch = self.machine.value(gap) if replay.ends.begin else 0.0
        alone = (whole + around) / mhz + launch + self.added_up
        return LaunchTime(
            max(alone, memory),
            len(tasks),
            sum(int(trips.sum()) for trips in self.trips),
            ends * len(tasks) / (float(tasks.sum()) or 1.0),
            work / (self.places * whole or 1.0),
            memory,
            mhz,
            work / self.places,
            alone,
        )

    @cached_property
    def added_up(self) -> float:
        """Microseconds of the second kernel where sums go through memory to it: all SMs read them
        from L2, and each of its blocks has one task that waits for what it reads and stores."""
        if not self.frame.handed_on:
            return 0.0
        table = costs(self.gpu)
        read = len(self.order) * self.frame.handed_on / KIB / self.machine.integer("sm.count")
        cycles = read * table.value("load.per_kib_all")
        cycles += table.value("load.latency") + table.value("store.latency")
        return self.machine.value("launch.gap") + cycles / self.machine.value("clock.boost")

    def _ends(self, ends: Ends) -> float:
        """Cycles of a task outside of its steady loops. Its results leave while all SMs store, and
        no loop hides that: nor does the code that packs them, also where they leave from registers
        (which was predicted 2.5 % too fast beside panels, for GEMM of 4096 and RMSNorm and linear,
        as long as that code was taken to run meanwhile)."""
        store = self.frame.stored / KIB * costs(self.gpu).value("store.per_kib_all")
        shared = self.frame.exchanged
        shared = shared / self.machine.value("cluster.exchange") if shared else 0.0
        return task_cycles(ends, self._fill()) + store + shared

    def _fill(self) -> float:
        """Cycles until what is loaded once a task is there, where its slot has to be free first."""
        table = costs(self.gpu)
        if not self.frame.waited:
            return 0.0
        names = ("barrier.wait", "load.issue", "load.latency")
        return sum(map(table.value, names)) + self.frame.waited / KIB * table.value("load.per_kib")

    def _around(self, ends: Ends) -> float:
        """Cycles before the first task and behind the last one."""
        if not ends.begin:
            return 0.0
        table = costs(self.gpu)
        sizes = [bytes_of(op) for op, _ in loads_of(self.program)]
        load = table.at("high").value("load.latency") + sum(sizes) / KIB * table.value(
            "load.per_kib_all"
        )
        return ends.begin + load + table.value("store.latency")

    @cached_property
    def _far(self) -> list[float]:
        """pJ of a task's iteration of each strip's loop, beyond those of bytes that all SMs ask for
        at a time in rows that begin at lines. A cluster asks once."""
        energy = self.machine.value
        more = [energy(f"energy.copy{place}") if place else 0.0 for place in PLACES]
        apart = energy("energy.l2") - energy("energy.copy")
        return [
            asked / self.plan.resident
            * (self.read[strip.op.label] * apart + float(np.dot(places, more).mean()))
            for strip, asked, places in zip(
                self.strips, self.frame.asked, self._places, strict=True
            )
        ]  # fmt: skip

    def _clock(self, replay: Replay, cycles: float, traffic: float, near: bool = False) -> float:
        """MHz at which the launch, with so many bytes from and to DRAM, takes no more power than
        the limit allows; with `near` as if no load came from another part of L2."""
        machine = self.machine
        top = machine.value("clock.boost")
        if "energy.exponent" not in machine.quantities or not cycles:
            return top

        def one(name: str) -> float:
            return machine.value(f"energy.{name}")

        picojoules = 0.0
        for here, loop in self._walked(replay):
            times = float(self.parts[here].mean(axis=0).sum())
            each = sum(count * one(name) for name, count in loop.events.items())
            for strip, byte in () if near else zip(self.strips, self._far, strict=True):
                each += byte if here in strip.loops else 0.0
            picojoules += times * each
        picojoules += len(self.order) * self.frame.stored * one("store")
        if any(name.startswith("matmul") for loop in replay.loops.values() for name in loop.events):
            top = min(top, machine.value("clock.tensor"))
        room = machine.value(self.limit) - machine.value("power.static")
        exponent = machine.value("energy.exponent")
        boost = machine.value("clock.boost")
        # watts(f) = chip * f ** (exponent + 1) + DRAM's, which goes with the rate only
        chip = 1e-12 * picojoules * 1e6 / cycles  # watts a MHz at the highest clock
        stored = min(traffic, len(self.order) * self.frame.stored)
        far = one("dram") * (1.0 - self.shared) + one("dram_shared") * self.shared
        dram = 1e-12 * (stored * one("dram") + (traffic - stored) * far) * 1e6 / cycles
        low, high = 0.0, top
        for _ in range(40):
            f = (low + high) / 2
            fits = f * (chip * (f / boost) ** exponent + dram) <= room
            low, high = (f, high) if fits else (low, f)
        return low if high < top else top


def why_slower(one: Mapping[str, float], best: Mapping[str, float]) -> str:
    """What makes a launch slower than another one, in words; both have `work`, `busy`, `mhz`."""
    terms = (
        (one["work"] / best["work"], "its tasks take {:.1%} more cycles"),
        (best["busy"] / one["busy"], "SMs are without a task for {:.1%} longer"),
        (best["mhz"] / one["mhz"], "its energy leaves a clock {:.1%} lower"),
    )
    told = [words.format(factor - 1.0) for factor, words in terms if factor > 1.0 + NOTED]
    return ", ".join(told) or "no slower that the model can tell"


def at_bounds(cycles: Mapping[str, float]) -> Replay:
    """Loops at their bounds, and nothing around them; what a part of the groups takes is not
    bounded."""
    return Replay({n: Prediction(n, one, 0, "", 0) for n, one in cycles.items()}, Ends())
