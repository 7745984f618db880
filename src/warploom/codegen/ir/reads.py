"""What ops beside matmuls read: refused at the user's line where no code reads it.

Tiles that are loaded for a matmul lie in shared memory, in its layout; numbers that an iteration
reads, axes of several dimensions and stacked parts are the producer's to handle.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.ir.fuse import Fusion, works_on_elements
from warploom.codegen.ir.layout import SharedTile
from warploom.errors import InputError
from warploom.tile import Op, Program
from warploom.tile.ir import joint_axis

SLOT_COLUMNS = 16  # of a tile that one ldmatrix brings from a slot into registers


def check_readers(
    program: Program, shared: dict[str, tuple[Op, SharedTile]], fusion: Fusion
) -> None:
    """Raise where another op than a matmul reads a tile in its slot and no code does that."""
    for op in program.ops():
        found = [var for var in fusion.sources(op) if var.name in shared]
        if op.kind == "mma" or op.id not in fusion.kept or not found:
            continue
        if op.dst is not None and op.dst.name in shared:
            continue
        kind = op.srcs[0].type if op.dst is None else op.dst.type
        plain = works_on_elements(op) and set(kind.names) == set(found[0].type.names)
        wide = kind.dtype.bits != 8 and (found[0].type.dtype.bytes == 2 or op.kind == "cast")
        if not plain or not wide or min(kind.shape) % SLOT_COLUMNS:
            raise InputError(
                f"{op.where}: {op.kind} of {kind} reads {found[0].name}: {found[0].type}, which is "
                "loaded for a matmul and so lies in shared memory in the matmul's layout: 16-bit "
                f"tiles with a multiple of {SLOT_COLUMNS} columns come from there into arithmetic "
                f"on each element ({found[0].name}.copy() keeps one in registers); load the tile a "
                "second time"
            )


def check_reads(program: Program, shared: Mapping[str, tuple[Op, SharedTile]]) -> None:
    """Raise where another op than a load into shared memory needs what iterations read."""
    names = {read.name for loop in program.loops() for read in loop.reads}
    for op in program.ops():
        if op.dst is not None and op.dst.name in shared:
            continue
        places = [op.start] if op.start is not None else []
        places += [place for span in op.spans for place in span.starts]
        if found := names & {name for place in places for name in place.symbols()}:
            raise InputError(
                f"{op.where}: {op.kind} at {min(found)}, which an iteration reads: beside matmuls "
                "only loads that feed a matmul take such numbers, the producer reads them"
            )
        if op.kind == "load" and joint_axis(op.spans):
            raise InputError(
                f"{op.where}: load of an axis that several dimensions are into registers: only "
                "loads that feed a matmul have code for it"
            )
        if any(span.others for span in op.spans):
            raise InputError(
                f"{op.where}: load of stacked parts into registers: only loads that feed a matmul "
                "stack what they take; load each part into a tile of its own"
            )
