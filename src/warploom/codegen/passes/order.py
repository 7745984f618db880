"""The check that a schedule keeps the program's meaning on one warp group.

For every pair of ops of a loop body that touch one register tile, at least one writing it, the
emitted order must be the sequential one. Position of op v of iteration i: (i + stage(v), rank(v)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from warploom.codegen.ir.memory_order import memory_chains
from warploom.codegen.ir.place import Placement
from warploom.errors import InputError
from warploom.tile import Op


def check_order(
    placement: Placement, ops: Sequence[Op], stage: Mapping[int, int], rank: Mapping[int, int]
) -> None:
    """Raise `InputError` naming the first pair of ops that the schedule exchanges.

    `ops` in program order; `stage` and `rank` by op id, as the schedule gives them.
    """
    pairs = [(op, _touched(placement, op)) for op in ops]
    for (later, of_later), (earlier, of_earlier) in product(pairs, repeat=2):
        for distance in (0, 1):
            if earlier is later or (distance == 0 and earlier.id >= later.id):
                continue
            first = (stage[earlier.id], rank[earlier.id])
            if first < (distance + stage[later.id], rank[later.id]):
                continue
            shared = _in_memory(earlier, later) or min(of_earlier.conflicts(of_later), default="")
            if shared:
                raise InputError(_message(earlier, later, shared, distance))


@dataclass(frozen=True)
class _Touched:
    """The register tiles that an op reads and writes."""

    reads: frozenset[str]
    writes: frozenset[str]

    def conflicts(self, other: _Touched) -> frozenset[str]:
        """The tiles that both touch, and one of them writes."""
        return (self.writes & (other.reads | other.writes)) | (self.reads & other.writes)


def _touched(placement: Placement, op: Op) -> _Touched:
    reads = {var.name for var in placement.fusion.sources(op)} - set(placement.shared)
    writes = set[str]() if op.dst is None else {op.dst.name} - set(placement.shared)
    return _Touched(frozenset(reads), frozenset(writes))


def _in_memory(first: Op, second: Op) -> str:
    """The array whose accesses of two ops keep their order, if there is one."""
    both = {first.id, second.id}
    if not any(both <= {op.id for op in chain} for chain in memory_chains((first, second))):
        return ""
    assert first.array is not None
    return first.array.name


def _message(first: Op, second: Op, tile: str, distance: int) -> str:
    later = f"{second.label} of the {'next' if distance else 'same'} iteration"
    return (
        f"the schedule runs {later} before {first.label}, but both touch tile {tile}, so the "
        f"program's meaning would change ({first.where}, {second.where}); keep their order"
    )
