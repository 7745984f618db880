"""Rings of a kernel: which loads share a slot and a barrier, and how deep each ring is.

Rules: loads of one loop with equal depth and the same readers share a ring (their barrier then
expects the sum of their bytes), and so do its vectors of equal depth; loops that load tiles of the
same arrays share the ring itself, taking turns with its slots in program order, where the tiles are
equal or differ in their rows: a slot has room for the highest; a load outside of loops has a ring
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from warploom.codegen.ir.block import Ring, make_ring
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.sections import sections
from warploom.errors import InputError
from warploom.tile import Loop, Op

Section = Loop | tuple[Op, ...]
VECTORS = (-1,)  # in place of the readers of vectors
DepthOf = Callable[[Section, Op], int]


@dataclass
class _Draft:
    name: str
    depth: int
    columns: list[list[Op]]
    key: tuple[object, ...]


def make_rings(placement: Placement, schedule: KernelSchedule) -> tuple[Ring, ...]:
    """The rings of a program under a schedule, in order of first load."""
    return rings_of(placement, partial(_depth, schedule))


def rings_of(placement: Placement, depth_of: DepthOf) -> tuple[Ring, ...]:
    """The rings of a program, in order of first load, when `depth_of` says how many slots a load
    of a section wants. Whoever asks which loads share a ring asks here."""
    drafts: list[_Draft] = []
    for section in sections(placement.program):
        ops = section.body if isinstance(section, Loop) else section
        loads = [op for op in ops if isinstance(op, Op) and op.dst and placement.is_shared(op.dst)]
        ours: list[_Draft] = []  # rings of this section are not shared among its own loads
        for depth, group in _grouped(placement, depth_of, section, loads):
            key = (depth, isinstance(section, Loop), *((op.array, _shape(op)) for op in group))
            others = [d for d in drafts if not any(d is own for own in ours)]
            twin = next((d for d in others if d.key == key and isinstance(section, Loop)), None)
            if twin is None:
                name = _unique(_joined(placement, group), [own.name for own in drafts])
                drafts.append(_Draft(name, depth, [[op] for op in group], key))
                ours.append(drafts[-1])
            else:
                ours.append(twin)
                for column, op in zip(twin.columns, group, strict=True):
                    column.append(op)
    return tuple(make_ring(placement, d.name, d.depth, d.columns) for d in drafts)


def slots_of(plan: LaunchPlan, slots: int) -> DepthOf:
    """So many slots for every load of a loop, and the plan's for the others: what a program needs
    of shared memory before it has a schedule."""

    def depth(section: Section, op: Op) -> int:
        assert op.dst is not None
        return slots if isinstance(section, Loop) else plan.task_rings.get(op.dst.name, 1)

    return depth


def loop_slot_bytes(placement: Placement, rings: Sequence[Ring]) -> int:
    """Bytes of one slot of each ring that takes a slot every iteration of a loop."""
    loops = placement.program.loops()
    inside = {op.id for loop in loops for op in loop.body if isinstance(op, Op)}
    of_loops = [r for r in rings if any(op.id in inside for b in r.buffers for op in b.loads)]
    return sum(ring.slot_bytes for ring in of_loops)


def local_rings(
    placement: Placement, rings: Sequence[Ring], loop: Loop
) -> dict[str, tuple[Ring, tuple[Op, ...]]]:
    """The rings that a loop fills, by what its schedule calls them, with the loop's own loads.

    They are called after their arrays, with a number where the loop has several of the same; rings
    of the whole program may have another number.
    """
    found: dict[str, tuple[Ring, tuple[Op, ...]]] = {}
    for op in loop.body:
        ring = next((r for r in rings if any(op in b.loads for b in r.buffers)), None)
        if ring is not None and not any(ring is other for other, _ in found.values()):
            loads = [load for b in ring.buffers for load in b.loads if load in loop.body]
            found[_unique(_joined(placement, loads), found)] = ring, tuple(loads)
    return found


def _joined(placement: Placement, loads: Sequence[Op]) -> str:
    """The name of the ring of some loads: their arrays', of turned ones those they came from."""
    names = [op.array.name for op in loads if op.array is not None]
    for op in loads:
        if op.dst is not None and op.dst.name in placement.turned:
            source = placement.shared[placement.turned[op.dst.name]][0]
            names += [f"{source.array.name}_turned"] if source.array is not None else []
    return "_".join(names)


def _unique(name: str, taken: Collection[str]) -> str:
    """The name, or with a number where the section has a ring of that name already."""
    number, found = 2, name
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    return found


def _shape(op: Op) -> object:
    """What loads of other loops have alike that take turns with a ring."""
    assert op.dst is not None
    kind = op.dst.type
    return (kind.dtype, kind.shape[1:]) if len(kind.axes) > 1 else kind


def _grouped(
    placement: Placement, depth_of: DepthOf, section: Section, loads: list[Op]
) -> list[tuple[int, list[Op]]]:
    groups: dict[tuple[int, tuple[int, ...]], list[Op]] = {}
    for op in loads:
        assert op.dst is not None
        name = op.dst.name
        readers = tuple(
            other.id for other in placement.program.ops() if any(v.name == name for v in other.srcs)
        )
        alone = () if isinstance(section, Loop) else (op.id,)
        key = VECTORS if len(op.dst.type.axes) == 1 else (*readers, *alone)
        groups.setdefault((depth_of(section, op), key), []).append(op)
    return [(depth, group) for (depth, _), group in groups.items()]


def _depth(schedule: KernelSchedule, section: Section, op: Op) -> int:
    assert op.dst is not None
    if not isinstance(section, Loop):
        return schedule.launch.task_rings.get(op.dst.name, 1)
    depths = schedule.loops[section.index].ring_depth
    if op.label not in depths:
        raise InputError(
            f"schedule of loop {section.index!r} gives no depth for the ring of {op.label} "
            f"({op.where}); it has {sorted(depths)}"
        )
    if depths[op.label] < 1:
        raise InputError(f"ring of {op.label} has depth {depths[op.label]}, expected >= 1")
    return depths[op.label]
