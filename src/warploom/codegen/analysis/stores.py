"""How results leave the registers: in panels through shared memory, or straight to global memory.

A panel is some rows of the array by at most 128 bytes of its columns, swizzled: one box of a TMA
store. Panels have one shape for each store; where it does not divide the tile the last panel begins
earlier, so that it writes some elements a second time, with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from warploom.codegen.analysis.grid import stores_beyond
from warploom.codegen.analysis.register_tiles import COLUMN_GROUP, PACKED
from warploom.codegen.ir.block import Ring
from warploom.codegen.ir.layout import CHUNK, MAX_BOX, SharedTile, panel_width
from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op
from warploom.tile.index import multiple_of
from warploom.tile.ir import joint_axis

QUAD_COLUMNS = 32  # that the four lanes of a row write together: 64 bytes of 16-bit elements
STORES = ("store", "store_add")
SLOTS_FOR_ONE_BARRIER = 3
MOST_CARRIERS = 3  # warps of the loading group beside the one that loads


@dataclass(frozen=True)
class StorePanels:
    """The panels in which one group stores its part of a tile.

    tile        the layout of one panel, in the array's order of dimensions
    origins     (row, column) of each panel's first element in the group's part of the tile
    transposed  the array's columns lie over the rows of the registers: panels are transposed on
                the way, one block of 64 register rows wide
    slots       panels of the group that have room in shared memory at a time
    slot_bytes  from one of these to the next
    group_bytes from the room of one group to that of the next
    in_turn     groups have the room of all in turn
    """

    tile: SharedTile
    origins: tuple[tuple[int, int], ...]
    transposed: bool
    slots: int
    slot_bytes: int
    group_bytes: int
    in_turn: bool = False

    @property
    def at_once(self) -> bool:
        """Whether every panel has a slot: all are written between two barriers of the group."""
        return 1 < len(self.origins) <= self.slots

    @property
    def one_barrier(self) -> bool:
        """Whether panels that take slots in turn have one barrier each: the one that ends the
        writing of a panel then also says that the slot of the next is free, at the price of a store
        less under way. With up to two slots there is one before each panel too."""
        return self.slots >= SLOTS_FOR_ONE_BARRIER


@dataclass(frozen=True)
class StorePath:
    """The way of one store.

    panels       through shared memory; None: from the registers
    wide         from the registers, 16 bytes a lane where the array's pitches allow it
    first_group  all groups hold the same, and the first one stores it
    held_back    blocks of the last cluster that lie beyond the grid must not store
    ends_in_panels  transposed panels that a row of the array ends: threads copy the part of one
    late         a step of its own starts the copies, behind a fence (`LaunchPlan.late_stores`)
    carried      a warp of the loading group copies the panels (`LaunchPlan.store_warps`)
    """

    panels: StorePanels | None
    wide: bool
    first_group: bool
    held_back: bool
    carried: bool = False
    ends_in_panels: bool = False
    late: bool = False


def store_paths(
    placement: Placement, plan: LaunchPlan, rings: Sequence[Ring]
) -> dict[int, StorePath]:
    """The path of every store of a program, by the op's number.

    All stores of a kernel take turns with one room for panels. Raises `InputError` for a tile that
    the plan's way of storing does not suit.
    """
    program = placement.program
    stores = [op for op in program.ops() if op.kind in STORES]
    found: dict[int, StorePath] = {}
    for op in stores:
        through = through_shared(placement, plan, op)
        panels = _panels(placement, plan, op) if through else None
        same = placement.parts > 1 and not placement.is_split(op.srcs[0].type)
        same = same and op.id not in placement.in_turn
        found[op.id] = StorePath(
            panels, is_wide(placement, op), same, stores_beyond(program, plan, op)
        )
        if panels is not None and _ends_in_panels(panels, op):
            found[op.id] = replace(found[op.id], ends_in_panels=True)
    for op in _carried(placement, plan, found):
        found[op.id] = replace(found[op.id], carried=True)
    for op in stores:
        found[op.id] = replace(found[op.id], late=_is_late(plan, op, found[op.id]))
        if op.turn is not None and not found[op.id].carried:
            raise InputError(
                f"{op.where}: a store in turn needs store_warps, whose warps wait for it; a group "
                "that waited would hold up its matmuls"
            )
        _check_fragments(placement, op, found[op.id])
    slot = _operand_slot(placement, plan, rings)
    if slot is not None:
        for op in stores:
            panels = found[op.id].panels
            if panels is not None:
                found[op.id] = replace(found[op.id], panels=_over(slot, panels, placement, op))
        return found
    room = max((p.panels.group_bytes for p in found.values() if p.panels is not None), default=0)
    return {
        number: path
        if path.panels is None
        else replace(path, panels=replace(path.panels, group_bytes=room))
        for number, path in found.items()
    }


def _is_late(plan: LaunchPlan, op: Op, path: StorePath) -> bool:
    """Whether every panel has a place of its own until the copies are started."""
    panels = path.panels
    if not plan.late_stores or plan.store_over or panels is None or path.carried:
        return False
    whole = all(span.stop is None for span in op.spans)
    return op.kind == "store" and whole and len(panels.origins) <= panels.slots


def _ends_in_panels(panels: StorePanels, op: Op) -> bool:
    rows, cols = (span for span in op.spans if span.size is not None)
    ends = [span for span in op.spans if span.stop is not None]
    aligned = multiple_of(cols.start) % COLUMN_GROUP == 0
    return panels.transposed and op.kind == "store" and ends == [rows] and aligned


def _carried(placement: Placement, plan: LaunchPlan, paths: Mapping[int, StorePath]) -> list[Op]:
    """The stores that warps of the loading group copy; raises `InputError` where they cannot."""
    if not plan.store_warps:
        return []
    found: list[Op] = []
    for loop in placement.program.loops():
        own = [op for op in loop.body if isinstance(op, Op) and op.kind == "store_add"]
        if len(own) > 1 or (own and placement.until(loop) is not None):
            raise InputError(
                f"launch plan: store_warps: loop {loop.index} of {placement.program.name} has "
                f"{len(own)} stores with add=True and may end early for a group; expected one, and "
                "iterations that are the same for all"
            )
        found += own
    for op in found:
        path = paths[op.id]
        panels = path.panels
        if (
            panels is None
            or len(panels.origins) > panels.slots
            or path.held_back
            or plan.store_over
        ):
            raise InputError(
                f"{op.where}: store_warps: expected a store through panels of its own, each with a "
                "slot, and no cluster with blocks beyond the grid"
            )
    if not found or placement.parts > MOST_CARRIERS:
        raise InputError(
            f"launch plan: store_warps: {placement.program.name} has {len(found)} stores with "
            f"add=True in its loops and {placement.parts} groups; expected one at least, and at "
            f"most {MOST_CARRIERS} groups"
        )
    return found


def _check_fragments(placement: Placement, op: Op, path: StorePath) -> None:
    """Raise where a store into fragments is not of all columns, and of whole parts of 64 rows."""
    if op.array is None or not op.array.fragments:
        return
    kind, (*_, rows, cols) = placement.local(op.srcs[0].type), op.spans
    whole = rows.size is not None and cols.size is not None and str(cols.start) == "0"
    cut = kind.shape[1] < op.srcs[0].type.shape[1]  # columns of the first 64 rows are in one place
    if (
        not path.carried
        or not whole
        or kind.shape[0] % ROWS_PER_GROUP
        or (cut and kind.shape[0] > ROWS_PER_GROUP)
        or multiple_of(rows.start) % ROWS_PER_GROUP
        or placement.transposed(op.srcs[0].type)
    ):
        raise InputError(
            f"{op.where}: store of {op.srcs[0].type} to {op.array}: expected store_warps, and in "
            f"each group a multiple of {ROWS_PER_GROUP} rows with all columns, or {ROWS_PER_GROUP}"
        )


def panel_bytes(plan: LaunchPlan, paths: Mapping[int, StorePath]) -> int:
    """Bytes of shared memory set aside for one group's panels."""
    if plan.store_over:
        return 0
    return max((p.panels.group_bytes for p in paths.values() if p.panels is not None), default=0)


