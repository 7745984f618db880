"""Tasks of a launch as arrays: their numbers in the order of a plan, symbols that have a value for
every task, the cycles of each, and when the last one has ended."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.ir.plan import LaunchPlan
from warploom.perf.replay import Ends, Prediction
from warploom.tile import Index
from warploom.tile.index import FOLD

WAVES = 256  # rounds of tasks that are followed one by one: others are as these are on average
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
