"""The panels in which a group's result goes through shared memory, each one box of a TMA store.

A panel is some rows of the array by at most 128 bytes of its columns, swizzled. Panels have one
shape for each store; where it does not divide the tile the last panel begins earlier, so that it
writes some elements a second time, with the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.layout import CHUNK, MAX_BOX, SharedTile, panel_width
from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op


@dataclass(frozen=True)
class StorePanels:
    """How one group stores its part of a tile.

    tile        the layout of one panel, in the array's order of dimensions
    origins     (row, column) of each panel's first element in the group's part of the tile
    transposed  the array's columns lie over the rows of the registers: panels are transposed on
                the way, one block of 64 register rows wide
    """

    tile: SharedTile
    origins: tuple[tuple[int, int], ...]
    transposed: bool


def store_panels(placement: Placement, plan: LaunchPlan, op: Op) -> StorePanels:
    """The panels of a store; raises `InputError` for a tile that has none."""
    kind = placement.local(op.srcs[0].type)
    rows, cols = kind.shape
    element = kind.dtype.bytes
    transposed = placement.transposed(op.srcs[0].type)
    high = rows
    if transposed:
        width = ROWS_PER_GROUP * element
        high = min(plan.store_rows or rows, rows)
    else:
        width = panel_width(cols * element)
    if not width or cols * element % CHUNK or rows % 8 or high > MAX_BOX:
        raise InputError(
            f"{op.where}: store of {rows} rows of {cols * element} B a group in panels of {high} "
            f"rows: expected a multiple of 8 rows, at most {MAX_BOX} a panel, and of 16 B"
        )
    tile = SharedTile(high, width // element, element, width)
    found = tuple(
        (row, col) for col in _starts(cols, tile.cols) for row in _starts(rows, tile.rows)
    )
    if op.kind == "store_add" and len(found) * tile.rows * tile.cols > rows * cols:
        raise InputError(
            f"{op.where}: store add=True of {rows} x {cols} elements a group in panels of "
            f"{tile.rows} x {tile.cols}: these would add some twice; make the tile a multiple"
        )
    return StorePanels(tile, found, transposed)


def store_slot(block: BlockProgram) -> tuple[str, SharedTile] | None:
    """The ring and the tile of the plan's `store_over`; raises when no group has rows of it."""
    placement, name = block.placement, block.schedule.launch.store_over
    if not name:
        return None
    found = [ring for ring in block.rings if any(name in b.names for b in ring.buffers)]
    if not found or found[0].depth != 1 or len(found[0].buffers) != 1:
        raise InputError(
            f"launch plan: store_over={name!r}: expected a tile with a ring of its own of one slot"
        )
    load, tile = placement.shared[name]
    rows = "" if load.dst is None else load.dst.type.names[0]
    if placement.parts > 1 and rows != placement.split:
        raise InputError(
            f"{load.where}: store_over={name!r}: its rows are {rows!r}, not {placement.split!r}, "
            "so that groups have no rows of their own"
        )
    return found[0].name, tile


def check_over(slot: SharedTile, panels: StorePanels, parts: int, op: Op) -> None:
    """Raise when the panels of a group are not its rows of the panels of an operand's slot."""
    tile = panels.tile
    same = (slot.rows, slot.width, slot.element) == (tile.rows * parts, tile.width, tile.element)
    if panels.transposed or not same or len(panels.origins) > slot.panels:
        raise InputError(
            f"{op.where}: store of {len(panels.origins)} panels of {tile.rows} rows of "
            f"{tile.width} B a group over {slot.panels} of {slot.rows} rows of {slot.width} B: "
            "expected equal panels"
        )


def _starts(extent: int, step: int) -> list[int]:
    """Where pieces of one size begin that cover an extent; the last ends with it."""
    return [*range(0, extent - step, step), extent - step]