def through_shared(placement: Placement, plan: LaunchPlan, op: Op) -> bool:
    """Whether a store goes through shared memory: a tile, under a plan that says so.

    Not a transposed tile of 32 bits: from the registers the 8 rows of a quad's column fill a sector
    of 32 bytes, and there is no stmatrix for it. Elements of one byte have no panels; they are
    written from registers.
    """
    kind = op.srcs[0].type
    if plan.store != "tma" or len(kind.axes) != 2 or kind.dtype.bytes == 1 or joint_axis(op.spans):
        return False
    return kind.dtype.bytes == 2 or not placement.transposed(kind)


def is_wide(placement: Placement, op: Op) -> bool:
    """Whether the lanes of a row can exchange words and write 16 bytes each: a whole tile of 16-bit
    elements in the array's order, whose columns begin at a multiple of 8."""
    kind = op.srcs[0].type
    return (
        op.kind == "store"
        and op.array is not None
        and len(kind.axes) == 2
        and op.array.dtype.name in PACKED
        and kind.names == tuple(dict.fromkeys(s.axis for s in op.spans if s.size is not None))
        and not placement.transposed(kind)
        and kind.shape[1] >= QUAD_COLUMNS
        and op.spans[-1].stop is None
        and op.spans[-1].size is not None
        and multiple_of(op.spans[-1].start) % COLUMN_GROUP == 0
    )


