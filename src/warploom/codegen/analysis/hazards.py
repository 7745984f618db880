"""Where a warp group must wait for its own matmuls.

A started matmul reads its shared operands and its register operand, and writes its accumulator,
until it is waited for; matmuls finish in the order they were started. `insert_joins` puts a
`Join n` ("at most n unfinished") before every step that would touch any of that too early, with
the largest n that is enough.

*requires*  the possible queues of unfinished matmuls on entry
*before -> after*  `Issue u; ...; Run f(u)` -> `Issue u; ...; Join n; Run f(u)`
*keeps*  the order of steps; gives the possible queues on exit
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.steps import Issue, Join, Meet, Release, Run, Step, Take
from warploom.tile import Op


@dataclass(frozen=True)
class Token:
    """A started matmul of the iteration `age` before the newest one."""

    op: int
    age: int


Queue = tuple[Token, ...]
EMPTY: frozenset[Queue] = frozenset({()})


@dataclass(frozen=True)
class Effects:
    """What the ops of a role touch while they run."""

    placement: Placement
    ops: dict[int, Op]
    readers: dict[str, frozenset[int]]  # matmuls that read a ring
    in_turn: frozenset[int] = frozenset()  # what one group in turn does
    divided: bool = False  # groups hand on what each makes

    def conflicts(self, step: Step, token: Token) -> bool:
        """Whether `step` must not run while the matmul of `token` is unfinished."""
        started = self.ops[token.op]
        assert started.dst is not None
        if isinstance(step, Release):
            return token.op in self.readers[step.ring] and token.age >= step.stage
        if isinstance(step, Meet):
            # Groups that divide work meet for all that they hand on.
            met = self.placement.common if self.divided else {step.tile}
            return not self._staged(started).isdisjoint(met)
        if not isinstance(step, Run | Issue | Take):
            return False
        taken = isinstance(step, Take)
        reads = set[str]() if taken else {v.name for v in self.placement.fusion.sources(step.op)}
        writes = set[str]() if step.op.dst is None else {step.op.dst.name}
        if isinstance(step, Issue):
            # Matmuls into one accumulator follow each other in the tensor core.
            name = started.dst.name
            return name in {var.name for var in step.op.srcs[:2]}
        result = started.dst.name
        return result in reads | writes or bool({var.name for var in started.srcs[:2]} & writes)

    def _staged(self, op: Op) -> set[str]:
        """The tiles made in registers that a matmul reads from shared memory."""
        first = 1 if self.placement.from_registers(op) else 0
        return {var.name for var in op.srcs[first:2]} & set(self.placement.staged)


def effects_of(block: BlockProgram) -> Effects:
    """What the ops of a block program touch."""
    ops = {op.id: op for op in block.placement.program.ops()}
    read = {op.id: {ring.name for ring in block.rings_read(op)} for op in ops.values()}
    readers = {
        ring.name: frozenset(op for op, names in read.items() if ring.name in names)
        for ring in block.rings
    }
    return Effects(block.placement, ops, readers, block.placement.in_turn, block.launch.divided)


def insert_joins(
    effects: Effects, steps: Sequence[Step], entries: Iterable[Queue]
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """The steps with their joins, and every queue possible afterwards."""
    queues = set(entries)
    result: list[Step] = []
    for step in steps:
        queues = _join(effects, step, queues, result)
        if isinstance(step, Issue) and step.op.id in effects.in_turn:
            # The whole of it takes the registers that other matmuls' operands lie in. Other groups
            # leave it out, and nothing changes for them.
            found = _names(effects, [token for queue in queues for token in queue])
            result += [Join(0, found, in_turn=True)] if found else []
            queues |= {(Token(step.op.id, step.stage),)}
        elif isinstance(step, Issue):
            queues = {(*queue, Token(step.op.id, step.stage)) for queue in queues}
        result.append(step)
    return tuple(result), frozenset(queues)


def join_all(
    effects: Effects, entries: Iterable[Queue]
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """Wait for everything that may be unfinished."""
    found = _names(effects, [token for queue in entries for token in queue])
    steps = (Join(0, found),) if found else ()
    return steps, EMPTY


def join_down(
    effects: Effects, entries: Iterable[Queue], count: int
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """Wait until at most `count` matmuls are unfinished, where more may be."""
    queues = set(entries)
    if max((len(queue) for queue in queues), default=0) <= count:
        return (), frozenset(queues)
    result: list[Step] = []
    left = _wait(effects, queues, count, result)
    return tuple(result), frozenset(left)


def join_read(
    effects: Effects, entries: Iterable[Queue], names: frozenset[str]
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """Wait for every matmul into one of the tiles `names`."""
    queues = set(entries)
    counts: list[int] = []
    for queue in queues:
        read = [
            place
            for place, token in enumerate(queue)
            if (dst := effects.ops[token.op].dst) is not None and dst.name in names
        ]
        if read:
            counts.append(len(queue) - 1 - read[-1])
    if not counts:
        return (), frozenset(queues)
    result: list[Step] = []
    left = _wait(effects, queues, min(counts), result)
    return tuple(result), frozenset(left)


def next_iteration(queues: Iterable[Queue]) -> frozenset[Queue]:
    """The queues as the following iteration sees them: everything one iteration older."""
    return frozenset(tuple(Token(t.op, t.age + 1) for t in queue) for queue in queues)


def _join(effects: Effects, step: Step, queues: set[Queue], result: list[Step]) -> set[Queue]:
    counts: list[int] = []
    for queue in queues:
        bad = [place for place, token in enumerate(queue) if effects.conflicts(step, token)]
        if bad:
            counts.append(len(queue) - 1 - bad[-1])
    if not counts:
        return queues
    return _wait(effects, queues, min(counts), result)


def _wait(effects: Effects, queues: set[Queue], count: int, result: list[Step]) -> set[Queue]:
    done = [token for queue in queues for token in queue[: max(0, len(queue) - count)]]
    left = {queue[max(0, len(queue) - count) :] for queue in queues}
    busy = _names(effects, [token for queue in left for token in queue])
    found = tuple(name for name in _names(effects, done) if name not in busy)
    result.append(Join(count, found))
    return left


def _names(effects: Effects, tokens: Sequence[Token]) -> tuple[str, ...]:
    """The accumulators of matmuls, each once."""
    found = {dst.name for token in tokens if (dst := effects.ops[token.op].dst) is not None}
    return tuple(sorted(found))
