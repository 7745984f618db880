"""Where a tile's elements are among the threads, and the C++ that names one of them.

    tile    T x[groups of rows][columns held]
    row     T x[groups of rows]     a vector beside rows: the same in all lanes
    col     T x[columns held]       a vector beside columns: the same in all row threads
    scalar  T x                     the same everywhere

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
C_TYPES = {"float": "float", "int": "int", "bool": "bool"}
# element types as they are in memory
MEMORY_TYPES = {
    "fp32": "float",
    "int32": "int",
    "bf16": "Bf16",
    "fp16": "Fp16",
    "e4m3": "E4m3",
    "e5m2": "E5m2",
    "bool": "unsigned char",
}
BESIDE_A_TILE = 24  # registers of a thread for everything else


@dataclass(frozen=True)
class Layout:
    """Index arithmetic of a schedule."""

    schedule: SimtSchedule

    def groups(self, rows: int) -> int:
        """Row groups of that many rows."""
        return -(-rows // self.schedule.rows)

    def chunks(self, cols: int) -> int:
        """Chunks of that many columns."""
        return -(-cols // (self.schedule.lanes * self.schedule.vector))

    def held(self, cols: int) -> int:
        """Columns a thread holds."""
        return self.chunks(cols) * self.schedule.vector

    def row(self, i: str = "i") -> str:
        """The row of group i."""
        if self.schedule.rows == 1:
            return f"({i})"
        return f"(({i}) * {self.schedule.rows} + thread_row)"

    def col(self, j: str = "j") -> str:
        """The column of held element j."""
        lanes, vector = self.schedule.lanes, self.schedule.vector
        if vector == 1:
            return f"(({j}) * {lanes} + thread_col)"
        return f"((({j}) / {vector} * {lanes} + thread_col) * {vector} + ({j}) % {vector})"

    def ragged_rows(self, rows: int) -> bool:
        """Whether some threads hold rows that the tile does not have."""
        return rows % self.schedule.rows != 0

    def ragged_cols(self, cols: int) -> bool:
        """The same for columns."""
        return cols % (self.schedule.lanes * self.schedule.vector) != 0

    def extents(self, kind: TileType, form: str) -> tuple[int, ...]:
        """The C array extents."""
        if form == TILE:
            return self.groups(kind.shape[0]), self.held(kind.shape[1])
        if form == ROW:
            return (self.groups(kind.shape[0]),)
        return (self.held(kind.shape[0]),) if form == COL else ()

    def peers(self, form: str) -> str:
        """Template arguments of the threads that share the columns (COL) or rows (ROW)."""
        lanes, rows = self.schedule.lanes, self.schedule.rows
        return f"{lanes}, 1" if form == COL else f"{rows}, {lanes}"


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
