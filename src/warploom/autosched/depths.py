"""How deep the rings of a solved schedule are: what shared memory is left goes to them.

The solver's times ask for a least depth; loads vary more than its model says, and deeper is always
legal: a slot lives at most depth x interval.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.ir.place import Placement
from warploom.errors import CheckFailed
from warploom.schedule.model.schedule import Schedule
from warploom.tile import Op

MOST_DEPTH = 8  # slots beyond which a ring hides nothing more


def ring_classes(placement: Placement) -> list[list[list[Op]]]:
    """Loads that should share a ring: classes of columns of loads (one load a loop).

    Loads of one loop with the same readers go together; loops that load equal tiles of the same
    arrays take turns with one ring (`passes.rings`).
    """
    found: dict[tuple[object, ...], list[list[Op]]] = {}
    for loop in placement.program.loops():
        together: dict[tuple[int, ...], list[Op]] = {}
        for op in loop.body:
            if isinstance(op, Op) and op.dst is not None and placement.is_shared(op.dst):
                name = op.dst.name
                readers = tuple(
                    o.id for o in placement.program.ops() if any(v.name == name for v in o.srcs)
                )
                together.setdefault(readers, []).append(op)
        for loads in together.values():
            key = tuple((op.array, op.dst.type if op.dst else None) for op in loads)
            found.setdefault(key, []).append(loads)
    return list(found.values())


def deepen(
    placement: Placement, answers: Mapping[str, Schedule], capacity: int
) -> dict[str, dict[str, int]]:
    """Ring depths by loop and load: the least the times allow, then one slot each while they fit.

    Deeper is always legal: a slot lives at most depth x II.
    """
    loop_of = {
        op.id: loop.index
        for loop in placement.program.loops()
        for op in loop.body
        if isinstance(op, Op)
    }
    classes = ring_classes(placement)
    sizes = [
        sum(placement.shared[op.dst.name][1].bytes for op in one[0] if op.dst) for one in classes
    ]
    depths = [
        max(answers[loop_of[op.id]].ring_depth[op.label] for loads in one for op in loads)
        for one in classes
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
    for depth, one in zip(depths, classes, strict=True):
        for loads in one:
            for op in loads:
                result[loop_of[op.id]][op.label] = depth
    return result
