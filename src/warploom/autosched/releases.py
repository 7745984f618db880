"""When a solved schedule gives ring slots back.

The solver knows when a matmul has read its operands. The instruction that gives the slot back first
waits for the matmul, so its place is where the group waits for that matmul anyway. If nothing in
the loop waits for it (a plain sum), the group waits after it has started the next matmul, so that
the tensor core does not run dry. If the ring is too shallow for either, the slot goes back when the
model says that the matmul is done.
"""

from __future__ import annotations

from warploom.codegen.analysis.hazards import Effects, Token
from warploom.codegen.ir.block import Ring
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import start_of
from warploom.codegen.passes.rings import local_rings, make_rings
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Loop, Op


def releases(
    placement: Placement, schedule: KernelSchedule, index: str, latency: dict[str, int]
) -> dict[str, int]:
    """Release times of one loop by "RING/PART"; `latency` of every node, cycles."""
    loop = next(one for one in placement.program.loops() if one.index == index)
    times = schedule.loops[index]
    rings = make_rings(placement, schedule)
    result: dict[str, int] = {}
    for name, (ring, _) in local_rings(placement, rings, loop).items():
        if not placement.only_turned.isdisjoint(ring.buffers[0].names):
            continue
        for part in range(placement.parts):
            result[f"{name}/{part}"] = _release(placement, loop, times, ring, part, latency)
    return result


def _release(
    placement: Placement,
    loop: Loop,
    times: Schedule,
    ring: Ring,
    part: int,
    latency: dict[str, int],
) -> int:
    interval = times.initiation_interval
    names = {name for buffer in ring.buffers for name in buffer.names}
    ops = [op for op in loop.body if isinstance(op, Op) and op.id in placement.fusion.kept]
    ops = [op for op in ops if f"{op.label}/{part}" in times.time]
    at = {op.id: times.time[f"{op.label}/{part}"] for op in ops}
    readers = [op for op in ops if op.kind == "mma" and any(v.name in names for v in op.srcs)]
    last = max(readers, key=lambda op: at[op.id])
    done = at[last.id] + latency[f"{last.label}/{part}"]
    loads = [load for buffer in ring.buffers for load in buffer.loads if load in loop.body]
    latest = min(times.time[load.label] for load in loads) + ring.depth * interval
    wished = _waited_for(placement, ops, at, last, interval)
    return wished if done - 1 <= wished <= latest else min(done, latest)


def _waited_for(
    placement: Placement, ops: list[Op], at: dict[int, int], matmul: Op, interval: int
) -> int:
    """Just before the first op after the matmul that must wait for it; else after the next one."""
    effects = Effects(placement, {op.id: op for op in ops}, {})
    moments: list[int] = []
    for op in ops:
        later = max(0, -((at[op.id] - at[matmul.id] - 1) // interval))
        if op is not matmul and effects.conflicts(start_of(op), Token(matmul.id, later)):
            moments.append(at[op.id] + later * interval - 1)
    return min(moments, default=at[matmul.id] + interval)
