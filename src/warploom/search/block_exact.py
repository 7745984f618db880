"""Reschedule a basic block by constraint solving, against the timing model's latencies.

One warp's issue times are the variables: one instruction a cycle, every register distance and
scoreboard latency respected, pipes not oversubscribed; the makespan is minimised by CP-SAT and
several optimal orders are returned, because only a measurement can tell them apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from warploom.errors import ToolMissing
from warploom.sass.decode.kernel import Block, Kernel
from warploom.sass.flow.dependence import Hazard, dependences
from warploom.sass.flow.distances import key_of
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.timing.costs import hopper
from warploom.search.actions import Reorder

if TYPE_CHECKING:
    from warploom.search.game import Game

ORDERS: Final = 4
LARGEST: Final = 160
SECONDS: Final = 1.5
SMALLEST: Final = 4


@dataclass(frozen=True)
class BlockProblem:
    """One block's scheduling problem: instructions, order edges with delays, pipe occupancy."""

    block: int
    indices: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    occupancy: tuple[int, ...]
    pipes: tuple[str, ...]
    fixed: tuple[int, ...]


def solved_orders(game: Game, rng: random.Random) -> Iterator[Reorder]:
    """Reorders of the hottest blocks first, several optimal orders each."""
    kernel = game.kernel
    depth = depths(kernel, natural_loops(kernel))
    ranked = sorted(
        (block for block in kernel.blocks if SMALLEST <= block.size <= LARGEST),
        key=lambda block: (-depth[block.index], -block.size),
    )
    for block in ranked:
        problem = block_problem(game, kernel, block)
        for order in orders_of(problem, rng.randrange(1 << 30), ORDERS):
            if order != game.editor.states[block.index].order:
                yield Reorder(block.index, order)


def block_problem(game: Game, kernel: Kernel, block: Block) -> BlockProblem:
    """The problem of one block, in positions of its original order."""
    items = kernel.items(block)
    table = game.editor.table
    edges: dict[tuple[int, int], int] = {}

    def edge(first: int, second: int, delay: int) -> None:
        key = (first - block.start, second - block.start)
        edges[key] = max(edges.get(key, 1), delay)

    times = {item.index: 0 for item in items}
    now = 0
    for item in items:
        times[item.index] = now
        now += item.control.stall
    for dependence in dependences(items):
        earlier = kernel.instructions[dependence.earlier]
        later = kernel.instructions[dependence.later]
        original = times[later.index] - times[earlier.index]
        key = key_of(dependence, earlier, later)
        delay = 1 if key is None else max(1, table.gap(key, original))
        if earlier.effects.info.variable:
            result, sources = hopper().latency_of(earlier.effects.info.name)
            reads = dependence.hazard is Hazard.WAR
            timed = earlier.control.read_sb if reads else earlier.control.write_sb
            if timed < 7:
                delay = max(delay, sources if reads else result)
        edge(earlier.index, later.index, delay)
    for place, second in enumerate(items):
        for first in items[:place]:
            if game.editor.ordered(first.index, second.index):
                edge(first.index, second.index, 1)
    return BlockProblem(
        block=block.index,
        indices=tuple(item.index for item in items),
        edges=tuple((first, second, delay) for (first, second), delay in sorted(edges.items())),
        occupancy=tuple(hopper().occupancy[item.effects.info.pipe] for item in items),
        pipes=tuple(item.effects.info.pipe.value for item in items),
        fixed=tuple(place for place, item in enumerate(items) if item.pinned),
    )


def solve(problem: BlockProblem, seed: int, orders: int = ORDERS) -> list[tuple[int, ...]]:
    """Up to `orders` different orders with the least makespan found, as instruction indices.

    Raises `ToolMissing` when OR-Tools is not installed.
    """
    return list(orders_of(problem, seed, orders))


def orders_of(problem: BlockProblem, seed: int, orders: int) -> Iterator[tuple[int, ...]]:
    """Orders as `solve` finds them, one at a time: a search can measure between two."""
    try:
        cp_model: Any = import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise ToolMissing(
            "the block-exact player needs OR-Tools; install it with: pip install 'warploom[solver]'"
        ) from None
    found: set[tuple[int, ...]] = set()
    best: int | None = None
    for attempt in range(orders):
        result = _solve_once(cp_model, problem, seed + attempt, best)
        if result is None:
            break
        makespan, order = result
        best = makespan if best is None else best
        if order not in found:
            found.add(order)
            yield order


def _solve_once(
    cp_model: Any, problem: BlockProblem, seed: int, makespan: int | None
) -> tuple[int, tuple[int, ...]] | None:
    count = len(problem.indices)
    longest = sum(delay for *_, delay in problem.edges) + sum(problem.occupancy) + count
    horizon = makespan if makespan is not None else min(longest, 64 * count)
    model = cp_model.CpModel()
    start = [model.new_int_var(0, horizon, f"t{place}") for place in range(count)]
    model.add_all_different(start)
    for first, second, delay in problem.edges:
        model.add(start[second] >= start[first] + delay)
    by_pipe: dict[str, list[int]] = {}
    for place, pipe in enumerate(problem.pipes):
        by_pipe.setdefault(pipe, []).append(place)
    for places in by_pipe.values():
        if len(places) > 1 and problem.occupancy[places[0]] > 1:
            model.add_no_overlap(
                [
                    model.new_fixed_size_interval_var(
                        start[place], problem.occupancy[place], f"i{place}"
                    )
                    for place in places
                ]
            )
    for place in problem.fixed:
        # A pinned instruction keeps the number of instructions before it.
        for other in range(count):
            if other < place:
                model.add(start[other] < start[place])
            elif other > place:
                model.add(start[other] > start[place])
    end = model.new_int_var(0, horizon, "end")
    model.add_max_equality(end, start)
    if makespan is None:
        model.minimize(end)
    else:
        # Another optimal order: prefer a random direction among the ties.
        rng = random.Random(seed)
        model.minimize(sum(rng.choice((-1, 0, 1)) * variable for variable in start))
    for place, variable in enumerate(start):
        model.add_hint(variable, min(horizon, place))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed % (1 << 30)
    solver.parameters.max_time_in_seconds = SECONDS if makespan is None else SECONDS / 4
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    placed = sorted(range(count), key=lambda place: solver.value(start[place]))
    return int(solver.value(end)), tuple(problem.indices[place] for place in placed)
