"""How a matmul is cut into wgmma instructions side by side."""

from __future__ import annotations

from warploom.codegen.ir.place import Placement
from warploom.errors import InputError
from warploom.tile import Op

MOST_COLUMNS = 256  # of one wgmma


def instruction_columns(placement: Placement, op: Op) -> list[tuple[int, int]]:
    """(first column, columns) of the instructions side by side that make a matmul's columns.

    Raises `InputError` for a number of columns that no two instructions have.
    """
    assert op.dst is not None
    n = placement.local(op.dst.type).shape[1]
    if n % 8 or not 8 <= n <= 2 * MOST_COLUMNS:
        raise InputError(
            f"{op.where}: matmul with {n} columns: wgmma takes 8 to {MOST_COLUMNS} in steps of 8, "
            "and at most two side by side"
        )
    if n <= MOST_COLUMNS:
        return [(0, n)]
    # An MN-major operand can only be entered at the beginning of a panel.
    right = placement.operand(op, 1)
    grain = 8 if right.k_major else right.tile.panel_cols
    first = -(-n // 2 // grain) * grain
    return [(0, first), (first, n - first)]