def _panels(placement: Placement, plan: LaunchPlan, op: Op) -> StorePanels:
    """The panels of a store in room of its own; raises `InputError` for a tile that has none."""
    if placement.split in placement.cols and placement.is_split(op.srcs[0].type):
        raise InputError(
            f"{op.where}: store of {op.srcs[0].type}, whose columns the schedule splits: panels of "
            "groups begin with the tile's first column; store='direct' stores from registers"
        )
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
    in_turn = op.id in placement.in_turn
    slots = len(found) if in_turn else min(plan.store_panels, len(found))
    group = -(-tile.panel_bytes * slots // placement.parts) if in_turn else tile.panel_bytes * slots
    return StorePanels(tile, found, transposed, slots, tile.panel_bytes, group, in_turn)


def _operand_slot(
    placement: Placement, plan: LaunchPlan, rings: Sequence[Ring]
) -> SharedTile | None:
    """The tile of the plan's `store_over`; raises when no group has rows of it."""
    if not plan.store_over:
        return None
    name = plan.store_over
    ring = over_ring(plan, rings)
    if ring is None or ring.depth != 1 or len(ring.buffers) != 1:
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
    return tile


def over_ring(plan: LaunchPlan, rings: Sequence[Ring]) -> Ring | None:
    """The ring through whose slot the groups store (`store_over`), if the plan names one."""
    named = [ring for ring in rings if any(plan.store_over in b.names for b in ring.buffers)]
    return named[0] if named else None


def _over(slot: SharedTile, panels: StorePanels, placement: Placement, op: Op) -> StorePanels:
    """The panels of a group as its rows of the panels of an operand's slot; raises where they are
    not of that shape."""
    tile, parts = panels.tile, placement.parts
    same = (slot.rows, slot.width, slot.element) == (tile.rows * parts, tile.width, tile.element)
    if panels.transposed or not same or len(panels.origins) > slot.panels:
        raise InputError(
            f"{op.where}: store of {len(panels.origins)} panels of {tile.rows} rows of "
            f"{tile.width} B a group over {slot.panels} of {slot.rows} rows of {slot.width} B: "
            "expected equal panels"
        )
    return replace(
        panels, slots=slot.panels, slot_bytes=slot.panel_bytes, group_bytes=tile.panel_bytes
    )


def _starts(extent: int, step: int) -> list[int]:
    """Where pieces of one size begin that cover an extent; the last ends with it."""
    return [*range(0, extent - step, step), extent - step]
