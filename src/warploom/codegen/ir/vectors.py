"""Vectors that loops load for elementwise ops: which these are, and how the producer brings one."""

from __future__ import annotations

from collections import Counter

from warploom.codegen.ir.fuse import ELEMENTWISE
from warploom.codegen.ir.layout import CHUNK, SharedTile, vector_tile
from warploom.errors import InputError
from warploom.tile import Op, Program
from warploom.tile.index import multiple_of
from warploom.tile.ops import OPS
from warploom.tile.typing import QUAD_PLACES


def loaded_vectors(program: Program, axes: frozenset[str]) -> frozenset[str]:
    """The vectors along some axes that are loaded for elementwise ops and that nothing writes."""
    loads = {op.dst.name: op.dst.type for op in program.ops() if op.kind == "load" and op.dst}
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    other = {
        src.name
        for op in program.ops()
        for src in op.srcs
        if OPS[op.kind].group not in ELEMENTWISE and op.kind != "cast"
    }
    return frozenset(
        name
        for name, kind in loads.items()
        if len(kind.axes) == 1
        and kind.names[0] in axes
        and name not in other
        and writers[name] == 1
    )


def brought(load: Op) -> SharedTile:
    """How a vector lies in shared memory that the producer brings; raises where it cannot."""
    assert load.dst is not None
    start = load.spans[-1].start
    if multiple_of(start) * load.dst.type.dtype.bytes % CHUNK:
        raise InputError(
            f"{load.where}: {load.dst} from {start} on: the copy engine brings vectors that begin "
            f"at multiples of {CHUNK} B; let the compute groups load it"
        )
    fragments = load.array is not None and load.array.fragments
    if fragments and (multiple_of(start) % QUAD_PLACES or load.dst.type.shape[0] % QUAD_PLACES):
        raise InputError(
            f"{load.where}: {load.dst} from {start} on, of an array in fragments: expected "
            f"multiples of {QUAD_PLACES} elements"
        )
    try:
        return vector_tile(load.dst.type)
    except InputError as error:
        raise InputError(f"{load.where}: {error}") from None
