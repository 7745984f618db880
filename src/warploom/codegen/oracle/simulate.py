"""The scheduled interpreter: a block program under random interleavings, with real barriers.

Every role of every block of one cluster is an agent; copies and matmuls complete at random times of
their own. A run is refused (`CheckFailed`) on a deadlock, a read of a slot that a copy may be
writing, a copy into a slot that is still read, a register touched while a matmul may use it, or a
barrier that counts wrongly. The result must equal the sequential interpreter's bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from warploom.codegen.analysis.cluster_reduce import shares
from warploom.codegen.analysis.grid import TASK_SLOTS, inside
from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.analysis.stores import store_paths
from warploom.codegen.ir.block import BlockProgram, Pipeline, Section, Straight, with_turns
from warploom.codegen.ir.steps import Fill, Issue, Join, Step, Wait
from warploom.codegen.oracle.barriers import (
    TURNING,
    Company,
    NamedBarrier,
    PhaseBarrier,
    TaskRing,
    arrivals_of,
)
from warploom.codegen.oracle.localise import localiser
from warploom.codegen.oracle.simulate_steps import Steps
from warploom.codegen.oracle.state import Agent, Matmul, SharedRing, Slot, Sums
from warploom.errors import CheckFailed
from warploom.tile.evaluate import Value
from warploom.tile.interpret import (
    bind,
    cluster_reductions,
    iteration_symbols,
    points,
    scalar_state,
    sizes,
    task_symbols,
)


class Simulator(Steps):
    """One cluster that does all tasks of a program; `run` interleaves it by a seed."""

    def __init__(
        self,
        block: BlockProgram,
        arrays: Mapping[str, Value],
        scalars: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.program = block.placement.program
        self.block, self.placement = block, block.placement
        self.local = localiser(block.placement)
        paths = store_paths(block.placement, block.launch, block.rings)
        self.late = {number for number, path in paths.items() if path.late}
        self.memory = bind(self.program, arrays)
        self.source = {name: value.copy() for name, value in self.memory.items()}
        self.symbols = sizes(self.program, self.memory)
        self.scalars = dict(scalars or {})
        self.sums = Sums()
        self.random = random.Random(seed)
        self.cluster = block.launch.cluster[1]
        self.rings = [self._rings(number) for number in range(self.cluster)]
        self.turns = [
            [NamedBarrier(f"turn of group {p}") for p in range(self.placement.parts)]
            for _ in range(self.cluster)
        ]
        self.copies: list[Any] = []
        reductions = cluster_reductions(self.program)
        readers = shares(reductions[0]) if reductions else 0
        self.company = [
            [
                Company(f"block {b} group {p}", self.cluster, readers)
                for p in range(self.placement.parts)
            ]
            for b in range(self.cluster)
        ]
        self.met = [[0] * self.placement.parts for _ in range(self.cluster)]
        self.rooms = [{} for _ in range(self.cluster)]
        self.handed = [
            TaskRing(f"block {n}", TASK_SLOTS, len(self.block.roles) - 1)
            for n in range(self.cluster)
        ]

    def run(self) -> dict[str, Value]:
        """Every array afterwards; raises `CheckFailed` at the first fault."""
        agents = [
            Agent(f"block {number} {role.name}", number, role)
            for number in range(self.cluster)
            for role in self.block.roles
        ]
        running = {id(agent): (agent, self._agent(agent)) for agent in agents}
        idle = 0
        while running:
            ready: list[Any] = [*running.values()]
            flying = [a for a in agents if a.flying]
            pick = self.random.randrange(len(ready) + len(flying) + len(self.copies))
            if pick < len(ready):
                agent, steps = ready[pick]
                moved = self._advance(running, agent, steps)
            elif pick < len(ready) + len(flying):
                moved = self._complete(flying[pick - len(ready)])
            else:
                moved = self._land(pick - len(ready) - len(flying))
            idle = 0 if moved else idle + 1
            if idle > 64 and self._stuck(running):
                raise CheckFailed(
                    "deadlock: "
                    + "; ".join(f"{a.name} waits for {a.waits_for}" for a, _ in running.values())
                )
        return self.memory

    # ---- scheduling of agents and events

    def _advance(self, running: dict[int, Any], agent: Agent, steps: Iterator[bool]) -> bool:
        try:
            return next(steps)
        except StopIteration:
            del running[id(agent)]
            return True

    def _stuck(self, running: dict[int, Any]) -> bool:
        if self.copies or any(agent.flying for agent, _ in running.values()):
            return False
        return not any(next(steps, True) for _, steps in running.values())

    def _rings(self, number: int) -> dict[str, SharedRing]:
        result: dict[str, SharedRing] = {}
        for ring in self.block.rings:
            crossing = any(
                is_multicast(self.program, self.block.launch, load)
                for buffer in ring.buffers
                for load in buffer.loads
            )
            arrivals = arrivals_of(self.block, ring) * (self.cluster if crossing else 1)
            fillers = TURNING if self.block.is_turned(ring) else 1
            result[ring.name] = SharedRing(
                ring,
                [Slot([None] * len(ring.buffers)) for _ in range(ring.depth)],
                [
                    PhaseBarrier(f"block {number} {ring.name} full[{s}]", fillers)
                    for s in range(ring.depth)
                ],
                [
                    PhaseBarrier(f"block {number} {ring.name} empty[{s}]", arrivals)
                    for s in range(ring.depth)
                ],
            )
        return result

    def _agent(self, agent: Agent) -> Iterator[bool]:
        """Steps of a role over all tasks; yields True after progress, False while it waits."""
        if self.block.pingpong and agent.role.part == self.placement.parts - 1:
            self.turns[agent.block][0].arrive()
        agent.tasks = list(self._tasks(agent.block))
        yield from self._next(agent)
        self._join(agent, Join())
        while agent.next is not None:
            symbols = agent.next
            kept = {name: agent.state[name] for name in self._carried(agent)}
            agent.state = {**scalar_state(self.program, self.scalars), **kept}
            for section in agent.role.sections:
                yield from self._section(agent, section, symbols)
            if not agent.role.ahead:
                yield from self._next(agent)

    def _next(self, agent: Agent) -> Iterator[bool]:
        """Take the next task, if there is one, and do what the role does ahead of it."""
        task = agent.count
        if self.block.launch.tile_scheduler == "dynamic":
            while (found := self._hand_over(agent, agent.count, len(agent.tasks))) is None:
                agent.waits_for = "the next task"
                yield False
            task = found
        agent.count += 1
        agent.next, agent.begun = None, set()
        if task < len(agent.tasks):
            symbols = {**self.symbols, **agent.tasks[task]}
            real = inside(self.program, self.block.launch, symbols)
            agent.next = task_symbols(self.program, self.source, symbols, real)
        if agent.role.ahead:
            yield from self._ahead(agent)

    def _ahead(self, agent: Agent) -> Iterator[bool]:
        """The steps ahead of the next task; those of its loop where that has an iteration. The
        matmul is started in any case: joins count it."""
        loop = next(s.loop for s in agent.role.sections if isinstance(s, Pipeline))
        inside = _rings_of(agent.role.sections)
        symbols, start, some = agent.next, 0, False
        if symbols is not None:
            start = loop.start.evaluate(symbols)
            some = loop.stop.evaluate(symbols) > start
        entered, agent.entered = agent.entered, {}  # slots are those waited for here
        for step in agent.role.ahead:
            own = {step.ring} & inside if isinstance(step, Wait) else set[str]()
            if isinstance(step, Issue) and not some:
                assert step.op.dst is not None
                agent.flying.append(Matmul(step.op, [], {step.op.dst.name}, {}, void=True))
            elif symbols is not None and (some or not own):
                yield from self._step(agent, step, {**symbols, loop.index: start})
                agent.begun |= own
        agent.entered = entered

    def _carried(self, agent: Agent) -> set[str]:
        """The tiles that a task finds as they were left for it."""
        if agent.flying:
            raise CheckFailed(f"{agent.name} goes on with {agent.flying[0].op.label} unfinished")
        starts = [step.op for step in agent.role.ahead if isinstance(step, Issue)]
        made = {op.dst.name for op in starts if op.dst is not None}
        return made & set(agent.state)

    def _hand_over(self, agent: Agent, count: int, last: int) -> int | None:
        # One block draws every task in order, and then once in vain.
        ring = self.handed[agent.block]
        if agent.role.loads:
            return min(count, last) if ring.give(count, min(count, last)) else None
        return ring.take(count)

    def _tasks(self, rank: int) -> Iterator[dict[str, int]]:
        axis, blocks = self.block.launch.cluster
        if blocks == 1:
            yield from points(self.program, self.symbols)
            return
        seen: set[tuple[int, ...]] = set()
        for point in points(self.program, self.symbols):
            first = {**point, axis: point[axis] // blocks * blocks}
            if tuple(first.values()) not in seen:
                seen.add(tuple(first.values()))
                yield {**first, axis: first[axis] + rank}

    def _section(self, agent: Agent, section: Section, symbols: dict[str, int]) -> Iterator[bool]:
        if isinstance(section, Straight):
            for step in section.steps:
                yield from self._step(agent, step, symbols)
            return
        assert isinstance(section, Pipeline), "only a block program after all passes runs"
        loop, depth = section.loop, section.depth
        start, end = loop.start.evaluate(symbols), loop.stop.evaluate(symbols)
        stop = end
        if agent.role.computes:
            stop = self._own_end(agent, section, start, end, symbols)
        rounds: list[tuple[tuple[Step, ...], int]] = []
        if stop - start >= depth:
            rounds += [(steps, start + i) for i, steps in enumerate(section.prologue)]
            rounds += [(section.steady, i) for i in range(start + depth, stop)]
            rounds += [(steps, max(start, stop) + i) for i, steps in enumerate(section.epilogue)]
        else:
            rounds += [(section.plain, i) for i in range(start, stop)]
        if stop <= start:
            rounds.append((section.none, start))
        rounds += [(section.skip, i) for i in range(max(start, stop), end)]
        if stop <= start < end:
            rounds.append((section.empty, start))
        local = {step.ring for step in section.steady if isinstance(step, Wait)}
        agent.entered = {
            n: (loop.index, start, agent.taken.get(n, 0) - (n in agent.begun)) for n in local
        }
        for steps, newest in rounds:
            for step, done in with_turns(self.placement, steps):
                here = newest - step.stage
                if done and not self.placement.does(done, agent.role.part, here - start):
                    continue
                known = {**symbols, loop.index: here}
                if isinstance(step, Fill) and agent.role.loads:
                    real = inside(self.program, self.block.launch, symbols)
                    known = iteration_symbols(loop, self.source, symbols, here, real)
                agent.iteration = here - start
                yield from self._step(agent, step, known)
        agent.entered = {}

    def _own_end(
        self, agent: Agent, section: Pipeline, start: int, end: int, symbols: dict[str, int]
    ) -> int:
        """Where this group's part of a loop ends."""
        until = self.placement.until(section.loop)
        if until is None:
            return end
        size, split = self.placement.part_size, self.placement.split
        first = agent.role.part * size
        own = until.evaluate({**symbols, f"{split}.begin": first, f"{split}.end": first + size})
        return max(start, min(end, own))


def _rings_of(sections: tuple[Section, ...]) -> set[str]:
    """The rings that loops take slots of."""
    steady = [step for s in sections if isinstance(s, Pipeline) for step in s.steady]
    return {step.ring for step in steady if isinstance(step, Wait)}


def simulate(
    block: BlockProgram,
    arrays: Mapping[str, Value],
    scalars: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, Value]:
    """Run a block program once under the interleaving that `seed` draws."""
    return Simulator(block, arrays, scalars, seed).run()
