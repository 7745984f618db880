"""How long a launch takes: its tasks on the GPU's SMs, from what the machine code of one takes.

    task    head + sum over loops of iterations * cycles + tail
    launch  the tasks in the order of the plan on the SMs, in rounds or the next free one,
            between the launch with its first copies and its last stores;
            no less than its traffic at the rate of DRAM
    clock   the highest at which the energy of all that leaves the power below its limit

Cycles come from the replay of the machine code (`perf.replay`), iterations from a task's place in
the grid, so causal masks and tails are as long as they are. What is different among the bytes that
all SMs ask L2 for at a time follows from the order of the tasks, and so does what L2 has lost until
it is asked for again. The limit is that of short bursts (`power.burst`); a kernel that runs alone
for longer gets less (`power.limit`). The costs are probes of the machine
(bench/calibrate_schedule.py, bench/calibrate_launch.py); none was fitted to a kernel.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod

from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import CheckFailed
from warploom.kernels.select import Selected
from warploom.machine import Machine
from warploom.machine import load as load_machine
from warploom.perf.replay import Ends, Prediction, Rates, Replay
from warploom.schedule.model.costs import costs
from warploom.tile import Index, Loop, Op, Program

MODEL = 4  # version of these rules: predictions by other ones are not used again
KIB = 1024
NOTED = 0.002  # share of a time that is worth a word
SECTOR = 32  # bytes; copies are slow when their rows do not begin at one
MOST_TASKS = 1 << 20  # whose places are counted one by one
Place = tuple[int, ...]


@dataclass(frozen=True)
class LaunchTime:
    """Microseconds of a launch, and what it is made of.

    tasks, iterations   of all the launch, over all its loops
    overhead            share of the tasks' cycles outside of their loops
    busy                share of the SMs' time, from the first to the last, in which they have tasks
    memory              microseconds that the arrays take at DRAM's rate: a floor
    mhz                 the clock
    work                cycles of tasks on one SM, or cluster of them, on average
    """

    microseconds: float
    tasks: int
    iterations: int
    overhead: float
    busy: float
    memory: float
    mhz: float
    work: float = 0.0

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
class Strip:
    """What one load brings a task: `bytes` each time, in the loops of these numbers around it.

    axes   of the grid, by number, on which it depends
    """

    op: Op
    axes: tuple[int, ...]
    loops: tuple[int, ...]
    bytes: int

    def of(self, place: Place) -> Place:
        """Where a task is, as far as this load depends on it."""
        return tuple([place[n] for n in self.axes])


@dataclass(frozen=True)
class Launch:
    """A kernel at array sizes on a GPU."""

    selected: Selected
    sizes: Mapping[str, int]
    gpu: str

    @cached_property
    def machine(self) -> Machine:
        """The GPU's data."""
        return load_machine(self.gpu)

    @property
    def program(self) -> Program:
        """What is launched."""
        return self.selected.program

    @property
    def plan(self) -> LaunchPlan:
        """How."""
        return self.selected.launch

    @property
    def places(self) -> int:
        """Clusters, or blocks without them, that run at a time."""
        blocks = self.plan.cluster[1]
        if blocks > 1:
            return self.machine.integer(f"cluster.resident_{blocks}") * self.plan.resident
        return self.machine.integer("sm.count") * self.plan.resident

    @cached_property
    def order(self) -> list[Place]:
        """Places of all tasks in the grid, as blocks take them."""
        extents = [max(0, extent.evaluate(self.sizes)) for _, extent in self.program.grid]
        if prod(extents) > MOST_TASKS:
            raise CheckFailed(f"{self.program.name}: too many tasks to count their iterations")
        names = [name for name, _ in self.program.grid]
        found = _in_bands(extents, self.plan) if self.plan.supergroup else _in_rows(extents)
        far = [n for n, name in enumerate(names) if name in self.plan.reverse]
        return [
            tuple(extents[n] - 1 - at if n in far else at for n, at in enumerate(place))
            for place in found
        ]

    def known(self, place: Place) -> dict[str, int]:
        """Values of symbols for a task."""
        names = (name for name, _ in self.program.grid)
        return {**self.sizes, **dict(zip(names, place, strict=True))}

    @cached_property
    def trips(self) -> dict[Place, tuple[int, ...]]:
        """Iterations of each loop, by place; raises where a task reads them from an array."""
        loops = self.program.loops()
        needed = frozenset[str]().union(
            *(one.start.symbols() | one.stop.symbols() for one in loops)
        )
        if unknown := needed & {read.name for read in self.program.reads}:
            raise CheckFailed(
                f"{self.program.name}: iterations depend on {sorted(unknown)[0]}, read by tasks"
            )
        telling = [n for n, (name, _) in enumerate(self.program.grid) if name in needed]
        counted: dict[Place, tuple[int, ...]] = {}
        found: dict[Place, tuple[int, ...]] = {}
        for place in self.order:
            key = tuple(place[n] for n in telling)
            if key not in counted:
                known = self.known(place)
                counted[key] = tuple(_trips(one.start, one.stop, known) for one in loops)
            found[place] = counted[key]
        return found

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """What a task loads, over all iterations of the loops around each load."""
        names = [name for name, _ in self.program.grid]
        index = [loop.index for loop in self.program.loops()]
        found: list[Strip] = []
        for op, around in _loads(self.program):
            starts = [*(span.start for span in op.spans), *(one.start for one in around)]
            used = frozenset[str]().union(*(start.symbols() for start in starts))
            axes = tuple(n for n, name in enumerate(names) if name in used)
            loops = tuple(index.index(one.index) for one in around)
            found.append(Strip(op, axes, loops, _bytes(op)))
        return tuple(found)

    @cached_property
    def apart(self) -> Mapping[str, float]:
        """Of each load, the share of what all SMs ask for at a time that is different."""
        first = self.order[: self.places * self.plan.cluster[1]]
        return {
            one.op.label: len({one.of(place) for place in first}) / max(1, len(first))
            for one in self.strips
        }

    def rates(self) -> Rates:
        """Of each load the cycles in which an SM gets a KiB, while all of them load."""
        table = costs(self.gpu)
        found: dict[str, float] = {}
        for one in self.strips:
            rate = table.value("load.per_kib_all") * self.apart[one.op.label]
            if self._ragged(one.op):
                rate = max(rate, table.value("load.per_kib_ragged"))
            found[one.op.label] = max(rate, table.value("load.per_kib"))
        return found

    def _ragged(self, op: Op) -> bool:
        """Whether rows of the array begin inside of a sector."""
        assert op.array is not None
        return self.sizes[op.array.dims[-1]] * op.array.dtype.bytes % SECTOR > 0

    @cached_property
    def traffic(self) -> float:
        """Bytes from and to DRAM: what a wave of tasks loads stays in L2 until as much was loaded
        after it as a partition holds, for every SM reads through its own partition."""
        cache = self.machine.value("l2.size") / self.machine.value("l2.partitions")
        kept: OrderedDict[tuple[int, Place], float] = OrderedDict()
        missed = held = 0.0
        wave = self.places * self.plan.cluster[1]
        for begin in range(0, len(self.order), wave):
            loaded: dict[tuple[int, Place], float] = {}
            for place in self.order[begin : begin + wave]:
                trips = self.trips[place]
                for number, one in enumerate(self.strips):
                    key = number, one.of(place)
                    size = one.bytes * prod(trips[n] for n in one.loops)
                    if size > loaded.get(key, 0.0):
                        loaded[key] = size
            for key, size in loaded.items():
                old = kept.pop(key, 0.0)
                missed += max(0.0, size - old)
                kept[key] = max(size, old)
                held += kept[key] - old
            while held > cache and kept:
                held -= kept.popitem(last=False)[1]
        return missed + len(self.order) * self._stored()

    def time(self, replay: Replay) -> LaunchTime:
        """The time of the launch, from what its machine code takes."""
        table, loops = costs(self.gpu), list(replay.loops.values())
        index = [loop.index for loop in self.program.loops()]
        at = [index.index(one.loop) for one in loops]
        ends = _of_a_task(replay.ends, self._fill())
        stored = self._stored() / KIB * table.value("store.per_kib_all")

        def cycles(trips: Sequence[int]) -> float:
            inside = sum(
                max(0, trips[n] - one.ahead) * one.cycles for n, one in zip(at, loops, strict=True)
            )
            return max(inside + ends, stored)

        tasks = [cycles(self.trips[place]) for place in self.order]
        blocks = self.plan.cluster[1]
        clusters = tasks[::blocks] if blocks > 1 else tasks
        whole = _makespan(clusters, self.places, self.plan.tile_scheduler)
        iterations = sum(sum(self.trips[place]) for place in self.order)
        around = self._around(replay.ends)
        mhz = self._clock(replay, whole + around)
        memory = self.traffic / self.machine.value("dram.copy_bandwidth") * 1e6
        launch = self.machine.value("launch.gap") if replay.ends.begin else 0.0
        return LaunchTime(
            max((whole + around) / mhz + launch, memory),
            len(tasks),
            iterations,
            ends * len(tasks) / (sum(tasks) or 1.0),
            sum(clusters) / (self.places * whole or 1.0),
            memory,
            mhz,
            sum(clusters) / self.places,
        )

    def _fill(self) -> float:
        """Cycles until what is loaded once a task is there, where its slot has to be free first."""
        table = costs(self.gpu)
        waiting = [
            _bytes(op)
            for op, around in _loads(self.program)
            if not around and op.dst is not None and self.plan.task_rings.get(op.dst.name, 1) == 1
        ]
        if not waiting:
            return 0.0
        names = ("barrier.wait", "load.issue", "load.latency")
        return sum(map(table.value, names)) + sum(waiting) / KIB * table.value("load.per_kib")

    def _stored(self) -> float:
        """Bytes that a task stores."""
        return float(
            sum(
                prod(op.srcs[0].type.shape) * op.srcs[0].type.dtype.bytes
                for op in self.program.ops()
                if op.kind.startswith("store")
            )
        )

    def _around(self, ends: Ends) -> float:
        """Cycles before the first task and behind the last one."""
        if not ends.begin:
            return 0.0
        table = costs(self.gpu)
        sizes = [_bytes(op) for op, _ in _loads(self.program)]
        load = table.at("high").value("load.latency") + sum(sizes) / KIB * table.value(
            "load.per_kib_all"
        )
        store = table.value("store.latency") + self._stored() / KIB * table.value("store.per_kib")
        return ends.begin + load + store

    def _clock(self, replay: Replay, cycles: float) -> float:
        """MHz at which the launch takes no more power than the limit allows."""
        machine = self.machine
        top = machine.value("clock.boost")
        if "energy.exponent" not in machine.quantities or not cycles:
            return top

        def one(name: str) -> float:
            return machine.value(f"energy.{name}")

        label = [loop.index for loop in self.program.loops()]
        picojoules = 0.0
        for loop in replay.loops.values():
            times = sum(self.trips[place][label.index(loop.loop)] for place in self.order)
            each = sum(count * one(name) for name, count in loop.events.items())
            here = label.index(loop.loop)
            for strip in self.strips:
                far = strip.bytes * self.apart[strip.op.label] * (one("l2") - one("copy"))
                each += far if here in strip.loops else 0.0
            picojoules += times * each
        picojoules += len(self.order) * self._stored() * one("store")
        if any(loop.events.get("matmul") for loop in replay.loops.values()):
            top = min(top, machine.value("clock.tensor"))
        room = machine.value("power.burst") - machine.value("power.static")
        exponent = machine.value("energy.exponent")
        boost = machine.value("clock.boost")
        # watts(f) = chip * f ** (exponent + 1) + DRAM's, which goes with the rate only
        chip = 1e-12 * picojoules * 1e6 / cycles  # watts a MHz at the highest clock
        dram = 1e-12 * self.traffic * one("dram") * 1e6 / cycles
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
    return ", ".join(told) or "as fast, by this model"


