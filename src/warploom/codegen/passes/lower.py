"""Lowering: (program, kernel schedule) -> block program.

The schedule says when and where every op runs; from it follow, by rule and without choice: the
order of steps in a role, what is started ahead, the waits on rings before the first reader, the
releases when the last reader is done, the joins (`analysis.hazards`) and the turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from warploom.codegen.analysis.hazards import (
    Effects,
    Queue,
    insert_joins,
    join_all,
    join_down,
    join_read,
    next_iteration,
)
from warploom.codegen.ir.block import BlockProgram, Pipeline, Ring, Role, Straight
from warploom.codegen.ir.place import Placement, place, sections
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import (
    Issue,
    OpStep,
    Release,
    Run,
    Step,
    TurnPass,
    TurnWait,
    Wait,
    start_of,
)
from warploom.codegen.passes.copies import expandable
from warploom.codegen.passes.lower_loader import loader_role
from warploom.codegen.passes.order import check_order
from warploom.codegen.passes.overlap import overlap_next_task
from warploom.codegen.passes.pingpong import node_of, require_group, turn_runs, with_turns
from warploom.codegen.passes.rings import local_rings, make_rings
from warploom.errors import InputError
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Loop, Op, Program

EMPTY: frozenset[Queue] = frozenset({()})
Timed = tuple[int, int, Issue | Run | Release]


def lower(program: Program, schedule: KernelSchedule) -> BlockProgram:
    """The block program; raises `InputError` where the schedule does not fit the program."""
    parts = len(schedule.compute)
    if parts == 0:
        raise InputError(f"schedule {schedule.name} has no compute group, expected at least one")
    overlap = schedule.launch.overlap_next_task
    placement = replace(place(program, schedule.launch.split, parts), whole=overlap)
    missing = [loop.index for loop in program.loops() if loop.index not in schedule.loops]
    if missing:
        raise InputError(
            f"schedule {schedule.name} says nothing about loop {missing[0]!r} of {program.name}; "
            f"it schedules {sorted(schedule.loops)}"
        )
    rings = make_rings(placement, schedule)
    groups = schedule.any_loop.groups
    roles = [loader_role(placement, schedule, rings, groups[0].warps, groups[0].registers)]
    for part, group in enumerate(groups[1:]):
        lowered = _Compute(placement, schedule, rings, part)
        role = Role(group.name, group.warps, group.registers, lowered.sections(), part)
        if overlap:
            ahead, body = overlap_next_task(
                placement, role.sections, rings, lowered.effects.readers
            )
            role = replace(role, sections=body, ahead=ahead)
        roles.append(role)
    return BlockProgram(placement, schedule, rings, tuple(roles))


class _Compute:
    """Lowers the sections of one compute group."""

    def __init__(
        self, placement: Placement, schedule: KernelSchedule, rings: tuple[Ring, ...], part: int
    ) -> None:
        self.placement, self.schedule, self.rings, self.part = placement, schedule, rings, part
        self.ops = {op.id: op for op in placement.program.ops()}
        self.home = {name: ring for ring in rings for b in ring.buffers for name in b.names}
        readers: dict[str, frozenset[int]] = {
            ring.name: frozenset(
                op.id
                for op in self.ops.values()
                if op.kind == "mma" and any(self.home.get(v.name) is ring for v in op.srcs)
            )
            for ring in rings
        }
        copies = [copies_of(placement, schedule, loop) for loop in placement.program.loops()]
        together = {name: count for one in copies for name, count in one.items()}
        self.effects = Effects(placement, self.ops, readers, together)

    def sections(self) -> tuple[Straight | Pipeline, ...]:
        """The role's sections."""
        result: list[Straight | Pipeline] = []
        waited: set[str] = set()
        parts = sections(self.placement.program)
        for number, section in enumerate(parts):
            ops = self._own(section.body if isinstance(section, Loop) else section)
            outer = self._outer_waits(section, ops, waited)
            if outer:
                result.append(Straight(tuple(outer)))
            released = self._outer_releases(parts, number, waited)
            if isinstance(section, Loop):
                result += self._loop(section, ops, released)
            else:
                steps, queues = insert_joins(self.effects, self._straight(ops), EMPTY)
                result.append(Straight((*steps, *join_all(self.effects, queues)[0])))
                result += [Straight(tuple(released))] if released else []
        return tuple(result)

    def _own(self, items: Sequence[Op | Loop]) -> list[Op]:
        return [
            op
            for op in items
            if isinstance(op, Op)
            and op.id in self.placement.fusion.kept
            and not (op.kind == "load" and op.dst and self.placement.is_shared(op.dst))
        ]

    def _rings_of(self, op: Op) -> list[Ring]:
        found = [self.home[var.name] for var in op.srcs if var.name in self.home]
        return list(dict.fromkeys(found)) if op.kind == "mma" else []

    def _local_rings(self, section: Loop | tuple[Op, ...]) -> set[str]:
        body = section.body if isinstance(section, Loop) else section
        names = {op.dst.name for op in body if isinstance(op, Op) and op.dst}
        return {self.home[name].name for name in names if name in self.home}

    def _outer_waits(
        self, section: Loop | tuple[Op, ...], ops: Sequence[Op], waited: set[str]
    ) -> list[Step]:
        # Rings filled once a task, read here for the first time.
        local = self._local_rings(section) if isinstance(section, Loop) else set[str]()
        steps: list[Step] = []
        for op in ops:
            for ring in self._rings_of(op):
                if ring.name not in local and ring.name not in waited:
                    waited.add(ring.name)
                    steps.append(Wait(ring.name))
        return steps

    def _outer_releases(
        self, parts: Sequence[Loop | tuple[Op, ...]], number: int, waited: set[str]
    ) -> list[Release]:
        # The slot of a task's ring goes after the last section that reads it.
        later: set[str] = set()
        for section in parts[number + 1 :]:
            body = section.body if isinstance(section, Loop) else section
            later |= {ring.name for op in self._own(body) for ring in self._rings_of(op)}
            over = self.home.get(self.schedule.launch.store_over)
            if over is not None and any(op.kind.startswith("store") for op in self._own(body)):
                later.add(over.name)  # stores go through its slot
        done = sorted(waited - later)
        waited.difference_update(done)
        return [Release(name) for name in done]

    def _straight(self, ops: Sequence[Op]) -> list[Step]:
        return [start_of(op) for op in ops]

    def _loop(
        self, loop: Loop, ops: Sequence[Op], released: Sequence[Release]
    ) -> list[Straight | Pipeline]:
        schedule = self.schedule.loops[loop.index]
        group = self.schedule.compute[self.part]
        times: dict[int, int] = {}
        for op in ops:
            node = node_of(schedule, op, self.part)
            require_group(schedule, node, group)
            times[op.id] = schedule.time[node]
        timed: list[Timed] = [(times[op.id], 0, start_of(op)) for op in ops]
        timed += self._releases(loop, schedule, times)
        interval = schedule.initiation_interval
        steps = self._rotated(loop, timed, times, interval)
        stage = {s.op.id: s.stage for s in steps if isinstance(s, OpStep)}
        rank = {s.op.id: place for place, s in enumerate(steps) if isinstance(s, OpStep)}
        check_order(self.placement, ops, stage, rank, self.effects.copies)
        steady = self._waits(self._local_rings(loop), steps)
        self._check_depths(loop, steady)
        plain = self._waits(self._local_rings(loop), self._plain(loop, ops))
        early = [step for step in released if self._goes_early(steady, step.ring)]
        pipeline = self._early_end(loop, self._pipeline(loop, steady, plain, early))
        copies = copies_of(self.placement, self.schedule, loop)
        rest = tuple(step for step in released if step not in early)
        return [replace(pipeline, copies=copies), *([Straight(rest)] if rest else [])]

    def _goes_early(self, steady: Sequence[Step], ring: str) -> bool:
        """Whether a task's slot goes before the matmuls that end its last loop: none reads it."""
        behind = {step.op.id for step in steady if isinstance(step, OpStep) and step.stage > 0}
        return (
            self.schedule.launch.early_release
            and max(step.stage for step in steady) == 1
            and not behind & self.effects.readers[ring]
        )

    def _rotated(
        self,
        loop: Loop,
        timed: Sequence[Timed],
        times: Mapping[int, int],
        interval: int,
    ) -> list[Step]:
        """The steps of one interval, from the op on at which the role's iteration begins.

        An interval has no beginning; the role's own first op is one, unless matmuls are unfinished
        there and another op has fewer: ptxas follows matmuls over the back edge of a loop only when
        nothing reads their results, and serialises them otherwise (C7514).
        """

        def begin_at(start: int) -> list[Step]:
            order = sorted(timed, key=lambda item: ((item[0] - start) % interval, item[1]))
            least = min((time - start) // interval for time, _, _ in timed)
            return [step.at((time - start) // interval - least) for time, _, step in order]

        def key(start: int) -> tuple[int, int, int]:
            steps = begin_at(start)
            queues = insert_joins(self.effects, self._turns(loop, steps), EMPTY)[1]
            unfinished = max(len(queue) for queue in queues)
            return unfinished, max(step.stage for step in steps), start

        first = min(times.values())
        if key(first)[0] == 0:
            return begin_at(first)
        return begin_at(min(times.values(), key=key))

    def _steady(
        self, loop: Loop, steady: Sequence[Step], queues: frozenset[Queue] = EMPTY
    ) -> tuple[tuple[Step, ...], frozenset[Queue], frozenset[Queue]]:
        """One interval with its joins, and the queues possible before and after it."""
        entries = queues
        while True:
            block, flying = insert_joins(self.effects, self._turns(loop, steady), entries)
            # ptxas does not follow a matmul over the back edge to the op that reads its result.
            last, exits = join_read(self.effects, flying, self._read_outside(loop))
            grown = entries | next_iteration(exits)
            if grown == entries:
                return (*block, *last), entries, exits
            entries = grown

    def _read_outside(self, loop: Loop) -> frozenset[str]:
        """Tiles of the loop that an op other than a matmul touches."""
        touched: set[str] = set()
        for op in loop.body:
            if isinstance(op, Op) and op.kind != "mma" and op.id in self.placement.fusion.kept:
                touched |= {var.name for var in self.placement.fusion.sources(op)}
                touched |= set() if op.dst is None else {op.dst.name}
        return frozenset(touched)

    def _early_end(self, loop: Loop, pipeline: Pipeline) -> Pipeline:
        """What this group does in iterations that do not change its part: take and give back."""
        if self.placement.until(loop) is None:
            return pipeline
        if pipeline.depth > 1 and self.schedule.pingpong:
            raise InputError(
                f"{loop.where}: loop {loop.index} ends early for a part, so its groups pass on "
                f"different numbers of turns with {pipeline.depth} iterations started ahead; start "
                "at most one ahead, or take no turns"
            )
        steady = [step for step in pipeline.steady if isinstance(step, Wait)]
        local = self._local_rings(loop)
        skip: list[Step] = []
        turns = [step for step in pipeline.steady if isinstance(step, TurnWait | TurnPass)]
        skip += turns
        for wait in (step for step in steady if step.ring in local):
            skip += [wait.at(0), Release(wait.ring)]
        around = [s for part in (*pipeline.prologue, *pipeline.epilogue) for s in part]
        extra = [s for s in around if isinstance(s, TurnWait | TurnPass)]
        empty = tuple(extra[len(turns) * pipeline.depth :])
        return replace(pipeline, skip=tuple(skip), empty=empty)

    def _releases(self, loop: Loop, schedule: Schedule, times: Mapping[int, int]) -> list[Timed]:
        chosen = schedule.params.get("release", {})
        result: list[Timed] = []
        called = {ring.name: name for name, (ring, _) in local_rings(self.rings, loop).items()}
        for name in sorted(self._local_rings(loop)):
            readers = [op for op in self.effects.readers[name] if op in times]
            last = max(readers, key=lambda op: times[op])
            node = node_of(schedule, self.ops[last], self.part)
            own = called[name]
            key = f"{own}/{self.part}" if f"{own}/{self.part}" in chosen else own
            if key not in chosen:
                raise InputError(
                    f"schedule of {schedule.graph}: params['release'] gives no time for ring "
                    f"{own!r}, whose last reader is {node}"
                )
            result.append((int(chosen[key]), 1, Release(name)))
        return result

    def _check_depths(self, loop: Loop, steady: Sequence[Step]) -> None:
        # Waiting for an iteration's slot while `held` older ones are unreleased needs one more.
        for name in self._local_rings(loop):
            own = [s for s in steady if isinstance(s, Wait | Release) and s.ring == name]
            wait, first = next((steady.index(s), s.stage) for s in own if isinstance(s, Wait))
            release, last = next((steady.index(s), s.stage) for s in own if isinstance(s, Release))
            held = last - first - (1 if release < wait else 0)
            read = [
                (step.stage, p)
                for p, step in enumerate(steady)
                if isinstance(step, OpStep) and step.op.id in self.effects.readers[name]
            ]
            if max(read) > (last, release):
                raise InputError(
                    f"schedule of loop {loop.index}: ring {name} is released before its last "
                    "reader is started; release it later"
                )
            depth = next(ring.depth for ring in self.rings if ring.name == name)
            if depth < held + 1:
                raise InputError(
                    f"schedule of loop {loop.index}: ring {name} has depth {depth}, but {held} of "
                    f"its slots are still held when the next is waited for, so it would deadlock; "
                    f"give it depth {held + 1} or release earlier"
                )

    def _plain(self, loop: Loop, ops: Sequence[Op]) -> list[Step]:
        # One iteration after the other: the rings go at the end.
        release = [Release(name) for name in sorted(self._local_rings(loop))]
        return [*self._straight(ops), *release]

    def _waits(self, local: set[str], steps: Sequence[Step]) -> list[Step]:
        """The steps with a wait before the reader of each ring that comes first in an iteration.

        Readers of one slot may be stages apart; the first is that of the least stage.
        """
        first: dict[str, tuple[int, int]] = {}
        for number, step in enumerate(steps):
            for ring in self._rings_of(step.op) if isinstance(step, OpStep) else ():
                if ring.name in local:
                    at = (step.stage, number)
                    first[ring.name] = min(first.get(ring.name, at), at)
        result: list[Step] = []
        for number, step in enumerate(steps):
            due = [name for name, at in first.items() if at == (step.stage, number)]
            result += [Wait(name, step.stage) for name in due]
            result.append(step)
        return result

    def _pipeline(
        self,
        loop: Loop,
        steady: Sequence[Step],
        plain: Sequence[Step],
        early: Sequence[Release] = (),
    ) -> Pipeline:
        depth = max(step.stage for step in steady)
        queues, prologue = EMPTY, list[tuple[Step, ...]]()
        for number in range(depth):
            some = [step for step in steady if step.stage <= number]
            block, queues = insert_joins(self.effects, self._turns(loop, some), queues)
            prologue.append(block)
            queues = next_iteration(queues)
        if depth:
            # Nothing more in flight on entry than after any later iteration: ptxas follows matmuls
            # by number only where every way into the loop agrees.
            usual = max(len(queue) for queue in self._steady(loop, steady)[2])
            down, queues = join_down(self.effects, queues, usual)
            prologue[-1] = (*prologue[-1], *down)
        block, entries, exits = self._steady(loop, steady, queues)
        queues, epilogue = entries, list[tuple[Step, ...]]()
        for number in range(depth):
            some = [*early] if number == 0 else list[Step]()
            some += [step for step in steady if step.stage > number]
            tail, queues = insert_joins(self.effects, self._turns(loop, some), queues)
            queues = next_iteration(queues)
            epilogue.append(tail)
        last = join_all(self.effects, queues | next_iteration(exits))[0]
        if depth:
            epilogue[-1] = (*epilogue[-1], *join_all(self.effects, queues)[0])
            straight, left = insert_joins(self.effects, self._turns(loop, plain), EMPTY)
            return Pipeline(
                loop,
                depth,
                tuple(prologue),
                block,
                tuple(epilogue),
                (*straight, *join_all(self.effects, left)[0]),
                none=tuple(early),
            )
        return Pipeline(loop, 0, (), block, (last,) if last else (), ())

    def _turns(self, loop: Loop, steps: Sequence[Step]) -> list[Step]:
        if not self.schedule.pingpong:
            return list(steps)
        return with_turns(steps, turn_runs(self.schedule, loop, self.ops), self.part)


def copies_of(placement: Placement, schedule: KernelSchedule, loop: Loop) -> dict[str, int]:
    """Tiles of a loop with more than one copy; raises for a tile that cannot have copies."""
    asked: Mapping[str, int] = schedule.loops[loop.index].params.get("copies", {})
    found = {name: int(count) for name, count in asked.items() if count > 1}
    if odd := sorted(set(found) - set(expandable(placement, loop))):
        raise InputError(
            f"schedule of loop {loop.index!r} gives tile {odd[0]} {found[odd[0]]} copies, but it "
            "is carried from iteration to iteration or read outside of the loop; give it one"
        )
    return found
