"""The evolutionary player: a population of schedules, crossed in order and mutated by moves.

Steady state: two parents win small tournaments, their child replaces the worst of the population
when it is better. The crossover works on priorities, as in scheduling by genetic algorithms: where
one block's orders differ, each instruction takes its place in one parent or the other as its
priority, and the block is listed by least priority among the instructions whose predecessors are
out. So a child keeps the order that registers, memory and barriers ask for, whatever the mixture;
control fields are re-derived and the verifier decides. Mutations are the game's own moves.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.control import Control
from warploom.sass.edit.rederive import BlockState
from warploom.search.actions import Reorder
from warploom.search.game import Candidate, Game, Refusal, Snapshot
from warploom.search.play import Play, next_legal, opening

FAILED: Final = 0.0


@dataclass(frozen=True)
class Evolution:
    """Parameters. `segments`: cut points of a block's crossover, so that neighbours stay together.

    `mutations`: game moves a child gets at most; `restless`: children without a new best after
    which the worse half of the population starts again from mutants of the best.
    """

    population: int = 16
    tournament: int = 3
    segments: int = 3
    mutations: int = 4
    crossed: float = 0.6
    restless: int = 240


@dataclass(frozen=True)
class _Member:
    state: Snapshot
    speedup: float


class _Precedence:
    """Which instructions of a block must stay before which, read once from the editor's rules."""

    def __init__(self, game: Game) -> None:
        self._game = game
        self._blocks: dict[int, list[tuple[int, int]]] = {}

    def pairs(self, block: int) -> list[tuple[int, int]]:
        """(earlier, later) pairs of one block, pinned instructions against all others."""
        found = self._blocks.get(block)
        if found is None:
            kernel, editor = self._game.kernel, self._game.editor
            shape = kernel.blocks[block]
            members = range(shape.start, shape.end)
            found = [
                (first, second)
                for second in members
                for first in range(shape.start, second)
                if kernel.instructions[first].pinned
                or kernel.instructions[second].pinned
                or editor.ordered(first, second)
            ]
            self._blocks[block] = found
        return found


def listed(priority: dict[int, float], pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The order of least priority first that keeps every (earlier, later) pair."""
    waiting = dict.fromkeys(priority, 0)
    following: dict[int, list[int]] = {index: [] for index in priority}
    for earlier, later in pairs:
        waiting[later] += 1
        following[earlier].append(later)
    ready = [(priority[index], index) for index, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for later in following[index]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (priority[later], later))
    return tuple(order)


def evolve(game: Game, rng: random.Random, settings: Evolution | None = None) -> Play:
    """Play until the driver stops asking; a seed fixes the game."""
    chosen = settings or Evolution()
    precedence = _Precedence(game)
    members = [_Member(game.snapshot(), (yield from opening(game)))]
    idle = 0
    while True:
        if len(members) < chosen.population:
            game.restore(members[0].state)
            candidate = _mutated(game, rng, rng.randint(1, 2 * chosen.mutations))
        else:
            first, second = (_selected(members, rng, chosen.tournament) for _ in range(2))
            game.restore(first.state)
            if rng.random() < chosen.crossed:
                _cross(game, first.state, second.state, precedence, rng, chosen.segments)
            candidate = _mutated(game, rng, rng.randint(1, chosen.mutations))
        if candidate is None:
            return
        state = game.snapshot()
        score = yield candidate
        child = _Member(state, score.speedup if score.outcome == "ok" else FAILED)
        idle = 0 if child.speedup > members[0].speedup else idle + 1
        if child.speedup > FAILED:
            members.append(child)
            members.sort(key=lambda member: -member.speedup)
            del members[chosen.population :]
        if idle > chosen.restless:
            idle = 0
            del members[chosen.population // 2 :]


def _mutated(game: Game, rng: random.Random, count: int) -> Candidate | None:
    """Take up to `count` legal moves; the state after the last, None when there was none."""
    candidate: Candidate | None = None
    for _ in range(count):
        found = next_legal(game, rng)
        if found is None:
            return candidate
        candidate = found
    return candidate


def _selected(members: list[_Member], rng: random.Random, size: int) -> _Member:
    return max(rng.sample(members, min(size, len(members))), key=lambda member: member.speedup)


def _cross(
    game: Game,
    first: Snapshot,
    second: Snapshot,
    precedence: _Precedence,
    rng: random.Random,
    segments: int,
) -> None:
    """Change the game from the first parent to a child of both, block by block.

    A block whose mixture the verifier refuses stays the first parent's.
    """
    for block, (mine, other) in enumerate(zip(first.states, second.states, strict=True)):
        if mine is other:
            continue
        if mine.order == other.order or rng.random() < 0.5:
            if rng.random() < 0.5:
                _adopt(game, block, other)
            continue
        priority = _mixed(mine.order, other.order, rng, segments)
        order = listed(priority, precedence.pairs(block))
        wishes = {**mine.wishes, **other.wishes} if rng.random() < 0.5 else dict(mine.wishes)
        _adopt(game, block, BlockState(order, wishes, False))


def _mixed(
    mine: tuple[int, ...], other: tuple[int, ...], rng: random.Random, segments: int
) -> dict[int, float]:
    """Places in one parent or the other, by runs of the first parent's order."""
    places = {index: place for place, index in enumerate(other)}
    cuts = sorted(rng.randrange(len(mine) + 1) for _ in range(segments))
    take = rng.random() < 0.5
    priority: dict[int, float] = {}
    for place, index in enumerate(mine):
        while cuts and place >= cuts[0]:
            cuts.pop(0)
            take = not take
        priority[index] = float(places[index] if take else place)
    return priority


def _adopt(game: Game, block: int, state: BlockState) -> None:
    """Give a block a state when the verifier lets it; otherwise it stays as it is."""
    before: tuple[BlockState, tuple[Control, ...]] = (
        game.editor.states[block],
        game.editor.controls(block),
    )
    game.editor.states[block] = BlockState(before[0].order, state.wishes, state.kept)
    if isinstance(game.apply(Reorder(block, state.order)), Refusal):
        game.editor.restore(block, *before)
