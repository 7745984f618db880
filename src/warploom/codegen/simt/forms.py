"""Where a tile's elements are among the threads.

    tile    x[groups of rows][columns held]
    row     x[groups of rows]       a vector beside rows: the same in all lanes
    col     x[columns held]         a vector beside columns: the same in all row threads
    scalar  x                       the same everywhere

A transpose may need a vector beside rows at one place and beside columns at another. A vector has
the form that its first writer gives it, and is exchanged through shared memory for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.analysis.entry import entry_registers
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile import Op, Program, TileType, Var
from warploom.tile.ops import OPS

TILE, ROW, COL, SCALAR = "tile", "row", "col", "scalar"
BESIDE_A_TILE = 24  # registers of a thread for everything else


@dataclass(frozen=True)
class Layout:
    """How many rows and columns a thread holds under a schedule."""

    schedule: SimtSchedule

    @property
    def lanes(self) -> int:
        """Threads along the columns, of all blocks that share them."""
        return self.schedule.lanes * self.schedule.cluster

    def groups(self, rows: int) -> int:
        """Row groups of that many rows."""
        return -(-rows // self.schedule.rows)

    def chunks(self, cols: int) -> int:
        """Chunks of that many columns."""
        return -(-cols // (self.lanes * self.schedule.vector))

    def held(self, cols: int) -> int:
        """Columns a thread holds."""
        return self.chunks(cols) * self.schedule.vector

    def ragged_rows(self, rows: int) -> bool:
        """Whether some threads hold rows that the tile does not have."""
        return rows % self.schedule.rows != 0

    def ragged_cols(self, cols: int) -> bool:
        """The same for columns."""
        return cols % (self.lanes * self.schedule.vector) != 0

    def extents(self, kind: TileType, form: str) -> tuple[int, ...]:
        """The array extents of a tile of that form in one thread."""
        if form == TILE:
            return self.groups(kind.shape[0]), self.held(kind.shape[1])
        if form == ROW:
            return (self.groups(kind.shape[0]),)
        return (self.held(kind.shape[0]),) if form == COL else ()


def forms_of(program: Program) -> dict[str, str]:
    """The form of every variable; raises `InputError` for tiles of more than two axes."""
    rows, cols = set[str](), set[str]()
    for op in program.ops():
        if op.dst is not None and len(op.dst.type.axes) == 2:
            rows.add(op.dst.type.names[0])
            cols.add(op.dst.type.names[1])
    found: dict[str, str] = {var.name: SCALAR for var in program.scalars}
    for op in program.ops():
        if op.dst is None or op.dst.name in found:
            continue
        rank = len(op.dst.type.axes)
        if rank > 2:
            raise InputError(
                f"{op.where}: tile {op.dst.name}: {op.dst.type} has {rank} axes; SIMT kernels have "
                "tiles of at most two, index the others one at a time"
            )
        if rank == 2:
            found[op.dst.name] = TILE
        elif rank == 0:
            found[op.dst.name] = SCALAR
        else:
            found[op.dst.name] = _vector_form(op, op.dst, found, rows, cols)
    return found


def axis_form(kind: TileType, form: str, axis: str) -> str:
    """COL when the axis lies along the columns a thread holds, else ROW."""
    if form == TILE:
        return COL if axis == kind.names[1] else ROW
    return form


def wanted_form(kind: TileType, form: str, vector: TileType) -> str:
    """The form an operand must have to meet a result of type `kind` and that form."""
    if form != TILE or len(vector.axes) != 1:
        return form
    return ROW if vector.names[0] == kind.names[0] else COL


def _vector_form(op: Op, dst: Var, found: dict[str, str], rows: set[str], cols: set[str]) -> str:
    vectors = [found[src.name] for src in op.srcs if found.get(src.name) in (ROW, COL)]
    if OPS[op.kind].group == "reduce" and len(op.srcs[0].type.axes) == 2:
        return ROW if op.axis == op.srcs[0].type.names[1] else COL
    if vectors:
        return vectors[0]
    axis = dst.type.names[0]
    return ROW if axis in rows and axis not in cols else COL


def check_registers(layout: Layout, op: Op, form: str, arch: str) -> None:
    """Raise `InputError` when one tile is more than a thread can hold."""
    assert op.dst is not None
    held = entry_registers(layout.schedule.threads, arch)
    count = 1
    for extent in layout.extents(op.dst.type, form):
        count *= extent
    if count > held - BESIDE_A_TILE:
        threads = layout.schedule.threads
        # Beyond so many threads that their registers fill the file, more have fewer each.
        more = entry_registers(2 * threads, arch) == held
        raise InputError(
            f"{op.where}: tile {op.dst.name}: {op.dst.type} takes {count} registers of each of "
            f"{threads} threads, which have {held} for everything on {arch}; use "
            f"{'more threads or ' * more}a smaller tile"
        )
