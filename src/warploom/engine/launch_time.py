"""How long a launch takes: its tasks on the GPU's SMs, from what one iteration of a loop takes.

    task    fill + sum over loops of iterations * cycles + drain
    launch  the tasks in the order of the plan on the SMs, in rounds or the next free one
            no less than the bytes of its arrays at the rate of DRAM

`cycles` come from the replay of the machine code (`perf.replay`). The fill is the way of a task's
first operands into shared memory, the drain that of its results out of it and, in a pipelined
order, of one iteration more; a plan that prefetches, or overlaps tasks, hides them from the next
task. How many iterations a task has follows from its place in the grid, so causal masks and tails
are as long as they are. Nothing here was fitted to a kernel; the costs are probes of the machine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from warploom.errors import CheckFailed
from warploom.kernels.select import Selected
from warploom.machine import load as load_machine
from warploom.schedule.model.costs import costs
from warploom.tile import Index, Program

KIB = 1024
MOST_PLACES = 1 << 16  # of the grid, for which loops' iterations are counted one by one


@dataclass(frozen=True)
class LaunchTime:
    """Microseconds of a launch, and what it is made of.

    tasks, iterations   of all the launch, over all its loops
    busy                share of the SMs' time, from the first to the last, in which they have tasks
    memory              microseconds that the arrays take at DRAM's rate: a floor
    """

    microseconds: float
    tasks: int
    iterations: int
    overhead: float
    busy: float
    memory: float

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


def launch_time(
    selected: Selected, cycles: Mapping[str, float], sizes: Mapping[str, int], gpu: str
) -> LaunchTime:
    """The time of a launch at array sizes, from cycles an iteration by loop.

    Raises `CheckFailed` where iterations depend on numbers that a task reads from an array.
    """
    program, plan = selected.program, selected.launch
    machine = load_machine(gpu)
    extra = _ends(selected, cycles, gpu)
    durations, order, iterations = _tasks(program, cycles, sizes, plan.reverse)
    tasks = [durations[key] + extra for key in order]
    places = machine.integer("sm.count") * plan.resident // max(1, plan.cluster[1])
    whole = _makespan(tasks, places, plan.tile_scheduler == "dynamic")
    clock = machine.value("clock.boost")
    memory = _bytes(program, sizes) / machine.value("dram.copy_bandwidth") * 1e6
    return LaunchTime(
        max(whole / clock, memory),
        len(tasks),
        iterations,
        extra * len(tasks) / (sum(tasks) or 1.0),
        sum(tasks) / (places * whole or 1.0),
        memory,
    )


def _ends(selected: Selected, cycles: Mapping[str, float], gpu: str) -> float:
    """Cycles of a task that are no iteration: until its first matmul, and after its last one."""
    program, plan, table = selected.program, selected.launch, costs(gpu)
    operands = {src.name for op in program.ops() if op.kind == "mma" for src in op.srcs[:2]}
    first = [
        prod(op.dst.type.shape) * op.dst.type.dtype.bytes
        for op in program.ops()
        if op.kind == "load" and op.dst is not None and op.dst.name in operands
    ]
    stored = [
        prod(op.srcs[0].type.shape) * op.srcs[0].type.dtype.bytes
        for op in program.ops()
        if op.kind.startswith("store")
    ]
    fill = table.value("load.latency") + sum(first) / KIB * table.value("load.per_kib_all")
    drain = table.value("store.latency") + sum(stored) / KIB * table.value("store.per_kib")
    if plan.overlap_next_task:
        return drain / 2
    deep = max(cycles.values(), default=0.0)  # pipelined orders finish what they began ahead
    return drain + deep / 2 + (0.0 if plan.task_rings else fill)


def _tasks(
    program: Program,
    cycles: Mapping[str, float],
    sizes: Mapping[str, int],
    reverse: Sequence[str],
) -> tuple[dict[tuple[int, ...], float], list[tuple[int, ...]], int]:
    """Cycles by what tells tasks apart, that of every task in launch order, and all iterations."""
    loops = program.loops()
    needed = frozenset[str]().union(*(one.start.symbols() | one.stop.symbols() for one in loops))
    if unknown := needed & {read.name for read in program.reads}:
        raise CheckFailed(
            f"{program.name}: iterations depend on {sorted(unknown)[0]}, read by tasks"
        )
    axes = [(name, max(0, extent.evaluate(sizes))) for name, extent in program.grid]
    telling = [name for name, _ in axes if name in needed]
    if prod(extent for name, extent in axes if name in needed) > MOST_PLACES:
        raise CheckFailed(f"{program.name}: too many different tasks to count their iterations")
    durations: dict[tuple[int, ...], float] = {}
    trips: Counter[tuple[int, ...]] = Counter()
    for place in product(*(range(extent) for name, extent in axes if name in needed)):
        known = {**sizes, **dict(zip(telling, place, strict=True))}
        count = [_trips(one.start, one.stop, known) for one in loops]
        durations[place] = sum(
            n * cycles.get(one.index, 0.0) for n, one in zip(count, loops, strict=True)
        )
        trips[place] = sum(count)
    ranges = [range(e)[:: -1 if name in reverse else 1] for name, e in axes]
    at = [number for number, (name, _) in enumerate(axes) if name in needed]
    order = [tuple(place[n] for n in at) for place in product(*ranges)]
    return durations, order, sum(trips[key] for key in order)


def _trips(start: Index, stop: Index, known: Mapping[str, int]) -> int:
    return max(0, stop.evaluate(known) - start.evaluate(known))


def _makespan(tasks: Sequence[float], places: int, dynamic: bool) -> float:
    """Cycles until the last task has ended, of tasks shared out in order to so many places."""
    if not dynamic:
        return max(
            (sum(tasks[place::places]) for place in range(min(places, len(tasks)))), default=0.0
        )
    ends = [0.0] * places
    for task in tasks:
        heapq.heapreplace(ends, ends[0] + task)
    return max(ends, default=0.0)


def _bytes(program: Program, sizes: Mapping[str, int]) -> float:
    """Of the arrays that the program loads from or stores to, each once."""
    used = {op.array.name for op in program.ops() if op.array is not None}
    return float(
        sum(
            prod(sizes[dim] for dim in one.dims) * one.dtype.bytes
            for one in program.arrays
            if one.name in used
        )
    )
