"""What holds of a block program after each pass: a table of rules, checked on the program itself.

`ir.spec_events` has the rules about what happens in which order. None shares anything with the
passes: what is expected follows from the tile program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from warploom.codegen.ir.block import (
    BlockProgram,
    Pipeline,
    Ring,
    Role,
    Scheduled,
    Straight,
    ops_of,
    steps_of,
)
from warploom.codegen.ir.spec_events import (
    group_slots,
    joins,
    left_out,
    meaning,
    own_memory,
    panels,
    producer_slots,
    turns,
)
from warploom.codegen.ir.steps import (
    Acquire,
    Fill,
    Issue,
    OpStep,
    Publish,
    Release,
    RingStep,
    Run,
    Step,
    Take,
    Wait,
)
from warploom.errors import CheckFailed

Found = Iterator[str]  # one sentence a fault


@dataclass(frozen=True)
class Rule:
    """A rule that holds from pass `since` on ("": from the beginning), up to pass `until`."""

    name: str
    check: Callable[[BlockProgram], Found]
    since: str = ""
    until: str = ""


def verify(block: BlockProgram, done: Collection[str]) -> None:
    """Check what holds after the passes `done`; raises `CheckFailed` at the first fault."""
    for rule in RULES:
        if (not rule.since or rule.since in done) and rule.until not in done:
            for fault in rule.check(block):
                raise CheckFailed(f"block program {block.name}: {rule.name}: {fault}")


def _every(role: Role) -> Iterator[Step]:
    """Every step that is written anywhere in a role."""
    yield from role.ahead
    for section in role.sections:
        yield from steps_of(section)
        if isinstance(section, Pipeline):
            others = (section.plain, section.skip, section.empty, section.none)
            for steps in (*section.prologue, *section.epilogue, *others):
                yield from steps


def _roles(block: BlockProgram) -> Found:
    loaders = sum(role.loads for role in block.roles)
    turning = sum(role.transposes for role in block.roles)
    parts = [role.part for role in block.roles if role.computes]
    if loaders != 1 or parts != list(range(block.placement.parts)):
        yield f"{loaders} producers and groups {parts}"
    if turning != bool(block.placement.turned):
        yield f"{turning} roles turn {sorted(block.placement.turned)}"
    for role in block.roles:
        for step in _every(role):
            fills = isinstance(step, Acquire | Fill | Publish)
            takes = role.transposes and isinstance(step, Wait | Release)
            if fills == role.computes and not takes:
                yield f"{role.name} has {step}"


def _rings(block: BlockProgram) -> Found:
    rings = {ring.name: ring for ring in block.rings}
    if len(rings) < len(block.rings) or any(ring.depth < 1 for ring in block.rings):
        yield f"depths {[(ring.name, ring.depth) for ring in block.rings]}"
    for role in block.roles:
        for step in _every(role):
            if not isinstance(step, Acquire | Fill | Publish | Wait | Release):
                continue
            if step.ring not in rings:
                yield f"{role.name}: {step}, but there are {sorted(rings)}"
            elif isinstance(step, Fill) and not any(
                step.op in buffer.loads for buffer in rings[step.ring].buffers
            ):
                yield f"{role.name}: {step}, which is none of that ring's loads"
            elif isinstance(step, Acquire | Fill | Publish):
                if block.is_turned(rings[step.ring]) != role.transposes:
                    yield f"{role.name}: {step}, which another role does"
            elif not _takes(block, role, rings[step.ring]):
                yield f"{role.name}: {step}, which another role does"


def _takes(block: BlockProgram, role: Role, ring: Ring) -> bool:
    """Whether a role takes the slots of a ring: warps that turn what is in it, and groups that
    anything else there is for."""
    alone = block.placement.only_turned.issuperset(ring.buffers[0].names)
    return block.is_raw(ring) if role.transposes else not alone


def _ops(block: BlockProgram) -> Found:
    placement = block.placement
    filled = [op for op in placement.program.ops() if op.dst and placement.is_shared(op.dst)]
    shared = {op.label for op in filled}
    turned = {op.label for op in filled if op.dst and op.dst.name in placement.turned}
    kept = {op.label for op in placement.program.ops() if op.id in placement.fusion.kept}
    led = [op for op in placement.program.ops() if op.id in placement.led]
    taken = {op.label for op in led if op.dst and op.dst.name in placement.handed}
    for role in block.roles:
        have = Counter(op.label for section in role.sections for op in ops_of(section))
        loading = turned if role.transposes else shared - turned
        others = {op.label for op in led if not placement.does(op, role.part)}
        own = kept - shared - (others - taken) if role.computes else loading
        want = Counter(own)
        if have != want:
            yield f"{role.name} does not have {min((have - want) + (want - have))} once"
        for step in _every(role):
            if isinstance(step, Issue | Run) and isinstance(step, Issue) != (step.op.kind == "mma"):
                yield f"{role.name}: {step}"
            if isinstance(step, OpStep) and role.computes:
                takes = step.op.label in others & taken
                if isinstance(step, Take) != takes:
                    yield f"{role.name}: {step}, which one group does for all"


def _numbered(block: BlockProgram) -> Found:
    for role in block.roles:
        for section in role.sections if block.pingpong else ():
            for step in steps_of(section):
                inside = isinstance(section, Scheduled | Pipeline)
                if isinstance(step, Issue) and (step.turn is not None) != inside:
                    yield f"{role.name}: {step}"


def _not_numbered(block: BlockProgram) -> Found:
    for role in block.roles:
        for step in _every(role):
            if isinstance(step, Issue) and step.turn is not None:
                yield f"{role.name}: {step}"


def _once(block: BlockProgram, fills: bool, *kinds: type[RingStep]) -> Found:
    for role in block.roles:
        for section in role.sections:
            if (role.loads if not fills else role.computes) or isinstance(section, Straight):
                continue
            taken = block.taken_in(role, section.loop)
            rings = block.filled_by(role, section.loop) if fills else taken
            want = [(kind, ring) for kind in kinds for ring in rings]
            have = [(type(s), s.ring) for s in steps_of(section) if isinstance(s, kinds)]
            own = [pair for pair in have if pair[1] in rings]
            if Counter(own) != Counter(want):
                yield f"{role.name}, loop {section.loop.index}: {[k.__name__ for k, _ in own]}"


def _published(block: BlockProgram) -> Found:
    return _once(block, True, Acquire, Publish)


def _taken(block: BlockProgram) -> Found:
    return _once(block, False, Wait, Release)


RULES = (
    Rule("one producer, then the groups", _roles),
    Rule("steps name rings of the program", _rings),
    Rule("every op is there once", _ops),
    Rule("a slot is acquired and published once an iteration", _published, "loader_slots"),
    Rule("a slot is taken and given back once an iteration", _taken, "waits"),
    Rule("matmuls of loops know their turn", _numbered, "number_turns", "take_turns"),
    Rule("the program's meaning", meaning, "pipeline"),
    Rule("the producer's slots", producer_slots, "pipeline"),
    Rule("the groups' slots", group_slots, "pipeline"),
    Rule("no turn is left to take", _not_numbered, "take_turns"),
    Rule("turns", turns, "take_turns"),
    Rule("unfinished matmuls", joins, "joins"),
    Rule("iterations left out", left_out, "early_end"),
    Rule("a group's own shared memory", own_memory, "group_syncs"),
    Rule("panels of late stores", panels, "group_syncs"),
)
