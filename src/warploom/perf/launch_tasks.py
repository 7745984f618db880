"""Tasks of a launch as arrays: their numbers in the order of a plan, symbols that have a value for
every task, what each loads, its cycles, and when the last one has ended."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.analysis.grid import cluster_axis
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import CheckFailed, InputError
from warploom.machine import Machine
from warploom.machine import load as load_machine
from warploom.perf.frame import Frame, Strip
from warploom.perf.l2 import Asked, largest, missed, once
from warploom.perf.replay import Ends, Prediction
from warploom.tile import Index, Loop, Program
from warploom.tile.index import FOLD

WAVES = 256  # rounds of tasks that are followed one by one: others are as these are on average
MOST_TASKS = 1 << 20  # whose places are counted one by one
PART = re.compile(r"(.*)\.(begin|end)")  # symbols of the rows of a part
Numbers = NDArray[Any]


def shared_cycles(parts: Numbers, one: Prediction) -> Numbers:
    """Cycles of each task's iterations, [parts, tasks] with the least first: those that are left
    share the SM, but none is faster than the loop's bound."""
    count = len(parts)
    share = one.cycles * np.arange(count, 0, -1) / count
    return np.maximum(share, min(one.bound, one.cycles)) @ np.diff(parts, axis=0, prepend=0)


def task_cycles(ends: Ends, fill: float) -> float:
    """Cycles of a task outside of its steady loops; `fill` runs beside the tail."""
    if ends.tail == inf:  # a block has one task
        return ends.begin + ends.between + ends.finish
    return max(ends.tail, fill) + ends.head + ends.between


def in_bands(number: Numbers, extents: Sequence[int], plan: LaunchPlan) -> Numbers:
    """Row-major numbers of the places of a super-grouped launch: so many rows at a time, column
    after column."""
    width = extents[-1]
    height = prod(extents[:-1]) if plan.grouped == "all" else extents[-2]
    plane, task = np.divmod(number, height * width)
    band, inside = np.divmod(task, plan.supergroup * width)
    high = np.minimum(plan.supergroup, height - band * plan.supergroup)
    row, column = band * plan.supergroup + inside % high, inside // high
    return (plane * height + row) * width + column


def valued(index: Index, known: Mapping[str, Numbers | int]) -> Any:
    """An expression of symbols that have a value for every task."""
    if index.op == "const":
        return index.value
    if index.op == "symbol":
        return known[index.name]
    left, right = (valued(arg, known) for arg in index.args)
    least = {"min": np.minimum, "max": np.maximum}
    return (least.get(index.op) or FOLD[index.op])(left, right)


