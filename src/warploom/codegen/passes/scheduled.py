"""What a kernel schedule says, as a block program: the form that the passes begin with.

Everything of the schedule is in it: the rings and their depth, the warp group and the time of every
op, when slots go back, the copies of register tiles. What follows from that is the passes' work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from warploom.codegen.ir.block import (
    TRANSPOSES,
    At,
    BlockProgram,
    Role,
    Scheduled,
    Section,
    Straight,
)
from warploom.codegen.ir.place import placed_for
from warploom.codegen.ir.plan import LOST, KernelSchedule
from warploom.codegen.ir.sections import sections
from warploom.codegen.ir.steps import Fill, OpStep, Release, Take, start_of
from warploom.codegen.passes.rings import local_rings, make_rings
from warploom.errors import InputError
from warploom.schedule.model.schedule import Group, Schedule
from warploom.tile import Loop, Op, Program


def scheduled(program: Program, schedule: KernelSchedule) -> BlockProgram:
    """The block program to begin with; raises `InputError` where the schedule does not fit."""
    parts = len(schedule.compute)
    if parts == 0:
        raise InputError(f"schedule {schedule.name} has no compute group, expected at least one")
    launch = schedule.launch
    brought = _brings_vectors(program, schedule)
    placed = placed_for(program, launch, parts, brought)
    if placed.led and (schedule.pingpong or launch.overlap_next_task):
        raise InputError(
            f"schedule {schedule.name} splits columns or divides what has no part of the split "
            f"{launch.split!r}, so that one group leads: "
            "groups take no turns then and begin no task early"
        )
    placement = replace(placed, whole=launch.overlap_next_task)
    program = placement.program
    missing = [loop.index for loop in program.loops() if loop.index not in schedule.loops]
    if missing:
        raise InputError(
            f"schedule {schedule.name} says nothing about loop {missing[0]!r} of {program.name}; "
            f"it schedules {sorted(schedule.loops)}"
        )
    rings = make_rings(placement, schedule)
    block = BlockProgram(schedule.name, placement, launch, schedule.pingpong, rings, ())
    loader, *groups = schedule.any_loop.groups
    roles = list(_loading(block, schedule, loader))
    for part, group in enumerate(groups):
        own = tuple(
            _computed(block, schedule, section, part, group.name) for section in sections(program)
        )
        roles.append(Role(group.name, group.warps, group.registers, own, part))
    return replace(block, roles=tuple(roles))


def _brings_vectors(program: Program, schedule: KernelSchedule) -> bool:
    """Whether the schedule has the producer load the vectors of loops."""
    loads = [
        (loop, op)
        for loop in program.loops()
        for op in loop.body
        if isinstance(op, Op) and op.kind == "load" and op.dst and len(op.dst.type.axes) == 1
    ]
    groups = [schedule.loops[loop.index].group.get(op.label) for loop, op in loads]
    return schedule.loader in groups


def _loading(block: BlockProgram, schedule: KernelSchedule, group: Group) -> Iterator[Role]:
    """The producer; where operands are turned its other warps do that."""
    turned = block.placement.turned
    warps = 1 if turned else group.warps
    yield Role(group.name, warps, group.registers, _fills(block, schedule, turned=False))
    if turned:
        own = _fills(block, schedule, turned=True)
        yield Role("transpose", group.warps - warps, group.registers, own, TRANSPOSES)


def _fills(block: BlockProgram, schedule: KernelSchedule, turned: bool) -> tuple[Section, ...]:
    """The sections of the producer, or those of the warps that turn: where there is something to
    load or to turn."""
    result: list[Section] = []
    for section in sections(block.placement.program):
        loop = section if isinstance(section, Loop) else None
        shared = [op for op in _ops(section) if op.dst and block.placement.is_shared(op.dst)]
        ops = [op for op in shared if op.dst and (op.dst.name in block.placement.turned) == turned]
        fills = [Fill(op, block.home(op.dst.name)[0].name) for op in ops if op.dst]
        if loop is None and fills:
            result.append(Straight(tuple(fills)))
        elif loop is not None and fills:
            times = schedule.loops[loop.index]
            for op in ops:
                _require_group(times, op.label, schedule.loader)
            timed = tuple(At(times.time[fill.op.label], fill) for fill in fills)
            result.append(Scheduled(loop, times.initiation_interval, timed))
    return tuple(result)


def _computed(
    block: BlockProgram,
    schedule: KernelSchedule,
    section: Loop | tuple[Op, ...],
    part: int,
    group: str,
) -> Section:
    """One section of a compute group: the ops that are not inlined, and in a loop the releases."""
    placement = block.placement
    ops = [
        op
        for op in _ops(section)
        if op.id in placement.fusion.kept and not (op.dst and placement.is_shared(op.dst))
    ]
    taken = [op for op in ops if not placement.does(op, part)]
    ops = [op for op in ops if op not in taken or (op.dst and op.dst.name in placement.handed)]

    def step(op: Op) -> OpStep:
        return Take(op) if op in taken else start_of(op)

    if not isinstance(section, Loop):
        return Straight(tuple(map(step, ops)))
    times = schedule.loops[section.index]
    timed: list[At] = []
    for op in ops:
        node = _node(times, op, part)
        _require_group(times, node, group)
        timed.append(At(times.time[node], step(op)))
    timed += _releases(block, section, times, part)
    if any(count > 1 for count in times.params.get("copies", {}).values()):
        raise InputError(f"schedule of {times.graph}: params['copies'] is {LOST}")
    return Scheduled(section, times.initiation_interval, tuple(timed))


def _releases(block: BlockProgram, loop: Loop, times: Schedule, part: int) -> list[At]:
    chosen: Mapping[str, int] = times.params.get("release", {})
    placement, role = block.placement, Role("", 0, 0, (), part)
    local = local_rings(placement, block.rings, loop)
    called = {ring.name: name for name, (ring, _) in local.items()}
    result: list[At] = []
    for name in sorted(block.taken_in(role, loop)):
        own = called[name]
        key = f"{own}/{part}" if f"{own}/{part}" in chosen else own
        if key not in chosen:
            raise InputError(
                f"schedule of {times.graph}: params['release'] gives no time for ring {own!r} "
                f"(part {part})"
            )
        result.append(At(int(chosen[key]), Release(name)))
    return result


def _ops(section: Loop | Sequence[Op]) -> list[Op]:
    body = section.body if isinstance(section, Loop) else section
    return [op for op in body if isinstance(op, Op)]


def _node(schedule: Schedule, op: Op, part: int) -> str:
    """The schedule's name for an op on a sub-tile: `mma.3/1`, or `mma.3` when not cut."""
    for name in (f"{op.label}/{part}", op.label):
        if name in schedule.time:
            return name
    raise InputError(
        f"schedule of {schedule.graph} gives no time for {op.label} (part {part}), {op.where}"
    )


def _require_group(schedule: Schedule, node: str, wanted: str) -> None:
    """Raise when a node is in another group: register tiles stay where they are."""
    if schedule.group[node] != wanted:
        raise InputError(
            f"schedule of {schedule.graph}: {node} is in group {schedule.group[node]!r}, expected "
            f"{wanted!r}: register tiles do not move between groups, loads belong to the producer"
        )