def at_bounds(cycles: Mapping[str, float]) -> Replay:
    """Loops at their bounds, and nothing around them."""
    return Replay({n: Prediction(n, one, round(one), "", 0) for n, one in cycles.items()}, Ends())


def _of_a_task(ends: Ends, fill: float) -> float:
    """Cycles of a task outside of its steady loops; `fill` runs beside the tail."""
    if ends.tail == inf:  # a block has one task
        return ends.begin + ends.between + ends.finish
    return max(ends.tail, fill) + ends.head + ends.between


def _loads(program: Program) -> list[tuple[Op, tuple[Loop, ...]]]:
    """Loads with the loops around them, the outermost first."""
    found: list[tuple[Op, tuple[Loop, ...]]] = []

    def visit(body: Sequence[Op | Loop], around: tuple[Loop, ...]) -> None:
        for item in body:
            if isinstance(item, Loop):
                visit(item.body, (*around, item))
            elif item.kind == "load":
                found.append((item, around))

    visit(program.body, ())
    return found


def _bytes(op: Op) -> int:
    """Of the tile that a load brings."""
    assert op.dst is not None
    return prod(op.dst.type.shape) * op.dst.type.dtype.bytes


def _in_rows(extents: Sequence[int]) -> list[Place]:
    return list(product(*map(range, extents)))


