"""Where every tile lives: shared memory (loads that feed a matmul) or registers (the rest).

Register tiles have the accumulator layout of wgmma: rows over warps and lanes, columns over
registers. An axis of a tile is therefore a *row* axis or a *column* axis, as the matmuls have it
that the tile takes part in; names are made to say so (`ir.axes`). No operation may reduce over the
split axis in registers. A matmul may contract a split row axis: its operand then lies in shared
memory, where every group leaves its part, and the groups share out the rows of the result.
Where the split axis is a column axis, groups have columns of the tiles with it, and all rows. What
has no part in it and depends on a matmul, the first group alone makes, and hands what the others
need of it to them through shared memory. With `LaunchPlan.divided` groups that split rows divide
such work, and each hands on what it has made.
A transposed tile keeps every element in its register: only the order of its axes' names changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from warploom.codegen.ir.axes import one_slot, separate_axes
from warploom.codegen.ir.fuse import Fusion, fuse, in_shared, slot_loads, turned_operands
from warploom.codegen.ir.layout import INSTRUCTION_K_BYTES, Operand, SharedTile, shared_tile
from warploom.codegen.ir.led import divided_work, led_by_one
from warploom.codegen.ir.memory_order import check_memory
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.reads import check_readers, check_reads
from warploom.codegen.ir.vectors import brought, loaded_vectors
from warploom.errors import InputError
from warploom.tile import Index, Loop, Op, Program, TileType, Var
from warploom.tile.dtypes import FP8
from warploom.tile.ops import OPS

ROWS_PER_GROUP = 64  # rows of one wgmma, one warp group


@dataclass(frozen=True)
class Placement:
    """The place of every variable of a program.

    program     with one name for each layout of an axis (`ir.axes`)
    shared      loads that land in shared memory, by variable: (load, layout); and what is turned
    turned      operands that warps of the loading group make of a loaded tile, in shared memory: by
                variable, the loaded one (`fuse.turned_operands`)
    staged      register tiles that a matmul wants in shared memory, with their layout there: every
                op that writes one leaves a copy in the group's own region, or where the tile is cut
                over the groups its part in the region of all
    whole       parts do not leave loops early
    rows, cols  the row axes and column axes of register tiles
    parts       compute groups the split axis is cut into
    splits      the axes that are cut: the split axis, and the rows of matmuls that contract a cut
                axis of a staged tile, or their columns where a group would have less than 64 rows
    common      the staged tiles of which every group leaves its part in one region; of a second
                operand whose columns are cut, each group has its own in its own
    led         the ops that one group alone does, by number, with the number of the group
    abreast     groups that do tasks of their own beside each other (`LaunchPlan`)
    in_turn     the ops of which groups do the whole in turn, one in an iteration, by number
    handed      tiles of these that the other groups take from shared memory: operands of matmuls,
                which are staged for all, and vectors along rows
    spread      vectors along columns that loops load for elementwise ops: each thread loads some
                elements, and all of the group read them from its shared memory; those that the
                producer brings are `shared` instead
    """

    program: Program
    fusion: Fusion
    shared: dict[str, tuple[Op, SharedTile]]
    rows: frozenset[str]
    cols: frozenset[str]
    split: str
    parts: int
    staged: dict[str, SharedTile] = field(default_factory=dict[str, SharedTile])
    whole: bool = False
    splits: frozenset[str] = frozenset()
    common: frozenset[str] = frozenset()
    spread: frozenset[str] = frozenset()
    turned: dict[str, str] = field(default_factory=dict[str, str])
    led: Mapping[int, int] = field(default_factory=dict[int, int])
    handed: frozenset[str] = frozenset()
    in_turn: frozenset[int] = frozenset()
    abreast: int = 1

    @property
    def groups(self) -> int:
        """Compute groups of a block."""
        return self.parts * self.abreast

    def does(self, op: Op, part: int, iteration: int | None = None) -> bool:
        """Whether the group of that number does an op, and does not at most take its result; in an
        iteration of its loop, counted from 0, or in any."""
        if op.id in self.in_turn and iteration is not None:
            return iteration % self.parts == part
        return self.led.get(op.id, part) == part

    def leader(self, tile: str) -> int:
        """The number of the group that makes a tile which it hands on."""
        ops = self.program.ops()
        return next(self.led[op.id] for op in ops if op.dst and op.dst.name == tile)

    def read_in_turn(self, tile: str) -> bool:
        """Whether a tile of all groups is read by one group in an iteration."""
        return any(
            op.id in self.in_turn and tile in {var.name for var in op.srcs[:2]}
            for op in self.program.ops()
        )

    def is_split(self, kind: TileType) -> bool:
        """Whether every compute group holds a part of its own of a tile."""
        return self.parts > 1 and not self.splits.isdisjoint(kind.names)

    def local(self, kind: TileType) -> TileType:
        """The part of a tile that one compute group holds."""
        for axis in self.splits.intersection(kind.names) if self.parts > 1 else ():
            kind = kind.resized(axis, kind.size(axis) // self.parts)
        return kind

    def until(self, loop: Loop) -> Index | None:
        """Where a part may leave a loop early, if the loop says so for the split axis."""
        ours = {f"{self.split}.begin", f"{self.split}.end"}
        if loop.until is None or self.parts == 1 or self.whole or self.common:
            return None
        parts = {name for name in loop.until.symbols() if "." in name}
        return loop.until if parts <= ours else None

    def oriented(self, kind: TileType) -> TileType:
        """The type with its row axis first: a tile and its transpose are the same registers."""
        if len(kind.axes) == 2 and kind.names[0] in self.cols and kind.names[1] in self.rows:
            return TileType(kind.dtype, tuple(reversed(kind.axes)))
        return kind

    def transposed(self, kind: TileType) -> bool:
        """Whether a register tile of that type has its first axis over columns."""
        return self.oriented(kind) != kind

    @cached_property
    def left_operands(self) -> frozenset[str]:
        """The first operands of matmuls by name, and the 8-bit tiles that they are copied from."""
        found = {op.srcs[0].name for op in self.program.ops() if op.kind == "mma"}
        for op in reversed(tuple(self.program.ops())):
            if op.kind in ("copy", "where") and op.dst is not None and op.dst.name in found:
                found |= {src.name for src in op.srcs if src.type.dtype.name in FP8}
        return frozenset(found)

    @property
    def part_size(self) -> int:
        """How much of the split axis one compute group holds."""
        for op in self.program.ops():
            if op.dst is not None and self.split in op.dst.type.names:
                return op.dst.type.size(self.split) // self.parts
        return 0

    def operand(self, op: Op, which: int) -> Operand:
        """The shared operand `which` (0 or 1) of a matmul."""
        var = op.srcs[which]
        tile = self.staged.get(var.name) or self.shared[var.name][1]
        return Operand(tile, var.type.names[1] == contracted(op))

    def from_registers(self, op: Op) -> bool:
        """Whether a matmul takes its first operand from registers."""
        left = op.srcs[0]
        elsewhere = left.name in self.shared or left.name in self.handed
        return not elsewhere and left.type.names[1] == contracted(op)

    def lies(self, axis: str) -> str:
        """Over what an axis of a register tile lies: rows, columns, or the lanes of every warp."""
        return "rows" if axis in self.rows else "columns" if axis in self.cols else "lanes"

    def is_shared(self, var: Var) -> bool:
        """Whether the variable lives in shared memory."""
        return var.name in self.shared

    @cached_property
    def only_turned(self) -> frozenset[str]:
        """The loaded tiles that nothing but warps that turn them reads."""
        read = {src.name for op in self.program.ops() if op.kind == "mma" for src in op.srcs[:2]}
        return frozenset(self.turned.values()) - read

    def slots_read(self, op: Op) -> list[Var]:
        """The tiles that an op reads in their slots: as a matmul, or element by element."""
        read = op.srcs[:2] if op.kind == "mma" else self.fusion.sources(op)
        return [var for var in read if self.is_shared(var)]


def contracted(op: Op) -> str:
    """The axis a matmul contracts."""
    (axis,) = [name for name in op.srcs[0].type.names if name in op.srcs[1].type.names]
    return axis


def place(
    program: Program,
    split: str,
    parts: int,
    vectors: bool = False,
    in_turn: bool = False,
    share_vectors: bool = False,
    divided: bool = False,
) -> Placement:
    """Place every variable; raises `InputError` at the user's line when that cannot be done.

    With `vectors` the producer brings what would be `spread`, and vectors along rows too; with
    `in_turn` groups share out iterations where they would share out a product (`Placement`).
    """
    program = separate_axes(one_slot(program))
    check_memory(program)
    fusion = fuse(program)
    turned = turned_operands(program)
    loads = {
        op.dst.name: op
        for op in program.ops()
        if op.dst is not None and (op.kind == "load" or op.dst.name in turned)
    }
    shared: dict[str, tuple[Op, SharedTile]] = {}
    staged: dict[str, SharedTile] = {}
    for op in program.ops():
        if op.kind == "mma":
            _place_operands(op, loads, shared, staged)
    for name in sorted(slot_loads(program) - set(shared)):
        shared[name] = (loads[name], shared_tile(_typed(loads[name])))
    check_readers(program, shared, fusion)
    check_reads(program, shared)
    rows, cols = _axes(program, shared)
    cut = {} if in_turn else staged
    splits = _splits(program, split, cut, parts) if parts > 1 else frozenset[str]()
    kinds = {op.dst.name: op.dst.type for op in program.ops() if op.dst is not None}
    own = _own_columns(program, staged, splits)
    common = frozenset(n for n in staged if not splits.isdisjoint(kinds[n].names)) - own
    if share_vectors:
        fusion = fusion.keeping(loads[name] for name in loaded_vectors(program, cols))
    spread = loaded_vectors(program, cols) - set(fusion.inlined)
    if vectors:
        names = spread | loaded_vectors(program, rows)
        shared |= {name: (loads[name], brought(loads[name])) for name in names}
        fusion, spread = fusion.keeping(loads[name] for name in names), frozenset[str]()
    placement = Placement(
        program, fusion, shared, rows, cols, split, parts, staged,
        splits=splits, common=common, spread=spread, turned=turned,
    )  # fmt: skip
    for name in own:
        staged[name] = shared_tile(placement.local(kinds[name]))
    if parts > 1 and (divided or split in cols):
        placement = _led(placement, divided)
    if in_turn:
        placement = replace(placement, in_turn=_in_turn(placement))
    _check_split(placement)
    return placement


def placed_for(program: Program, plan: LaunchPlan, parts: int, vectors: bool = False) -> Placement:
    """The placement that a launch plan asks for."""
    placed = place(
        program, plan.split, parts, vectors, plan.in_turn, plan.share_vectors, plan.divided
    )
    return replace(placed, abreast=plan.abreast)


def _led(placement: Placement, divided: bool) -> Placement:
    """The placement where one group makes what has no part of the split axis (`ir.led`)."""
    kept = [op for op in placement.program.ops() if op.id in placement.fusion.kept]
    own = [op for op in kept if not (op.dst and placement.is_shared(op.dst))]
    fusion, is_split, rows = placement.fusion, placement.is_split, placement.rows
    if divided and placement.common:
        raise InputError(
            f"launch plan: divided: every group of {placement.program.name} leaves a part of "
            f"{min(placement.common)} in shared memory; expected operands that one group makes"
        )
    if divided and placement.split in rows:
        led = divided_work(own, fusion, is_split, rows, placement.parts)
    else:
        led = led_by_one(own, fusion, is_split, rows)
    operands = {name: _staged_tile(op, var, True) for name, (op, var) in led.operands.items()}
    return replace(
        placement,
        staged=placement.staged | operands,
        common=placement.common | operands.keys(),
        led=led.ops,
        handed=led.vectors | operands.keys(),
    )


def _in_turn(placement: Placement) -> frozenset[int]:
    """The ops that groups do in turn: what contracts a cut axis of an operand of all, and what is
    done with its result. Raises where that goes beyond an iteration."""
    found: set[int] = set()
    for loop in placement.program.loops():
        made: set[str] = set()
        for op in (one for one in loop.body if isinstance(one, Op)):
            product = op.kind == "mma" and contracted(op) in placement.splits
            common = any(var.name in placement.common for var in op.srcs[:2])
            read = {var.name for var in placement.fusion.sources(op)} & made
            if not (product and common) and not read:
                continue
            if op.dst is not None and (placement.is_split(op.dst.type) or len(op.srcs) > 2):
                raise InputError(
                    f"{op.where}: groups make {op.dst} in turn, one in an iteration: expected what "
                    "is whole in each, and no sum over iterations"
                )
            found.add(op.id)
            made |= {op.dst.name} if op.dst is not None else set()
        for op in placement.program.ops():
            if op.id not in found and {var.name for var in placement.fusion.sources(op)} & made:
                raise InputError(
                    f"{op.where}: {op.kind} of what groups make in turn: expected all that is done "
                    "with it in the same iteration"
                )
    stores = [op for op in placement.program.ops() if op.kind == "store_add" and op.id in found]
    if placement.parts < 2 or placement.led or len(stores) != 1:
        raise InputError(
            f"launch plan: in_turn: {placement.program.name} has {placement.parts} groups and "
            f"{len(stores)} stores with add=True of what contracts {placement.split!r}; expected "
            "several groups that share out rows, and one store"
        )
    return frozenset(found)


def _typed(op: Op) -> TileType:
    assert op.dst is not None
    return op.dst.type


def _splits(
    program: Program, split: str, staged: Mapping[str, SharedTile], parts: int
) -> frozenset[str]:
    """The axes that are cut over the groups (`Placement.splits`)."""
    found, before = {split} - {""}, set[str]()
    while found != before:
        before = set(found)
        for op in program.ops():
            reads = op.kind == "mma" and any(var.name in staged for var in op.srcs[:2])
            if reads and op.dst is not None and contracted(op) in found:
                fitting = [n for n, k in op.dst.type.axes if k % (parts * ROWS_PER_GROUP) == 0]
                found.add((fitting or op.dst.type.names)[0])
    return frozenset(found)


def _own_columns(
    program: Program, staged: Mapping[str, SharedTile], splits: frozenset[str]
) -> set[str]:
    """The staged second operands of which each group reads the columns that it has."""
    return {
        op.srcs[1].name
        for op in program.ops()
        if op.kind == "mma" and op.srcs[1].name in staged and op.dst is not None
        and op.dst.type.names[1] in splits
    }  # fmt: skip


def _place_operands(
    op: Op,
    loads: dict[str, Op],
    shared: dict[str, tuple[Op, SharedTile]],
    staged: dict[str, SharedTile],
) -> None:
    axis = contracted(op)
    left = op.srcs[0].type
    if left.size(axis) * left.dtype.bytes % INSTRUCTION_K_BYTES:
        raise InputError(
            f"{op.where}: matmul contracts {axis!r} of {left.size(axis)} elements, expected a "
            f"multiple of {INSTRUCTION_K_BYTES // left.dtype.bytes}: load a wider tile, what lies "
            "beyond the array is zero"
        )
    for which, var in enumerate(op.srcs[:2]):
        if var.name in loads:
            try:
                tile = shared_tile(var.type)
            except InputError as error:
                raise InputError(f"{loads[var.name].where}: {error}") from None
            shared[var.name] = (loads[var.name], tile)
        elif which == 1 or var.type.names[1] != axis:
            # A register tile is a first operand whose columns are contracted, and nothing else.
            staged[var.name] = _staged_tile(op, var)
        if var.type.dtype.bits == 8 and var.type.names[1] != axis:
            raise InputError(
                f"{op.where}: {var.name}: {var.type} needs {axis!r} contiguous: 8-bit wgmma reads "
                "both operands K-major; store the array with that dimension last"
            )


def _staged_tile(op: Op, var: Var, first: bool = False) -> SharedTile:
    if var.type.dtype.bytes != 2 and not (first and var.type.dtype.name in FP8):
        raise InputError(
            f"{op.where}: {var.name}: {var.type} is made in registers and goes through shared "
            "memory to this matmul, which only 16-bit tiles can; cast it to bf16 or fp16"
        )
    try:
        return shared_tile(var.type)
    except InputError as error:
        raise InputError(f"{op.where}: {error}") from None


def _axes(
    program: Program, shared: dict[str, tuple[Op, SharedTile]]
) -> tuple[frozenset[str], frozenset[str]]:
    rows: dict[str, str] = {}
    cols: dict[str, str] = {}
    slots = in_shared(program) | set(shared)
    for op in sorted(program.ops(), key=lambda op: op.kind != "mma"):
        if op.dst is None or op.dst.name in slots or len(op.dst.type.axes) != 2:
            continue
        row, col = op.dst.type.names
        if op.kind != "mma" and row in cols and col in rows:
            continue  # the transpose of what a matmul gives
        rows.setdefault(row, op.where)
        cols.setdefault(col, op.where)
    if both := set(rows) & set(cols):
        axis = sorted(both)[0]
        raise InputError(
            f"{cols[axis]}: axis {axis!r} is a row axis at {rows[axis]} and a column axis here; "
            "a register tile cannot change its layout: let the matmul take the loaded tile itself "
            "(of its element type; a load may be transposed), or swap its operands"
        )
    return frozenset(rows), frozenset(cols)


def _check_split(placement: Placement) -> None:
    split, parts = placement.split, placement.parts
    if parts == 1:
        return
    if split not in placement.rows | placement.cols:
        raise InputError(
            f"launch plan: split axis {split!r} is no axis of a register tile of program "
            f"{placement.program.name}; they have the rows {sorted(placement.rows)} and the "
            f"columns {sorted(placement.cols)}"
        )
    vectors = [
        op.dst for op in placement.program.ops() if op.dst and op.dst.name in placement.spread
    ]
    if any(split in var.type.names for var in vectors):
        raise InputError(
            f"launch plan: split axis {split!r}: a loop loads vectors along these columns, which "
            "groups share whole; split rows"
        )
    for op in placement.program.ops():
        if op.dst is None:
            continue
        kind = op.dst.type
        for axis in sorted(placement.splits):
            if runs_along(op, axis):
                raise InputError(
                    f"{op.where}: {op.kind} along {axis!r}, which the schedule splits over {parts} "
                    f"groups: register tiles do not move between them; give {axis!r} one group"
                )
            loaded = placement.is_shared(op.dst) and axis in placement.cols
            if axis in kind.names and kind.size(axis) % (parts * ROWS_PER_GROUP) and not loaded:
                raise InputError(
                    f"{op.where}: axis {axis!r} of {op.dst.name} is {kind.size(axis)} long; over "
                    f"{parts} groups it must be a multiple of {parts * ROWS_PER_GROUP}"
                )
        whole = op.kind == "mma" and not placement.is_split(op.dst.type)
        if whole and op.id not in placement.in_turn:
            _check_whole(placement, op)


def _check_whole(placement: Placement, op: Op) -> None:
    """Refuse a matmul of which every group makes the whole, from an operand it has a part of."""
    for var in op.srcs[:2]:
        if placement.is_split(var.type) and not placement.is_shared(var):
            raise InputError(
                f"{op.where}: every group makes the whole of {op.dst}, but has a part of "
                f"{var.name}, whose axis {placement.split!r} the schedule splits over "
                f"{placement.parts} groups"
            )


def runs_along(op: Op, axis: str) -> bool:
    """Whether an op needs elements of other places along an axis."""
    group = OPS[op.kind].group
    if group == "blocks":
        return axis in op.srcs[0].type.names
    return op.axis == axis and (
        group in ("reduce", "scan") or op.kind in ("gather", "slice", "rename")
    )
