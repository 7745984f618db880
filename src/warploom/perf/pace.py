"""How fast the steady state of a block program runs: every warp group walked step by step.

What is walked is the form that is emitted (`ir.block`), so a named schedule and a solved one
follow the same rules, and what the emitted code does besides its schedule is in it: the release of
a slot after the join of its reader, the hand-over of turns, the wait that ptxas moves up. The
machine around the steps:

    tensor core     one matmul after the other, in the order they were issued; the group that
                    issues waits while more than `mma.queue` instructions are unfinished.
                    Arithmetic beside a matmul takes bandwidth from it: every issue slot delays it
                    by `mma.beside`, and arithmetic itself takes `lanes.beside` or `mufu.beside`
                    times as long: the least measured, as that was beside a tensor core that never
                    ran dry
    other pipes     fp32 lanes, half-rate lanes and special functions serve both groups in pieces,
                    first come first served
    arithmetic      in program order; an op begins when its sources' first results are there, since
                    the compiler interleaves (the delays of `perf.extract`)
    loads           one thread issues; a load takes `load.latency` and its turn on the SM's link,
                    whose rate is the one with every SM loading at once
    barriers        a poll when complete, `barrier.wait` from the arrival of another group

Costs are those of the table (measured: bench/calibrate_schedule.py); nothing here knows a kernel.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from math import ceil

from warploom.codegen.cuda.emit_tma import is_multicast
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role
from warploom.codegen.ir.steps import (
    Acquire,
    Ahead,
    Fill,
    Issue,
    Join,
    Publish,
    Release,
    Run,
    Step,
    TurnPass,
    TurnWait,
    Wait,
)
from warploom.errors import CheckFailed
from warploom.perf.contend import slowdown
from warploom.schedule.model.costs import CostTable
from warploom.schedule.model.graph import Graph, Node

PIECE = 64  # cycles of a pipe that an op holds at a time
STEP = 16  # elements of depth of one wgmma, 16-bit types
KIB = 1024
BOX = 128  # bytes of a row that one copy instruction brings
TENSOR = "TC"
PIPES = ("ALU", "HALF", "SFU")

Agent = Generator[float | None, None, None]  # moments it wants to go on at; None: blocked


@dataclass
class _Matmul:
    """One product in the tensor core, or waiting for it; the others may still delay it."""

    begin: float
    end: float
    latency: float
    instruction: float  # cycles of one of its wgmma

    @property
    def done(self) -> float:
        """When its result can be read."""
        return self.end + self.latency


@dataclass
class _Shared:
    """What the agents of a block share."""

    pipes: dict[str, float] = field(default_factory=dict[str, float])
    matmuls: list[_Matmul] = field(default_factory=list["_Matmul"])
    alone: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    link: float = 0.0
    full: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    freed: dict[str, dict[int, list[float]]] = field(
        default_factory=dict[str, dict[int, list[float]]]
    )
    turns: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def tensor_free(self) -> float:
        """When the tensor core is done with everything issued so far."""
        return self.matmuls[-1].end if self.matmuls else 0.0

    def disturb(self, now: float, cycles: float) -> bool:
        """Arithmetic at `now` takes register bandwidth from the matmul that runs then, if any."""
        late = [one for one in self.matmuls if one.end > now]
        if not late or late[0].begin > now:
            self.alone.append((now, cycles))
            return False
        for one in late:
            one.begin += cycles if one.begin > now else 0.0
            one.end += cycles
        return True

    def issue(self, one: _Matmul) -> None:
        """A matmul enters the queue; arithmetic whose cycles it covers was walked before it."""
        left = sorted(item for item in self.alone if item[0] >= one.begin)
        while left and left[0][0] < one.end:
            one.end += left.pop(0)[1]
        self.alone = left
        self.matmuls.append(one)

    def releases(self, ring: str, use: int) -> list[float]:
        """When the groups gave back a slot after its use of that number."""
        return self.freed.setdefault(ring, {}).setdefault(use, [])


def pace(
    block: BlockProgram,
    loop: str,
    graph: Graph,
    costs: CostTable,
    iterations: int,
    late: float = 0.0,
) -> float:
    """Cycles an iteration of one loop, over the second half of `iterations`.

    `graph` is the loop's (`perf.extract`); each compute group begins `late` cycles after the one
    before. Raises `CheckFailed` when the walk comes to a halt.
    """
    return _Walk(block, loop, graph, costs, iterations, late).run()


class _Walk:
    def __init__(
        self,
        block: BlockProgram,
        loop: str,
        graph: Graph,
        costs: CostTable,
        iterations: int,
        late: float,
    ) -> None:
        self.late = late
        self.block, self.loop, self.graph, self.costs = block, loop, graph, costs
        self.iterations = iterations
        self.shared = _Shared()
        self.plan = block.launch
        self.parts = block.placement.parts
        self.ends: dict[int, list[float]] = {part: [] for part in range(self.parts)}
        self.shared.turns = {part: [] for part in range(self.parts)}
        self.shared.turns[0].append(0.0)

    def run(self) -> float:
        agents: list[Agent] = []
        for role in self.block.roles:
            section = self._section(role)
            agents.append(
                self._producer(section) if role.loads else self._consumer(role.part, section)
            )
        self._race(agents)
        return max(
            (ends[-1] - ends[len(ends) // 2]) / (len(ends) - 1 - len(ends) // 2)
            for ends in self.ends.values()
        )

    def _section(self, role: Role) -> Pipeline:
        return next(
            s for s in role.sections if isinstance(s, Pipeline) and s.loop.index == self.loop
        )

    def _race(self, agents: list[Agent]) -> None:
        """Let the agent go on whose moment is the earliest; the blocked ones are asked again."""
        moments: list[float | None] = [0.0] * len(agents)
        left = set(range(len(agents)))
        while left:
            for number in sorted(left):
                if moments[number] is None:
                    moments[number] = next(agents[number])
            ready = [(m, n) for n in left if (m := moments[n]) is not None]
            if not ready:
                if all(len(ends) >= self.iterations for ends in self.ends.values()):
                    return
                raise CheckFailed(f"{self.graph.name}: the walk halts, every group is waiting")
            _, number = min(ready)
            try:
                moments[number] = next(agents[number])
            except StopIteration:
                left.discard(number)

    # ---- the producer

    def _producer(self, section: Pipeline) -> Agent:
        now, costs = 0.0, self.costs
        uses: dict[str, int] = {}
        for _ in range(self.iterations + section.depth + 8):
            for step in section.steady:
                if isinstance(step, Acquire):
                    ring = step.ring
                    use = uses.get(ring, 0)
                    before = use - self.block.ring(ring).depth
                    while before >= 0 and len(self.shared.releases(ring, before)) < self.parts:
                        yield None
                    if before >= 0:
                        wake = max(self.shared.releases(ring, before)) + costs.value("barrier.wait")
                        now = max(now + costs.value("barrier.poll"), wake)
                    yield now
                    complete = now
                elif isinstance(step, Fill):
                    now, complete = self._fill(step, now)
                    slots = self.shared.full.setdefault(step.ring, [])
                    use = uses.get(step.ring, 0)
                    if len(slots) <= use:
                        slots.append(complete)
                    slots[use] = max(slots[use], complete)
                elif isinstance(step, Publish):
                    uses[step.ring] = uses.get(step.ring, 0) + 1
                    yield now

    def _fill(self, step: Fill, now: float) -> tuple[float, float]:
        """The thread's time after the copies of one tile, and when the tile is there."""
        assert step.op.dst is not None
        costs, kind = self.costs, step.op.dst.type
        size = self.block.home(step.op.dst.name)[1].tile.bytes
        if is_multicast(self.block.placement.program, self.plan, step.op):
            size //= self.plan.cluster[1]
        row = kind.shape[-1] * kind.dtype.bytes
        for _ in range(max(1, ceil(row / BOX))):
            now += costs.value("load.issue")
        begin = max(now, self.shared.link)
        self.shared.link = begin + size / KIB * costs.value("load.per_kib_all")
        return now, self.shared.link + costs.value("load.latency")

    # ---- a group of consumers

    def _consumer(self, part: int, section: Pipeline) -> Agent:
        group = _Group(self, part, section)
        for iteration, steps in enumerate(section.prologue):
            yield from group.steps(as_compiled(steps), iteration)
        steady = as_compiled(section.steady)
        for iteration in range(section.depth, section.depth + self.iterations):
            yield from group.steps(steady, iteration)
            self.ends[part].append(group.now)


