"""The rules of `ir.spec` about what roles do, step by step (`ir.events`).

They share nothing with the passes: what they expect follows from the tile program. Each gives a
sentence for every fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from warploom.codegen.ir.block import BlockProgram, Pipeline, Role
from warploom.codegen.ir.events import TASKS, Event, events
from warploom.codegen.ir.sections import sections
from warploom.codegen.ir.steps import (
    Acquire,
    FencedGroupSync,
    Fill,
    GroupSync,
    Issue,
    Join,
    Meet,
    PanelSync,
    Publish,
    Release,
    Run,
    Send,
    Take,
    TurnPass,
    TurnWait,
    Wait,
    start_of,
)
from warploom.tile import Loop, Op

STORES = "store", "store_add"
MORE = 2  # iterations beyond those started ahead
Slot = tuple[str, int]  # a ring and how many of its slots were filled before
Doing = tuple[str, int, int]  # an op or a tile, its task and its iteration


def _traces(block: BlockProgram, fills: bool = False) -> Iterator[tuple[Role, int, list[Event]]]:
    """What the groups do, or those who fill slots, with no iteration, one, as many as are started
    ahead, and more."""
    for role in block.roles:
        depth = max((s.depth for s in role.sections if isinstance(s, Pipeline)), default=0)
        for trips in sorted({0, 1, depth, depth + MORE} if role.computes != fills else ()):
            yield role, trips, list(events(block, role, trips))


def _at(role: Role, trips: int, event: Event | None = None) -> str:
    """Where a fault is."""
    step = "" if event is None else f", task {event.task}: {event.step}"
    return f"{role.name} with {trips} iterations{step}"


def _in_registers(block: BlockProgram, op: Op) -> set[str]:
    return {v.name for v in block.placement.fusion.sources(op) if not block.placement.is_shared(v)}


def meaning(block: BlockProgram) -> Iterator[str]:
    """Every op is done once an iteration, and reads what it reads in the tile program."""
    for role, trips, trace in _traces(block):
        want = _reads(block, _in_order(block, role, trips))
        have = _reads(block, trace)
        for doing in {**want, **have}:
            if have.get(doing) != want.get(doing):
                label, task, iteration = doing
                done = f"reads {have[doing]}" if doing in have else "is missing"
                yield f"{_at(role, trips)}: {label} of task {task}, iteration {iteration}, {done}"


def _in_order(block: BlockProgram, role: Role, trips: int) -> Iterator[Event]:
    """The ops of a group, as the tile program has them."""
    placement = block.placement
    for task in range(TASKS):
        for section in sections(placement.program):
            loop = section if isinstance(section, Loop) else None
            body = section.body if isinstance(section, Loop) else section
            own = [op for op in body if isinstance(op, Op) and op.id in placement.fusion.kept]
            for iteration in range(1 if loop is None else trips):
                for op in own:
                    if op.dst is not None and placement.is_shared(op.dst):
                        continue
                    if placement.does(op, role.part, iteration):
                        yield Event(start_of(op), task, loop, iteration)
                    elif op.dst is not None and op.dst.name in placement.handed:
                        yield Event(Take(op), task, loop, iteration)


def _reads(
    block: BlockProgram, trace: Iterable[Event]
) -> dict[Doing, list[tuple[str, Doing | None]]]:
    """By what is done: the tiles it reads, each with what wrote it last; twice if done twice."""
    result: dict[Doing, list[tuple[str, Doing | None]]] = {}
    written: dict[str, Doing] = {}
    for event in trace:
        if not isinstance(event.step, Issue | Run | Take):
            continue
        op = event.step.op
        doing = (op.label, event.task, event.iteration)
        if not event.void:
            read = [] if isinstance(event.step, Take) else sorted(_in_registers(block, op))
            found = [(name, written.get(name)) for name in read]
            result[doing] = [*result.get(doing, []), *found, (op.label, None)]
        if op.dst is not None:
            written[op.dst.name] = ("void", *doing[1:]) if event.void else doing
    return result


def producer_slots(block: BlockProgram) -> Iterator[str]:
    """Slots are filled between acquiring and publishing them, each tile once."""
    for role, trips, trace in _traces(block, fills=True):
        opened: dict[str, set[str]] = {}
        for event in trace:
            fault = False
            match event.step:
                case Acquire(ring):
                    fault = ring in opened
                    opened[ring] = set()
                case Fill(op, ring):
                    tile = op.dst.name if op.dst else ""
                    fault = ring not in opened or tile in opened[ring]
                    opened.setdefault(ring, set()).add(tile)
                case Publish(ring):
                    fault = len(opened.pop(ring, ())) != len(block.ring(ring).buffers)
                case _:
                    pass
            if fault:
                yield _at(role, trips, event)
        if opened:
            yield f"{_at(role, trips)} never publishes {sorted(opened)}"


class _Filled:
    """Which slots the producer and those who turn fill, for a number of iterations."""

    def __init__(self, block: BlockProgram, trips: int) -> None:
        self.slots: dict[Doing, Slot] = {}
        self.published = Counter[str]()
        filling = [role for role in block.roles if not role.computes]
        for event in (one for role in filling for one in events(block, role, trips)):
            if isinstance(event.step, Publish):
                self.published[event.step.ring] += 1
            elif isinstance(event.step, Fill) and event.step.op.dst is not None:
                ring = event.step.ring
                loaded = _loaded(event, event.step.op.dst.name)
                self.slots[loaded] = ring, self.published[ring]

    def read(self, block: BlockProgram, event: Event, op: Op) -> set[Slot]:
        """The slots that an op reads, or stores through; ("", 0) for what was never loaded."""
        over = block.launch.store_over
        used = [over] if over and op.kind.startswith("store") else []
        used += [var.name for var in block.placement.slots_read(op)]
        return {self.slots.get(_loaded(event, name), ("", 0)) for name in used}


def _loaded(event: Event, name: str) -> Doing:
    """What an event fills or reads: a tile of an iteration, or of a task."""
    body = () if event.loop is None else event.loop.body
    inside = any(isinstance(op, Op) and op.dst is not None and op.dst.name == name for op in body)
    return name, event.task, event.iteration if inside else 0


def group_slots(block: BlockProgram) -> Iterator[str]:
    """Slots are read while they are held, never more than there are, and all given back."""
    for role, trips, trace in (*_traces(block), *_traces(block, fills=True)):
        if role.loads:
            continue
        filled = _Filled(block, trips)
        raw = {ring.name for ring in block.rings if block.is_raw(ring)}
        own = _used(block, role) if role.computes else raw
        published = {name: n for name, n in filled.published.items() if name in own}
        taken, freed = Counter[str](), Counter[str]()
        for event in trace:
            fault = False
            match event.step:
                case Wait(ring):
                    fault = taken[ring] - freed[ring] >= block.ring(ring).depth
                    taken[ring] += 1
                case Release(ring):
                    freed[ring] += 1
                    fault = freed[ring] > taken[ring]
                case Issue(op) | Run(op) | Fill(op) if not event.void:
                    used = filled.read(block, event, op)
                    fault = not all(freed[ring] <= slot < taken[ring] for ring, slot in used)
                case _:
                    pass
            if fault:
                yield f"{_at(role, trips, event)}, with {dict(taken - freed)} slots held"
        if not taken == freed == published:
            yield (
                f"{_at(role, trips)} takes {dict(taken)} and gives back {dict(freed)} of "
                f"{published} slots"
            )


def _used(block: BlockProgram, role: Role) -> set[str]:
    """The rings whose slots a group reads or stores through."""
    placement = block.placement
    done = [op for op in placement.program.ops() if placement.does(op, role.part)]
    done = [op for op in done if op.id in placement.fusion.kept]
    done = [op for op in done if op.dst is None or op.dst.name not in placement.turned]
    over = block.placement.program.ops() if block.launch.store_over else ()
    names = {var.name for op in done for var in block.placement.slots_read(op)}
    names |= {block.launch.store_over for _ in over}
    return {ring.name for ring in block.rings for b in ring.buffers if names & set(b.names)}


def turns(block: BlockProgram) -> Iterator[str]:
    """Groups take and pass on equally many turns, and start the matmuls of loops within them."""
    counts: dict[int, set[int]] = {}
    for role, trips, trace in _traces(block):
        inside, count = False, 0
        for event in trace:
            step = event.step
            if isinstance(step, TurnWait | TurnPass):
                if inside == isinstance(step, TurnWait):
                    yield _at(role, trips, event)
                inside = isinstance(step, TurnWait)
                count += inside
            outside = block.pingpong and event.loop is not None and not inside
            if isinstance(step, Issue) and outside and not event.ahead:
                yield f"{_at(role, trips, event)} outside of a turn"
        if inside or (count and not block.pingpong):
            yield f"{_at(role, trips)} takes {count} turns and does not pass them all on"
        counts.setdefault(trips, set()).add(count)
    for trips, found in counts.items():
        if len(found) > 1:
            yield f"with {trips} iterations the groups take {sorted(found)} turns"


@dataclass(frozen=True)
class _Flying:
    """A started matmul."""

    label: str
    result: str
    operands: set[str]
    slots: set[Slot]


def joins(block: BlockProgram) -> Iterator[str]:
    """No step touches what an unfinished matmul reads or writes."""
    for role, trips, trace in _traces(block):
        filled, freed = _Filled(block, trips), Counter[str]()
        flying: list[_Flying] = []
        for event in trace:
            step = event.step
            read, written, slot = set[str](), set[str](), ("", -1)
            if isinstance(step, Join):
                del flying[: max(0, len(flying) - step.count)]
                read = set(step.names)
            elif isinstance(step, Release):
                slot = step.ring, freed[step.ring]
                freed[step.ring] += 1
            elif isinstance(step, Take):
                written = {step.op.dst.name} if step.op.dst else set[str]()
            elif isinstance(step, Issue | Run):
                # Matmuls into one accumulator follow each other in the tensor core.
                sums = {var.name for var in step.op.srcs[2:] if isinstance(step, Issue)}
                read = _in_registers(block, step.op) - sums
                written = {var.name for var in (step.op.dst,) if var is not None}
            for one in flying:
                touched = read if isinstance(step, Issue) else read | written
                if one.result in touched or one.operands & written or slot in one.slots:
                    yield f"{_at(role, trips, event)} while {one.label} is unfinished"
            if isinstance(step, Issue):
                slots = set[Slot]() if event.void else filled.read(block, event, step.op)
                flying.append(_Flying(step.op.label, min(written), read, slots))
        if flying:
            yield f"{_at(role, trips)} ends with {flying[0].label} unfinished"


def own_memory(block: BlockProgram) -> Iterator[str]:
    """Warps of a group meet between the matmuls that read a tile in its own shared memory and the
    next write of the tile, and behind a fence between the write and the matmuls that read it."""
    own = block.placement.staged.keys() - block.placement.common
    for role, trips, trace in _traces(block) if own else ():
        flying: list[set[str]] = []
        unseen, ended = set[str](), set[str]()
        for event in trace:
            step, fault = event.step, ""
            if isinstance(step, GroupSync | FencedGroupSync | PanelSync | Meet):
                ended.clear()
            match step:
                case Join():
                    done = max(0, len(flying) - step.count)
                    ended.update(*flying[:done])
                    del flying[:done]
                case Issue(op):
                    first = 1 if block.placement.from_registers(op) else 0
                    flying.append({var.name for var in op.srcs[first:2]} & own)
                    fault = "reads what not all warps have written" if flying[-1] & unseen else ""
                case Run(op) if op.dst is not None and op.dst.name in own:
                    name = op.dst.name
                    if name in ended.union(*flying):
                        fault = "writes what other warps' matmuls may still read"
                    unseen.add(name)
                case FencedGroupSync():
                    unseen.clear()
                case _:
                    pass
            if fault:
                yield f"{_at(role, trips, event)} {fault}"


def panels(block: BlockProgram) -> Iterator[str]:
    """The panels of a store whose copies are a step of their own are copied once, behind a fence of
    the group, before any other store; warps meet when the copies have read them
    before they are written again."""
    for role, trips, trace in _traces(block) if block.launch.late_stores else ():
        late = {event.step.op for event in trace if isinstance(event.step, Send)}
        written = dict[Op, bool]()  # stores not yet copied: whether a fence is behind
        copied = False  # copies may still read
        for event in trace:
            step, fault = event.step, ""
            match step:
                case FencedGroupSync():
                    written = dict.fromkeys(written, True)
                case PanelSync():
                    copied = False
                case Send(op) if event.iteration >= 0:  # before the first there is none
                    if not written.pop(op, False):
                        fault = "copies what not all warps have written"
                    copied = True
                case Run(op) if op.kind in STORES:
                    if written:
                        fault = f"while panels of {min(one.label for one in written)} wait"
                    if copied and op in late:
                        fault = "writes panels that copies may read"
                    written |= {op: False} if op in late else {}
                case _:
                    pass
            if fault:
                yield f"{_at(role, trips, event)} {fault}"
        for op in written:
            yield f"{_at(role, trips)} ends with panels of {op.label} that nothing copies"


def left_out(block: BlockProgram) -> Iterator[str]:
    """Iterations that a group leaves out take as many slots and turns as others."""
    for role in block.roles:
        for section in role.sections:
            if not role.computes or not isinstance(section, Pipeline):
                continue
            if block.placement.until(section.loop) is None:
                continue
            want, *others = (
                Counter(
                    (type(event.step).__name__, getattr(event.step, "ring", ""))
                    for event in events(block, role, trips, MORE - trips)
                    if event.loop is section.loop
                    and isinstance(event.step, Wait | Release | TurnWait | TurnPass)
                )
                for trips in (MORE, *range(MORE))
            )
            for trips, have in enumerate(others):
                if want != have:
                    yield f"{_at(role, trips)} does {dict(have)}, the others {dict(want)}"
