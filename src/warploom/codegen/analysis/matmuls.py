"""How a matmul is cut into wgmma instructions side by side."""

from __future__ import annotations

from warploom.codegen.ir.block import BlockProgram
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


def held_rings(block: BlockProgram) -> frozenset[str]:
    """The rings with a tile of which groups hold columns in registers (`held_steps`).

    Raises `InputError` where the tile is not loaded once a task, or not of 16 bits and the first
    operand of matmuls that contract its columns.
    """
    placement, found = block.placement, set[str]()
    program = placement.program
    often = {name for loop in program.loops() for name in block.filled_in(loop)}
    for name, steps in block.launch.held_steps.items():
        readers = [op for op in program.ops() if op.kind == "mma" and op.srcs[0].name == name]
        tiles = [op.dst for op in program.ops() if op.dst is not None and op.dst.name == name]
        ring = block.home(name)[0].name if readers and placement.is_shared(tiles[0]) else ""
        held = ring and ring not in often and placement.abreast == 1 and not block.launch.divided
        if not held or not all(
            op.srcs[0].type.dtype.bytes == 2
            and placement.operand(op, 0).k_major
            and set(steps) <= set(range(placement.operand(op, 0).steps))
            for op in readers
        ):
            raise InputError(
                f"launch plan: held_steps={{{name!r}: {steps}}}: expected a tile of 16 bits that "
                "is loaded once a task, the first operand of matmuls, and steps that they have"
            )
        found.add(ring)
    return frozenset(found)
