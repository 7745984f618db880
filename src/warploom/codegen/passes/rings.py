"""Rings of a kernel: which loads share a slot and a barrier, and how deep each ring is.

Rules: loads of one loop with equal depth and the same readers share a ring (their barrier then
expects the sum of their bytes); loops that load equal tiles of the same arrays share the ring
itself, taking turns with its slots in program order; a load outside of loops has a ring of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from warploom.codegen.ir.block import Ring, make_ring
from warploom.codegen.ir.place import Placement, sections
from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import InputError
from warploom.tile import Loop, Op


@dataclass
class _Draft:
    name: str
    depth: int
    columns: list[list[Op]]
    key: tuple[object, ...]


def make_rings(placement: Placement, schedule: KernelSchedule) -> tuple[Ring, ...]:
    """The rings of a program under a schedule, in order of first load."""
    drafts: list[_Draft] = []
    for section in sections(placement.program):
        ops = section.body if isinstance(section, Loop) else section
        loads = [op for op in ops if isinstance(op, Op) and op.dst and placement.is_shared(op.dst)]
        ours: list[_Draft] = []  # rings of this section are not shared among its own loads
        for group in _grouped(placement, schedule, section, loads):
            depth = _depth(schedule, section, group[0])
            key = (depth, isinstance(section, Loop), *((op.array, _type(op)) for op in group))
            others = [d for d in drafts if not any(d is own for own in ours)]
            twin = next((d for d in others if d.key == key and isinstance(section, Loop)), None)
            if twin is None:
                name = unique(joined(group), [own.name for own in drafts])
                drafts.append(_Draft(name, depth, [[op] for op in group], key))
                ours.append(drafts[-1])
            else:
                ours.append(twin)
                for column, op in zip(twin.columns, group, strict=True):
                    column.append(op)
    return tuple(make_ring(placement, d.name, d.depth, d.columns) for d in drafts)


def names_in(rings: Sequence[Ring], loop: Loop) -> dict[str, str]:
    """What the schedule of a loop calls the rings it fills, by their own names: after their arrays,
    with a number where the loop has several of the same. Rings of the whole program may have more.
    """
    found: dict[str, str] = {}
    for op in loop.body:
        ring = next((r for r in rings if any(op in b.loads for b in r.buffers)), None)
        if ring is not None and ring.name not in found:
            loads = [load for b in ring.buffers for load in b.loads if load in loop.body]
            found[ring.name] = unique(joined(loads), found.values())
    return found


def joined(loads: Sequence[Op]) -> str:
    """The name of the ring of some loads: their arrays'."""
    return "_".join(op.array.name for op in loads if op.array is not None)


def unique(name: str, taken: Collection[str]) -> str:
    """The name, or with a number where the section has a ring of that name already."""
    number, found = 2, name
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    return found


def _type(op: Op) -> object:
    assert op.dst is not None
    return op.dst.type


def _grouped(
    placement: Placement,
    schedule: KernelSchedule,
    section: Loop | tuple[Op, ...],
    loads: list[Op],
) -> list[list[Op]]:
    groups: dict[tuple[object, ...], list[Op]] = {}
    for op in loads:
        assert op.dst is not None
        name = op.dst.name
        readers = tuple(
            other.id for other in placement.program.ops() if any(v.name == name for v in other.srcs)
        )
        alone = () if isinstance(section, Loop) else (op.id,)
        groups.setdefault((_depth(schedule, section, op), readers, *alone), []).append(op)
    return list(groups.values())


def _depth(schedule: KernelSchedule, section: Loop | tuple[Op, ...], op: Op) -> int:
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
