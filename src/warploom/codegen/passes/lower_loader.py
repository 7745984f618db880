"""Lowering of the producer: which slots it fills, in which order, and how far ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.ir.block import Pipeline, Ring, Role, Straight
from warploom.codegen.ir.place import Placement, sections
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import Acquire, Fill, Publish
from warploom.codegen.passes.pingpong import require_group
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Loop, Op

LoaderStep = Acquire | Fill | Publish


def loader_role(
    placement: Placement,
    schedule: KernelSchedule,
    rings: tuple[Ring, ...],
    warps: int,
    registers: int,
) -> Role:
    """The role that loads: its rings, section by section."""
    result: list[Straight | Pipeline] = []
    for section in sections(placement.program):
        ops = section.body if isinstance(section, Loop) else section
        loads = [op for op in ops if isinstance(op, Op) and op.dst and placement.is_shared(op.dst)]
        if not loads:
            continue
        if isinstance(section, Loop):
            times = {op.id: schedule.loops[section.index].time[op.label] for op in loads}
            for op in loads:
                require_group(schedule.loops[section.index], op.label, schedule.loader)
            timed = _fill_steps(loads, rings, times)
            result.append(_producer_loop(section, schedule.loops[section.index], timed))
        else:
            timed = _fill_steps(loads, rings, {op.id: op.id for op in loads})
            result.append(Straight(tuple(step for _, step in timed)))
    return Role(schedule.loader, warps, registers, tuple(result))


def _fill_steps(
    loads: Sequence[Op], rings: tuple[Ring, ...], times: Mapping[int, int]
) -> list[tuple[int, LoaderStep]]:
    steps: list[tuple[int, LoaderStep]] = []
    for ring in rings:
        inside = [op for op in loads if any(op in buffer.loads for buffer in ring.buffers)]
        if not inside:
            continue
        start = min(times[op.id] for op in inside)
        steps.append((start, Acquire(ring.name)))
        steps += [(start, Fill(op, ring.name)) for op in inside]
        steps.append((start, Publish(ring.name)))
    return sorted(steps, key=lambda pair: pair[0])


def _producer_loop(
    loop: Loop, schedule: Schedule, timed: Sequence[tuple[int, LoaderStep]]
) -> Pipeline:
    interval = schedule.initiation_interval
    # From the first load on, so that no more iterations than necessary are started ahead.
    first = min(time for time, _ in timed)
    steps = sorted(timed, key=lambda pair: (pair[0] - first) % interval)
    ordered = [step.at((time - first) // interval) for time, step in steps]
    plain = tuple(step for _, step in timed)
    depth = max(step.stage for step in ordered)
    prologue = tuple(tuple(s for s in ordered if s.stage <= i) for i in range(depth))
    epilogue = tuple(tuple(s for s in ordered if s.stage > i) for i in range(depth))
    return Pipeline(loop, depth, prologue, tuple(ordered), epilogue, plain)