class _Group:
    """One warp group: its clock, what it has in flight, when its results are there."""

    def __init__(self, walk: _Walk, part: int, section: Pipeline) -> None:
        self.walk, self.part, self.section = walk, part, section
        self.shared, self.costs = walk.shared, walk.costs
        self.now = part * walk.late
        self.flight: list[_Matmul] = []
        self.begun: dict[tuple[str, int], tuple[float, float]] = {}  # start, cycles it was held up
        self.issued = 0.0  # when the last instruction of the arithmetic so far has issued
        self.uses: dict[str, int] = {}
        self.oldest: dict[str, int] = {}

    def steps(self, steps: tuple[Step, ...], newest: int) -> Agent:
        for step in steps:
            iteration = newest - step.stage
            yield self.now
            match step:
                case Wait():
                    yield from self._wait(step.ring)
                case Issue():
                    yield from self._issue(step, iteration)
                case Join():
                    yield from self._join(step)
                case Run():
                    yield from self._run(step, iteration)
                case Release():
                    use = self.oldest.get(step.ring, 0)
                    self.oldest[step.ring] = use + 1
                    self.shared.releases(step.ring, use).append(self.now)
                case TurnWait():
                    while not self.shared.turns[self.part]:
                        yield None
                    given = self.shared.turns[self.part].pop(0)
                    self.now = max(self.now, given + self.costs.value("barrier.named"))
                case TurnPass():
                    self.shared.turns[(self.part + 1) % self.walk.parts].append(self.now)
                case Ahead() | Acquire() | Fill() | Publish():
                    pass  # between tasks; the producer's

    def _node(self, step: Issue | Run) -> Node:
        return self.walk.graph.by_id[f"{step.op.label}/{self.part}"]

    def _wait(self, ring: str) -> Agent:
        use = self.uses.get(ring, 0)
        self.uses[ring] = use + 1
        while len(self.shared.full.get(ring, [])) <= use:
            yield None
        self.now = max(self.now + self.costs.value("barrier.poll"), self.shared.full[ring][use])

    def _ready(self, node: Node, iteration: int) -> float:
        """When the first operands of an op are there."""
        moment = self.now
        for edge in self.walk.graph.incoming[node.id]:
            source = self.walk.graph.by_id[edge.src]
            key = (edge.src, iteration - edge.distance)
            if source.asynchronous or key not in self.begun:
                continue  # joins and rings see to those
            start, held = self.begun[key]
            moment = max(moment, start + held + edge.delay)
        return moment

    def _issue(self, step: Issue, iteration: int) -> Agent:
        node, costs = self._node(step), self.costs
        busy = next(use.cycles for use in node.uses if use.unit == TENSOR)
        depth = step.op.srcs[0].type.shape[-1]
        # Instructions issue in order: the matmul's after those of the arithmetic before it.
        start = max(self._ready(node, iteration), self.issued)
        if start > self.now:
            yield start
        begin = max(start + costs.value("mma.issue"), self.shared.tensor_free())
        one = _Matmul(begin, begin + busy, node.latency - busy, busy / max(1, ceil(depth / STEP)))
        self.shared.issue(one)
        self.flight.append(one)
        self.begun[node.id, iteration] = (start, 0.0)
        self.now = start + costs.product_issue(depth)
        # The last instructions issue when there is room for them in the queue.
        while (room := one.end - costs.value("mma.queue") * one.instruction) > self.now:
            self.now = room
            yield self.now

    def _join(self, step: Join) -> Agent:
        self.now = max(self.now, self.issued)
        while len(self.flight) > step.count:
            first = self.flight.pop(0)
            while first.done > self.now:
                self.now = first.done
                yield self.now

    def _run(self, step: Run, iteration: int) -> Agent:
        node = self._node(step)
        start = self._ready(node, iteration)
        if start > self.now:
            yield start
        uses = [(use.unit, use.cycles) for use in node.uses if use.unit in PIPES]
        pieces = max(1, max((ceil(cycles / PIECE) for _, cycles in uses), default=1))
        at, slow = start, slowdown(node, self.costs.at("low"))
        for piece in range(pieces):
            if piece:
                yield at
            begin = max([at, *(self.shared.pipes.get(unit, 0.0) for unit, _ in uses)])
            taken = self.costs.value("mma.beside") * node.issue / pieces
            times = slow if self.shared.disturb(begin, taken) else 1.0
            for unit, cycles in uses:
                self.shared.pipes[unit] = begin + cycles / pieces * times
            at = begin + times * max((cycles / pieces for _, cycles in uses), default=0.0)
        busy = max((cycles for _, cycles in uses), default=0)
        held = at - start - busy
        self.begun[node.id, iteration] = (start, held)
        self.issued = max(self.issued, at)
        self.now = max(self.now, start) + node.issue


def as_compiled(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps as machine code has them.

    ptxas puts a join, and a release after it, right behind the wait, matmul or signal
    before: neither has a register that arithmetic would write.
    """
    result: list[Step] = []
    for step in steps:
        place = len(result)
        while isinstance(step, Join | Release) and place and isinstance(result[place - 1], Run):
            place -= 1
        result.insert(place, step)
    return tuple(result)
