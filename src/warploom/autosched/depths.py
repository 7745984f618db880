"""How deep the rings of a solved schedule are: they get all shared memory that is left.

The solver's times ask for a least depth. Loads vary more than its model says, so deeper rings help,
and they are always legal: a slot lives at most depth x interval.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.ir.place import Placement
from warploom.codegen.passes.rings import rings_of
from warploom.errors import CheckFailed
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Op

MOST_DEPTH = 8  # slots beyond which a ring hides nothing more


def deepen(
    placement: Placement, answers: Mapping[str, Schedule], capacity: int
) -> dict[str, dict[str, int]]:
    """Ring depths by loop and load: the least the times allow, then one slot each while they fit.

    Raises `CheckFailed` where the least depths take more than `capacity` bytes.
    """
    loop_of = {
        op.id: loop.index
        for loop in placement.program.loops()
        for op in loop.body
        if isinstance(op, Op)
    }
    rings = [
        (ring.slot_bytes, [op for buffer in ring.buffers for op in buffer.loads])
        for ring in rings_of(placement, lambda section, op: 1)
    ]
    rings = [(size, loads) for size, loads in rings if loads[0].id in loop_of]
    sizes = [size for size, _ in rings]
    depths = [
        max(answers[loop_of[op.id]].ring_depth[op.label] for op in loads) for _, loads in rings
    ]
    used = sum(d * s for d, s in zip(depths, sizes, strict=True))
    if used > capacity:
        raise CheckFailed(
            f"{placement.program.name}: the rings of all its loops take {used} B, "
            f"{capacity} B are left; make the tile smaller"
        )
    while True:
        fitting = [
            i for i, size in enumerate(sizes) if used + size <= capacity and depths[i] < MOST_DEPTH
        ]
        if not fitting:
            break
        least = min(fitting, key=lambda i: depths[i])
        depths[least] += 1
        used += sizes[least]
    result: dict[str, dict[str, int]] = {name: {} for name in answers}
    for depth, (_, loads) in zip(depths, rings, strict=True):
        for op in loads:
            result[loop_of[op.id]][op.label] = depth
    return result
