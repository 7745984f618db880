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

from warploom.codegen.block import Step
from warploom.codegen.place import Placement
from warploom.tile import Op


@dataclass(frozen=True)
class Token:
    """A started matmul of the iteration `age` before the newest one."""

    op: int
    age: int


Queue = tuple[Token, ...]


@dataclass(frozen=True)
class Effects:
    """What the ops of a role touch while they run."""

    placement: Placement
    ops: dict[int, Op]
    readers: dict[str, frozenset[int]]  # matmuls that read a ring

    def conflicts(self, step: Step, token: Token) -> bool:
        """Whether `step` must not run while the matmul of `token` is unfinished."""
        started = self.ops[token.op]
        assert started.dst is not None
        if step.action == "Release":
            return token.op in self.readers[step.ring] and token.age >= step.stage
        if step.action not in ("Run", "Issue") or step.op is None:
            return False
        reads = {var.name for var in self.placement.fusion.sources(step.op)}
        writes = set[str]() if step.op.dst is None else {step.op.dst.name}
        if step.action == "Issue":
            # Matmuls into one accumulator follow each other in the tensor core.
            return started.dst.name in {var.name for var in step.op.srcs[:2]}
        operand = started.srcs[0].name
        return started.dst.name in reads | writes or operand in writes


def insert_joins(
    effects: Effects, steps: Sequence[Step], entries: Iterable[Queue]
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """The steps with their joins, and every queue possible afterwards."""
    queues = set(entries)
    result: list[Step] = []
    for step in steps:
        queues = _join(effects, step, queues, result)
        result.append(step)
        if step.action == "Issue" and step.op is not None:
            queues = {(*queue, Token(step.op.id, step.stage)) for queue in queues}
    return tuple(result), frozenset(queues)


def join_all(
    effects: Effects, entries: Iterable[Queue]
) -> tuple[tuple[Step, ...], frozenset[Queue]]:
    """Wait for everything that may be unfinished."""
    names = _names(effects, [token for queue in entries for token in queue])
    steps = (Step("Join", count=0, names=names),) if names else ()
    return steps, frozenset({()})


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
    count = min(counts)
    done = [token for queue in queues for token in queue[: max(0, len(queue) - count)]]
    left = {queue[max(0, len(queue) - count) :] for queue in queues}
    busy = set(_names(effects, [token for queue in left for token in queue]))
    names = tuple(name for name in _names(effects, done) if name not in busy)
    result.append(Step("Join", count=count, names=names))
    return left


def _names(effects: Effects, tokens: Sequence[Token]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for token in tokens:
        dst = effects.ops[token.op].dst
        assert dst is not None
        found[dst.name] = None
    return tuple(sorted(found))