def _in_bands(extents: Sequence[int], plan: LaunchPlan) -> list[Place]:
    """Places of a super-grouped launch: `supergroup` rows at a time, column after column."""
    outer = extents[:-2] if plan.grouped == "row" else list[int]()
    before = [prod(extents[:-1])] if plan.grouped == "all" else [extents[-2]]
    height, width = before[0], extents[-1]
    plane: list[tuple[int, int]] = []
    for band in range(0, height, plan.supergroup):
        rows = range(band, min(band + plan.supergroup, height))
        plane += [(row, col) for col in range(width) for row in rows]
    found: list[Place] = []
    for place in product(*map(range, outer)):
        for row, col in plane:
            if plan.grouped == "row":
                found.append((*place, row, col))
                continue
            rest, split = row, list[int]()
            for extent in reversed(extents[:-1]):
                rest, at = divmod(rest, extent)
                split.append(at)
            found.append((*reversed(split), col))
    return found


def _trips(start: Index, stop: Index, known: Mapping[str, int]) -> int:
    return max(0, stop.evaluate(known) - start.evaluate(known))


def _makespan(tasks: Sequence[float], places: int, scheduler: str) -> float:
    """Cycles until the last task has ended, of tasks shared out in order to so many places."""
    ends = [0.0] * places
    for number, task in enumerate(tasks):
        if scheduler == "dynamic":
            heapq.heapreplace(ends, ends[0] + task)
            continue
        turn, place = divmod(number, places)
        back = scheduler == "serpentine" and turn % 2
        ends[places - 1 - place if back else place] += task
    return max(ends, default=0.0)
