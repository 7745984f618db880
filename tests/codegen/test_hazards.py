"""Waits for matmuls, against a model of registers and ring slots that knows no waiting rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen.tiny_program import tiny_case

from warploom.codegen.analysis.hazards import (
    Effects,
    Queue,
    Token,
    effects_of,
    insert_joins,
    join_all,
    join_down,
    join_read,
    next_iteration,
)
from warploom.codegen.ir.steps import Issue, Join, Release, Run, Step
from warploom.codegen.passes.lower import lower
from warploom.tile import BF16, FP32, Op
from warploom.tile.ir import TileType, Var

RESULTS, OPERANDS, OTHERS = ("a0", "a1"), ("p0", "p1"), ("x",)
RINGS = {"q": "sq", "k": "sk"}  # a ring, and the tile in it that a matmul reads
MATMULS = range(4)
ALL = (*RESULTS, *OPERANDS, *OTHERS)


def tile(name: str) -> Var:
    return Var(name, TileType(BF16 if name in OPERANDS else FP32, (("m", 16), ("n", 16))))


@st.composite
def bodies(draw: Any) -> tuple[Effects, list[Step]]:
    """Some steps of a loop, each of its own stage."""
    matmuls: dict[int, Op] = {}
    for number in MATMULS:
        result, ring = draw(st.sampled_from(RESULTS)), draw(st.sampled_from(sorted(RINGS)))
        left = draw(st.sampled_from([*OPERANDS, *RINGS.values()]))
        sources = (tile(left), tile(RINGS[ring]), tile(result))
        matmuls[number] = Op(number, "mma", tile(result), sources)
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 7))):
        stage = draw(st.integers(0, 2))
        match draw(st.sampled_from(["Issue", "Issue", "Run", "Release"])):
            case "Issue":
                op = matmuls[draw(st.sampled_from(MATMULS))]
                steps.append(Issue(op, stage=stage))
            case "Run":
                into = draw(st.sampled_from(ALL))
                sources = draw(st.lists(st.sampled_from(ALL), max_size=2))
                op = Op(10 + number, "add", tile(into), tuple(map(tile, sources)))
                steps.append(Run(op, stage=stage))
            case _:
                ring = draw(st.sampled_from(sorted(RINGS)))
                steps.append(Release(ring, stage=stage))
    readers = {
        ring: frozenset(n for n, op in matmuls.items() if name in {v.name for v in op.srcs[:2]})
        for ring, name in RINGS.items()
    }
    placement = SimpleNamespace(fusion=SimpleNamespace(sources=lambda op: op.srcs))
    return Effects(placement, matmuls, readers), steps  # type: ignore[arg-type]


class Core:
    """Registers by tile, ring slots by iteration; matmuls finish in the order they begin.

    `flying` are (op, iteration it is of): how late each may be is for the waits to say.
    """

    def __init__(self, effects: Effects, flying: Iterable[tuple[int, int]] = ()) -> None:
        self.effects, self.flying = effects, list(flying)

    def clashes(self, step: Step, now: int, left: int) -> bool:
        """Whether `step` may not run while the newest `left` matmuls are unfinished."""
        iteration = now - step.stage
        return any(
            self._clash(step, iteration, self.effects.ops[op], born)
            for op, born in self.flying[max(0, len(self.flying) - left) :]
        )

    def _clash(self, step: Step, iteration: int, matmul: Op, born: int) -> bool:
        read = [v.name for v in matmul.srcs[:2]]
        written = matmul.dst.name  # type: ignore[union-attr]
        if isinstance(step, Release):
            return RINGS[step.ring] in read and born <= iteration
        assert isinstance(step, Issue | Run)
        op = step.op
        assert op.dst is not None
        if isinstance(step, Issue):  # the tensor core keeps the order of one accumulator
            return written in {v.name for v in op.srcs[:2] if v.name in ALL}
        touched = {v.name for v in op.srcs} | {op.dst.name}
        return written in touched or op.dst.name in {name for name in read if name in ALL}

    def join(self, count: int) -> list[tuple[int, int]]:
        done = self.flying[: max(0, len(self.flying) - count)]
        self.flying = self.flying[len(done) :]
        return done


def replay(cores: Sequence[Core], steps: Sequence[Step], now: int) -> None:
    """Every wait is enough for all cores, and one more unfinished would be too many for one."""
    for at, step in enumerate(steps):
        if not isinstance(step, Join):
            assert not any(core.clashes(step, now, len(core.flying)) for core in cores), step
            for core in cores if isinstance(step, Issue) else ():
                core.flying.append((step.op.id, now - step.stage))
            continue
        after = steps[at + 1]
        assert any(core.clashes(after, now, step.count + 1) for core in cores), (step, after)
        finished = {item for core in cores for item in core.join(step.count)}
        busy = {result(core, item) for core in cores for item in core.flying}
        ready = {result(cores[0], item) for item in finished} - busy
        assert set(step.names) == ready, step


def result(core: Core, item: tuple[int, int]) -> str:
    return core.effects.ops[item[0]].dst.name  # type: ignore[union-attr]


@settings(max_examples=80, deadline=None)
@given(bodies())
def test_waits_are_enough_and_no_more(body: tuple[Effects, list[Step]]) -> None:
    effects, steps = body
    core, queues = Core(effects), frozenset[Queue]({()})
    for now in range(12, 18):
        some = [step for step in steps if step.stage <= now - 12]
        block, queues = insert_joins(effects, some, queues)
        replay([core], block, now)
        assert [step for step in block if not isinstance(step, Join)] == some
        assert queues == {tuple(Token(op, now - born) for op, born in core.flying)}
        queues = next_iteration(queues)


def entries(effects: Effects) -> st.SearchStrategy[frozenset[Queue]]:
    token = st.builds(Token, st.sampled_from(sorted(effects.ops)), st.integers(0, 3))
    return st.frozensets(st.lists(token, max_size=4).map(tuple), min_size=1, max_size=3)


def cores(effects: Effects, queues: Iterable[Queue], now: int) -> list[Core]:
    return [Core(effects, [(t.op, now - t.age) for t in queue]) for queue in queues]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_waits_fit_every_queue_that_is_possible(data: Any) -> None:
    effects, steps = data.draw(bodies())
    queues = data.draw(entries(effects))
    block, left = insert_joins(effects, steps, queues)
    ways = cores(effects, queues, 12)
    replay(ways, block, 12)
    assert left == {tuple(Token(op, 12 - born) for op, born in way.flying) for way in ways}


@settings(max_examples=80, deadline=None)
@given(st.data(), st.frozensets(st.sampled_from(RESULTS)), st.integers(0, 3))
def test_waits_for_results_and_for_a_number(data: Any, names: frozenset[str], most: int) -> None:
    effects, _ = data.draw(bodies())
    queues = data.draw(entries(effects))

    def unread(queue: Queue) -> bool:
        return all(effects.ops[t.op].dst.name not in names for t in queue)  # type: ignore[union-attr]

    steps, left = join_read(effects, queues, names)
    assert all(map(unread, left))
    if steps:
        (step,) = steps
        kept = [queue[max(0, len(queue) - step.count - 1) :] for queue in queues]
        assert not all(map(unread, kept)), "one more could be unfinished"
        assert left == {queue[max(0, len(queue) - step.count) :] for queue in queues}
    else:
        assert left == queues

    steps, left = join_down(effects, queues, most)
    assert left == {queue[max(0, len(queue) - most) :] for queue in queues}
    assert [step.count for step in steps] == [most] * any(len(queue) > most for queue in queues)

    steps, left = join_all(effects, queues)
    assert left == {()} and [step.count for step in steps] == [0] * any(queues)
    for step in steps:
        every = {result(way, item) for way in cores(effects, queues, 12) for item in way.flying}
        assert set(step.names) == every


def test_a_wait_for_a_result_is_enough_for_the_queue_that_asks_most() -> None:
    """On one way into a step a matmul has another behind it, on the other it is the newest."""
    ops = {
        n: Op(n, "mma", tile(name), (tile("p0"), tile("sq"), tile(name)))
        for n, name in enumerate(RESULTS)
    }
    effects = Effects(SimpleNamespace(), ops, {})  # type: ignore[arg-type]
    first, second = Token(0, 0), Token(1, 0)
    (step,), left = join_read(effects, [(first, second), (first,)], frozenset(RESULTS[:1]))
    assert step.count == 0 and left == {()}
    (step,), left = join_read(effects, [(first, second)], frozenset(RESULTS[:1]))
    assert step.count == 1 and left == {(second,)}


def test_what_a_role_touches_is_what_its_program_says() -> None:
    """Which matmuls read a ring, by the loads that fill it."""
    program, schedule = tiny_case(True)
    block = lower(program, schedule)
    filled = {
        ring.name: {load.dst.name for part in ring.buffers for load in part.loads if load.dst}
        for ring in block.rings
    }
    assert any(filled.values())
    effects = effects_of(block)
    for name, tiles in filled.items():
        readers = {
            op.id
            for op in program.ops()
            if op.kind == "mma" and tiles & {v.name for v in op.srcs[:2]}
        }
        assert effects.readers[name] == readers
