"""Block-exact: optimal against brute force on small problems, legal problems from real blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from warploom.sass.decode.cubin import Cubin
from warploom.search.block_exact import BlockProblem, block_problem, solve
from warploom.search.game import Game


def makespan(problem: BlockProblem, order: tuple[int, ...]) -> int | None:
    """The last issue time of an order when everything issues as early as it can; None: illegal."""
    place_of = {index: place for place, index in enumerate(problem.indices)}
    sequence = [place_of[index] for index in order]
    rank = {place: number for number, place in enumerate(sequence)}
    if any(rank[first] > rank[second] for first, second, _ in problem.edges):
        return None
    if any(rank[place] != place for place in problem.fixed):
        return None
    time: dict[int, int] = {}
    free: dict[str, int] = {}
    now = -1
    for place in sequence:
        pipe = problem.pipes[place]
        ready = [time[first] + delay for first, second, delay in problem.edges if second == place]
        now = max(now + 1, free.get(pipe, 0), *ready, 0)
        time[place] = now
        free[pipe] = now + problem.occupancy[place]
    return now


def random_problem(rng: random.Random) -> BlockProblem:
    """Six or seven instructions over two pipes."""
    count = rng.randint(6, 7)
    edges = tuple(
        (first, second, rng.randint(1, 9))
        for first, second in itertools.combinations(range(count), 2)
        if rng.random() < 0.3
    )
    cost = {"alu": 2, "fma": 1, "xu": 4}
    pipes = tuple(rng.choice(sorted(cost)) for _ in range(count))
    return BlockProblem(
        block=0,
        indices=tuple(range(10, 10 + count)),
        edges=edges,
        occupancy=tuple(cost[pipe] for pipe in pipes),
        pipes=pipes,
        fixed=(count - 1,) if rng.random() < 0.5 else (),
    )


@pytest.mark.parametrize("seed", range(12))
def test_optimal_against_brute_force(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    every = (makespan(problem, order) for order in itertools.permutations(problem.indices))
    best = min(found for found in every if found is not None)
    orders = solve(problem, seed, orders=3)
    assert orders
    assert len(set(orders)) == len(orders)
    for order in orders:
        assert sorted(order) == sorted(problem.indices)
        assert makespan(problem, order) == best


def test_real_blocks_keep_order_and_pins(cubin_of: Callable[[str], Cubin]) -> None:
    game = Game(cubin_of("triton_rmsnorm_2x4096_w8_s2_sm90"))
    blocks = [block for block in game.kernel.blocks if 6 <= block.size <= 60]
    assert blocks
    for block in blocks[:3]:
        problem = block_problem(game, game.kernel, block)
        assert makespan(problem, problem.indices) is not None, "the original order is legal"
        (order, *_) = solve(problem, 1, orders=1)
        found = makespan(problem, order)
        assert found is not None
        assert found <= (makespan(problem, problem.indices) or 0)
