"""Register tiles that a matmul reads from shared memory: a copy after every op that writes one.

The copy lies in the layout of a loaded operand (`ir.layout`), in a region of the group's own, or
where every group writes its part in one of all, between two meetings (`passes.meetings`).
Joins keep the op behind the matmuls that read the copy before (`analysis.hazards`).
"""

from __future__ import annotations

from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.values import Values
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]


def stage_lines(values: Values, op: Op, names: Names, fence: bool) -> list[str]:
    """Copy the tile that `op` has written; `fence` where the copy engine's proxy reads it."""
    assert op.dst is not None
    tile = values.placement.staged[op.dst.name]
    if values.placement.transposed(op.dst.type):
        raise InputError(
            f"{op.where}: tile {op.dst.name} is transposed in its registers and a matmul's operand "
            "in shared memory: there is no code for both; let the matmul contract its other axis"
        )
    common = op.dst.name in values.placement.common
    sync = [] if common else [group_sync(values.placement.parts)]
    first = values.first_row(op.dst.type.names[0], op.dst.type.shape[0])
    row = f"{f'{first} + ' if common else ''}t * 64 + thread_row + i % 2 * 8"
    byte = "(i / 2 * 8 + thread_col) * 2"
    offset = f"tile_offset<{tile.width}, {tile.rows}>({row}, {byte})"
    return [
        *sync,
        "#pragma unroll",
        f"for (int t = 0; t < {values.blocks(op.dst.type)}; ++t)",
        "#pragma unroll",
        f"  for (int i = 0; i < {tile.cols // 4}; ++i)",
        f"    shared_write({op.dst.name}_room + {offset}, "
        f"int({values.word(op.dst, 't', 'i', names)}));",
        *(["fence_async();"] if fence else []),
        *sync,
    ]
