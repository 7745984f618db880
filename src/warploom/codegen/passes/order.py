"""The check that a schedule keeps the program's meaning on one warp group.

For every pair of ops of a loop body that touch one register tile, at least one writing it, the
emitted order must be the sequential one. Position of op v of iteration i: (i + stage(v), rank(v)).
A tile with copies is the same one only every so many iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.ir.memory_order import memory_chains
from warploom.codegen.ir.place import Placement
from warploom.errors import InputError
from warploom.tile import Op


def check_order(
    placement: Placement,
    ops: Sequence[Op],
    stage: Mapping[int, int],
    rank: Mapping[int, int],
    copies: Mapping[str, int] | None = None,
) -> None:
    """Raise `InputError` naming the first pair of ops that the schedule exchanges.

    `ops` in program order; `stage` and `rank` by op id, as the schedule gives them; `copies` of
    tiles that have several.
    """
    turns = copies or {}
    distances = sorted({0, 1, *turns.values()})
    for later in ops:
        for earlier in ops:
            for distance in distances:
                if distance == 0 and earlier.id >= later.id:
                    continue
                shared = _conflict(placement, earlier, later, distance, turns)
                if not shared:
                    continue
                first = (stage[earlier.id], rank[earlier.id])
                second = (distance + stage[later.id], rank[later.id])
                if earlier is later or first < second:
                    continue
                raise InputError(_message(earlier, later, shared, distance))


def _conflict(
    placement: Placement, first: Op, second: Op, distance: int, copies: Mapping[str, int]
) -> str:
    reads = [{v.name for v in placement.fusion.sources(op)} for op in (first, second)]
    writes = [{op.dst.name} if op.dst is not None else set[str]() for op in (first, second)]
    common = (writes[0] & (reads[1] | writes[1])) | (reads[0] & writes[1])
    same = {name for name in common if distance % copies.get(name, 1) == 0}
    if first is not second and any(
        {first.id, second.id} <= {op.id for op in chain} for chain in memory_chains((first, second))
    ):
        assert first.array is not None
        return first.array.name
    return min((name for name in same if name not in placement.shared), default="")


def _message(first: Op, second: Op, tile: str, distance: int) -> str:
    later = f"{second.label} of the {'next' if distance else 'same'} iteration"
    return (
        f"the schedule runs {later} before {first.label}, but both touch tile {tile}, so the "
        f"program's meaning would change ({first.where}, {second.where}); keep their order, or "
        "give the tile copies (params['copies'])"
    )
