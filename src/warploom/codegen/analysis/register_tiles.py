"""How register tiles lie over the threads of a compute group.

Layout (PTX ISA, wgmma accumulator fragment): a warp group holds 64 rows per block `t`; lane l of
warp w holds rows 16 w + l / 4 (h = 0) and + 8 (h = 1) and, of every 8 columns j, columns
8 j + 2 (l % 4) and + 1. Element i of a thread is j = i / 4, h = i / 2 % 2, column parity i % 2.

    tile    x[blocks][columns / 2]          16-bit: x[blocks][columns / 4], packed pairs
                                            8-bit operand: x[blocks][columns / 8], four to a word
    row     v[blocks][2]                    one value a row, the same in the 4 lanes of a row
    col     w[columns / 4]                  one value a column this thread holds
    lane    u[length / 32]                  a vector along no axis of a tile: neighbours, of which
                                            each warp has all
    scalar  s
"""

from __future__ import annotations

from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement
from warploom.errors import InputError
from warploom.tile import TileType, Var
from warploom.tile.dtypes import FP8, HALVES

LANES = 32  # of a warp
COLUMN_GROUP = 8  # columns that the four lanes of a row hold two by two
PACKED = HALVES  # element types of which a register holds two


class RegisterTiles:
    """The forms and extents of the register tiles of a placement."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def form(self, kind: TileType) -> str:
        """tile, row, col, lane or scalar."""
        if len(kind.axes) == 2:
            return "tile"
        if not kind.axes:
            return "scalar"
        axis = kind.names[0]
        if axis in self.placement.rows:
            return "row"
        return "col" if axis in self.placement.cols else "lane"

    def blocks(self, kind: TileType) -> int:
        """Blocks of 64 rows this group holds."""
        rows = self.placement.oriented(self.placement.local(kind)).shape[0]
        if rows % ROWS_PER_GROUP:
            raise InputError(f"tile {kind}: {rows} rows in a group, expected a multiple of 64")
        return rows // ROWS_PER_GROUP

    def columns(self, kind: TileType) -> int:
        """Columns of a tile in the layout of its registers."""
        return self.placement.oriented(self.placement.local(kind)).shape[1]

    def extents(self, kind: TileType) -> tuple[int, ...]:
        """The array extents of a register tile, in registers of one thread."""
        form = self.form(kind)
        columns = self.placement.oriented(self.placement.local(kind)).shape[-1:]
        if form in ("tile", "col") and columns[0] % COLUMN_GROUP:
            raise InputError(
                f"tile {kind}: {columns[0]} columns beside matmuls, expected a multiple of "
                f"{COLUMN_GROUP}"
            )
        if form == "tile":
            return self.blocks(kind), self.columns(kind) // (4 if kind.dtype.name in PACKED else 2)
        if form == "row":
            return self.blocks(kind), 2
        if form == "lane":
            return (-(-kind.shape[0] // LANES),)
        return (columns[0] // 4,) if form == "col" else ()

    def is_fragment(self, var: Var) -> bool:
        """Whether an 8-bit tile is a matmul's first operand: four to a word, in its order."""
        return var.type.dtype.name in FP8 and _original(var.name) in self.placement.left_operands

    def part_size(self, axis: str, size: int) -> int:
        """Places from one group's part to the next along an axis of that size; 0: all have all."""
        if axis not in self.placement.splits or self.placement.parts == 1:
            return 0
        return size // self.placement.parts


def _original(name: str) -> str:
    """The tile that a name is a copy of; its own for others."""
    tile, mark, number = name.rpartition("_copy")
    return tile if mark and number.isdigit() else name