def makespan(tasks: Numbers, places: int, scheduler: str) -> float:
    """Cycles until the last task has ended, of tasks shared out in order to so many places."""
    if scheduler == "dynamic":
        even = max(0, len(tasks) - WAVES * places)
        ends = [float(tasks[:even].sum()) / places] * places
        for task in tasks[even:].tolist():
            heapq.heapreplace(ends, ends[0] + task)
        return max(ends)
    rounds = -(-len(tasks) // places)
    shared = np.zeros(rounds * places)
    shared[: len(tasks)] = tasks
    shared = shared.reshape(rounds, places)
    if scheduler == "serpentine":
        shared[1::2] = shared[1::2, ::-1]
    return float(shared.sum(axis=0).max(initial=0.0))


@dataclass(frozen=True)
class LaunchTasks:
    """A program at array sizes on a GPU, laid out by a plan: what its tasks are, and load.

    `arrays` has the int32 arrays, by name, from which tasks read where their data lie; `of` is what
    is known of the program and the plan from another launch of them.
    """

    program: Program
    plan: LaunchPlan
    sizes: Mapping[str, int]
    gpu: str
    arrays: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    of: Frame | None = field(default=None, repr=False, compare=False)

    @cached_property
    def frame(self) -> Frame:
        """What does not depend on the sizes."""
        return self.of or Frame(self.program, self.plan)

    @cached_property
    def machine(self) -> Machine:
        """The GPU's data."""
        return load_machine(self.gpu)

    @property
    def places(self) -> int:
        """Clusters, or blocks without them, that run at a time."""
        blocks = self.plan.cluster[1]
        if blocks > 1:
            return self.machine.integer(f"cluster.resident_{blocks}") * self.plan.resident
        return self.machine.integer("sm.count") * self.plan.resident

    @cached_property
    def order(self) -> Numbers:
        """[tasks, grid axes]: places of all tasks in the grid, as blocks take them. Those of a
        cluster are neighbours; where it does not divide its axis, the last has some beyond it."""
        extents = [max(0, extent.evaluate(self.sizes)) for _, extent in self.program.grid]
        axis, blocks = cluster_axis(self.program, self.plan), self.plan.cluster[1]
        if axis >= 0:
            extents[axis] = -(-extents[axis] // blocks)
        if prod(extents) > MOST_TASKS:
            raise InputError(
                f"{self.program.name} of {prod(extents):,} tasks: the model of a launch counts at "
                f"most {MOST_TASKS:,}"
            )
        number = np.arange(prod(extents))
        if self.plan.supergroup and len(number):
            number = in_bands(number, extents, self.plan)
        # A program without a grid is one task, which has no place.
        axes = np.unravel_index(number, extents) if extents else ()
        found = np.stack(axes, axis=1) if axes else np.zeros((1, 0), int)
        for far, (name, _) in enumerate(self.program.grid):
            if name in self.plan.reverse:
                found[:, far] = extents[far] - 1 - found[:, far]
        if axis >= 0:
            found = np.repeat(found, blocks, axis=0)
            found[:, axis] = found[:, axis] * blocks + np.arange(len(found)) % blocks
        return found

    @cached_property
    def known(self) -> Mapping[str, Numbers | int]:
        """Values of symbols, task by task in their order; a loop's counter is 0."""
        found: dict[str, Numbers | int] = {loop.index: 0 for loop in self.program.loops()}
        found |= self.sizes
        for axis, (name, _) in enumerate(self.program.grid):
            found[name] = self.order[:, axis]
        for read in self.program.reads:
            if read.array.name in self.arrays:
                at = tuple(valued(index, found) for index in read.at)
                found[read.name] = self.arrays[read.array.name][at]
        return found

    @cached_property
    def trips(self) -> list[Numbers]:
        """Iterations of each loop, by task; raises where a task reads them from an array that is
        not given."""
        return [
            np.broadcast_to(
                np.maximum(0, self._of(loop.stop) - self._of(loop.start)), len(self.order)
            )
            for loop in self.program.loops()
        ]

    @cached_property
    def parts(self) -> list[Numbers]:
        """[parts, tasks]: iterations of each loop in which a part of its rows takes part, the least
        first. A group is through with its own before the others are (`Loop.until`)."""
        loops = zip(self.program.loops(), self.trips, strict=True)
        return [np.sort(self._parts(loop, trips), axis=0) for loop, trips in loops]

    def _parts(self, loop: Loop, trips: Numbers) -> Numbers:
        of_parts = [] if loop.until is None else [*map(PART.fullmatch, loop.until.symbols())]
        axes = {found.group(1) for found in of_parts if found}
        if loop.until is None or len(axes) != 1:
            return trips[None]
        (axis,) = axes
        tiles = (op.dst.type for op in self.program.ops() if op.dst is not None)
        rows = max(tile.size(axis) for tile in tiles if axis in tile.names)
        each: list[Numbers] = []
        for begin in range(0, rows, ROWS_PER_GROUP):
            end = min(rows, begin + ROWS_PER_GROUP)
            part = {**self.known, f"{axis}.begin": begin, f"{axis}.end": end}
            own = valued(loop.until, part) - self._of(loop.start)
            each.append(np.clip(np.broadcast_to(own, len(trips)), 0, trips))
        return np.stack(each)

    def _of(self, index: Index) -> Numbers | int:
        """Values of an expression, task by task."""
        if unknown := index.symbols() - self.known.keys():
            raise CheckFailed(
                f"{self.program.name}: iterations depend on {sorted(unknown)[0]}, read by tasks"
            )
        return valued(index, self.known)

    @property
    def strips(self) -> tuple[Strip, ...]:
        """What a task loads, over all iterations of the loops around each load."""
        return self.frame.strips

    @cached_property
    def asked(self) -> list[Numbers]:
        """Of each strip, by task, a number that tells what it loads: equal for the same bytes."""
        apart = {read.name: np.arange(len(self.order)) for read in self.program.every_read()}
        known = {**apart, **self.known}  # what is read from an array not given is another each time
        found: list[Numbers] = []
        for strip in self.strips:
            number = np.zeros(len(self.order), np.int64)
            for index in strip.first:
                value = np.broadcast_to(valued(index, known), len(number))
                number = number * (1 + value.max(initial=0)) + value
            found.append(number)
        return found

    @cached_property
    def apart(self) -> Mapping[str, float]:
        """Of each load, the share of what all SMs ask for at a time that is different."""
        wave = self.places * self.plan.cluster[1]
        firsts = [number[:wave] for number in self.asked]
        return {
            strip.op.label: len(np.unique(first)) / max(1, len(first))
            for strip, first in zip(self.strips, firsts, strict=True)
        }

    @cached_property
    def shared(self) -> float:
        """Of the bytes that are loaded, the share that several SMs ask for at a time: those come
        from DRAM to both parts of L2."""
        sizes = {s.op.label: float(s.bytes * np.sum(self._times(s))) for s in self.strips}
        apart = sum(size * self.apart[name] for name, size in sizes.items())
        return 1.0 - apart / (sum(sizes.values()) or 1.0)

    @cached_property
    def read(self) -> Mapping[str, float]:
        """Of each load, the share of what all SMs ask for at a time that L2 reads: what is
        different, and of the rest a part for each of them, as they do not ask at the same time."""
        again = self.machine.value("l2.read_again")
        return {name: apart + again * (1.0 - apart) for name, apart in self.apart.items()}

    @property
    def loaded(self) -> float:
        """Bytes that all tasks load, from wherever they lie."""
        return sum(
            float((strip.bytes * self._times(strip) * np.ones(len(self.order))).sum())
            for strip in self.strips
        )

    def _times(self, strip: Strip) -> Numbers:
        """How often each task loads it."""
        return np.prod([self.trips[n] for n in strip.loops], axis=0)

    @cached_property
    def traffic(self) -> float:
        """Bytes from and to DRAM: what a wave of tasks loads stays in L2 until as much was loaded
        after it as a partition holds, for every SM reads through its own partition."""
        cache = self.machine.value("l2.size") / self.machine.value("l2.partitions")
        whole = sum(float(once(one).sum()) for one in self._loaded)
        return self._moved(whole if whole <= cache else missed(self._loaded, cache))

    @cached_property
    def once(self) -> float:
        """Bytes from and to DRAM of an L2 that loses nothing: `traffic` is no less."""
        return self._moved(sum(float(once(one).sum()) for one in self._loaded))

    def _moved(self, loaded: float) -> float:
        """With the bytes that are stored, where the tasks that are followed load so many."""
        return len(self.order) * (loaded / max(1, self._followed) + self.frame.stored)

    @property
    def _followed(self) -> int:
        """Tasks whose loads are followed; the others load as much on average."""
        return min(len(self.order), WAVES * self.places * self.plan.cluster[1])

    @cached_property
    def _loaded(self) -> list[Asked]:
        """What waves of tasks ask for, load by load."""
        wave = self.places * self.plan.cluster[1]
        sizes = [
            strip.bytes * self._times(strip) * np.ones(len(self.order)) for strip in self.strips
        ]
        return [
            largest(key[: self._followed], size[: self._followed], wave)
            for key, size in zip(self.asked, sizes, strict=True)
        ]
