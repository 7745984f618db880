"""Where the bytes of a shared tile are: TMA boxes, swizzles and wgmma descriptors as arithmetic.

A tile `[rows, cols]` lies in shared memory as panels of `width` bytes of columns, one after the
other; a panel is rows x width bytes, swizzled by XOR of address bits. One TMA box writes one panel
and one descriptor reads it, so both are derived here from the same numbers. Columns that fill no
whole number of panels leave the last one partly unused: its box brings what lies beyond them.
Sources: PTX ISA 9.x, "Shared Memory Matrix Layout" and "Matrix descriptor".
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import InputError
from warploom.tile import TileType

ALIGNMENT = 1024  # bytes: the longest repeat of a swizzle, so descriptors have base offset 0
MAX_BOX = 256  # elements of one box dimension
MAX_ROWS = 2 * MAX_BOX  # of a tile, copied by several boxes
CORE_ROWS = 8  # rows of a core matrix
CHUNK = 16  # bytes that a swizzle moves together
INSTRUCTION_K_BYTES = 32  # bytes of the contracted axis one wgmma consumes
FIELD = 0x3FFF  # descriptor fields are 14 bits of bytes / 16

# swizzle width in bytes -> (XOR mask on address bits 4-6, descriptor code, TMA swizzle enum)
SWIZZLES = {128: (0x70, 1, 3), 64: (0x30, 2, 2), 32: (0x10, 3, 1)}


def swizzle(address: int, width: int) -> int:
    """The swizzled byte address: 16-byte chunks exchanged within 8 rows (its own inverse)."""
    return address ^ ((address >> 3) & SWIZZLES[width][0])


@dataclass(frozen=True)
class SharedTile:
    """The shared-memory form of a tile `[rows, cols]`; `cols` is contiguous in global memory."""

    rows: int
    cols: int
    element: int
    width: int

    @property
    def panel_cols(self) -> int:
        """Columns of one panel."""
        return self.width // self.element

    @property
    def panels(self) -> int:
        """Panels side by side; the last may be wider than what is left of the columns."""
        return -(-self.cols // self.panel_cols)

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel."""
        return self.rows * self.width

    @property
    def swizzled(self) -> int:
        """The width of the swizzle, 0 where there is none."""
        return self.width if self.rows > 1 else 0

    @property
    def bytes(self) -> int:
        """Bytes of the tile's panels."""
        return self.panels * self.panel_bytes

    def address(self, row: int, col: int) -> int:
        """Byte offset of an element from the tile's base, as a TMA load leaves it."""
        panel, inner = divmod(col, self.panel_cols)
        return panel * self.panel_bytes + swizzle(
            row * self.width + inner * self.element, self.width
        )


def vector_tile(kind: TileType) -> SharedTile:
    """The layout of a vector of that type: one row, which no swizzle changes."""
    (length,) = kind.shape
    row_bytes = length * kind.dtype.bytes
    if length > MAX_BOX or row_bytes % CHUNK:
        raise InputError(
            f"vector {kind} of {row_bytes} B: the copy engine brings at most {MAX_BOX} elements, "
            f"a multiple of {CHUNK} B"
        )
    return SharedTile(1, length, kind.dtype.bytes, row_bytes)


def boxes(rows: int) -> int:
    """How many TMA boxes, equally high, copy so many rows of a panel."""
    count = -(-rows // MAX_BOX)
    while rows % (count * CORE_ROWS):
        count += 1
    return count


def panel_width(row_bytes: int) -> int:
    """Bytes of a panel's rows: the widest swizzle that divides the row, 0 where none does.

    Panels of 32 B would be many boxes for a long row: it gets wide panels, the last one not full.
    """
    widest, *narrower = SWIZZLES
    exact = next((width for width in SWIZZLES if row_bytes % width == 0), 0)
    return widest if row_bytes > widest and exact < narrower[0] else exact


def padded(cols: int, element: int) -> int:
    """The columns that the panels of a tile with so many columns have room for."""
    width = panel_width(cols * element)
    return -(-cols * element // width) * width // element if width else cols


def shared_tile(kind: TileType) -> SharedTile:
    """The layout of a tile of that type, with the widest swizzle its rows allow.

    Raises `InputError` when no swizzle fits or the rows exceed what a TMA box can take.
    """
    if len(kind.axes) != 2:
        raise InputError(f"tile {kind}: only two-dimensional tiles go through shared memory")
    rows, cols = kind.shape
    row_bytes = cols * kind.dtype.bytes
    width = panel_width(row_bytes)
    if not width or row_bytes % CHUNK:
        raise InputError(
            f"tile {kind}: rows of {row_bytes} B, expected a multiple of 32 B up to 128 B and of "
            f"{CHUNK} B beyond for TMA"
        )
    if rows > MAX_ROWS or rows % CORE_ROWS:
        raise InputError(f"tile {kind}: {rows} rows, expected a multiple of 8, at most {MAX_ROWS}")
    tile = SharedTile(rows, cols, kind.dtype.bytes, width)
    if tile.panels > 1 and tile.panel_bytes % (CORE_ROWS * tile.width):
        raise InputError(f"tile {kind}: panels of {tile.panel_bytes} B are not whole repeats")
    return tile


@dataclass(frozen=True)
class Operand:
    """A wgmma operand in shared memory.

    k_major     the contracted axis is contiguous ("K-major"); otherwise the transpose bit is set
    lbo, sbo    leading and stride byte offsets of the descriptor
    step        byte offset from one 32-byte K step to the next is `offset(step, ...)`
    """

    tile: SharedTile
    k_major: bool

    @property
    def lbo(self) -> int:
        """Between panels along M or N (MN-major); ignored by the hardware when K-major."""
        return 16 if self.k_major else self.tile.panel_bytes

    @property
    def sbo(self) -> int:
        """Between groups of 8 rows."""
        return CORE_ROWS * self.tile.width

    @property
    def depth(self) -> int:
        """Elements of the contracted axis in the tile."""
        return self.tile.cols if self.k_major else self.tile.rows

    @property
    def steps(self) -> int:
        """Instructions to go through the contracted axis."""
        return self.depth * self.tile.element // INSTRUCTION_K_BYTES

    def offset(self, step: int, first: int = 0) -> int:
        """Byte offset of K step `step` for the part of the operand from row/column `first` on."""
        tile = self.tile
        if self.k_major:
            panel, inner = divmod(step * INSTRUCTION_K_BYTES, tile.width)
            return panel * tile.panel_bytes + first * tile.width + inner
        if first % tile.panel_cols:
            raise InputError(
                f"operand part from {first}: expected a multiple of the panel, {tile.panel_cols}"
            )
        rows = step * INSTRUCTION_K_BYTES // tile.element
        return first // tile.panel_cols * tile.panel_bytes + rows * tile.width

    def words(self) -> tuple[int, int]:
        """The constant low and high 32 bits of the descriptor; the address goes in the low one."""
        low = (self.lbo >> 4 & FIELD) << 16
        high = (self.sbo >> 4 & FIELD) | SWIZZLES[self.tile.width][1] << 30
        return low, high
