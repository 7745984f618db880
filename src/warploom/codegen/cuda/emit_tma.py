"""Code for TMA: tensor maps, one box a panel of a load, multicast slices over a cluster."""

from __future__ import annotations

from typing import Any

from warploom.codegen.analysis.panels import StorePanels, store_panels, store_slot
from warploom.codegen.cuda.prelude import tma_load
from warploom.codegen.cuda.tasks import cluster_axis
from warploom.codegen.cuda.values import c_index
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.layout import CORE_ROWS, SharedTile, boxes
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Index, Op, Program
from warploom.tile.index import symbol
from warploom.tile.ir import walk

MULTICAST_MASKS = {2: "3", 4: "15", 8: "255"}


def is_multicast(program: Program, plan: LaunchPlan, op: Op) -> bool:
    """Whether all blocks of a cluster want the same tile at the same time.

    Its ranges are the same in all of them, and so are the bounds of a loop around the load: blocks
    whose loops run over other iterations fill their rings with other tiles.
    """
    if plan.cluster[1] == 1:
        return False
    used = [span.start for span in op.spans]
    for loop in program.loops():
        if any(inner.id == op.id for inner in walk(loop.body)):
            used += [loop.start, loop.stop]
    return all(_same_in_cluster(program, plan, value) for value in used)


def _same_in_cluster(program: Program, plan: LaunchPlan, value: Index) -> bool:
    """Whether an expression has one value in all blocks of a cluster, as its form shows.

    The blocks' positions on the axis are q * blocks + rank, so position // blocks is the same.
    """
    axis, blocks = plan.cluster
    if value.op == "symbol":
        read = next((read for read in program.reads if read.name == value.name), None)
        places = () if read is None else read.at
        return value.name != axis and all(_same_in_cluster(program, plan, at) for at in places)
    if value.op == "//" and value.args[0] == symbol(axis):
        by = value.args[1]
        return by.op == "const" and by.value % blocks == 0
    return all(_same_in_cluster(program, plan, arg) for arg in value.args)


class Maps:
    """The tensor maps and direct pointers a kernel takes, collected while its code is made."""

    def __init__(self, block: BlockProgram, helpers: dict[str, str]) -> None:
        self.block, self.helpers = block, helpers
        self.placement = block.placement
        self.plan = block.schedule.launch
        self.parameters: list[dict[str, Any]] = []
        self.stores: list[Op] = []
        self.direct: list[str] = []
        program = self.placement.program
        self.over = store_slot(block)
        cluster_axis(program, self.plan)
        for op in program.ops():
            stopped = any(span.stop is not None for span in op.spans)
            if op.kind.startswith("store") and self.through_shared(op):
                self.stores.append(op)
                if not stopped:
                    continue
            shared = op.dst is not None and self.placement.is_shared(op.dst)
            if op.array is not None and not shared and op.array.name not in self.direct:
                self.direct.append(op.array.name)
        for read in program.reads:
            if read.array.name not in self.direct:
                self.direct.append(read.array.name)

    def through_shared(self, op: Op) -> bool:
        """Whether a store goes through shared memory: a tile, under a plan that says so.

        Not a transposed tile of 32 bits: from the registers the 8 rows of a quad's column fill a
        sector of 32 bytes, and there is no stmatrix for it. Elements of one byte have no panels;
        they are written from registers.
        """
        kind = op.srcs[0].type
        if self.plan.store != "tma" or len(kind.axes) != 2 or kind.dtype.bytes == 1:
            return False
        return kind.dtype.bytes == 2 or not self.placement.transposed(kind)

    def panels(self, op: Op) -> StorePanels:
        """How one group stores its part of a tile."""
        return store_panels(self.placement, self.plan, op)

    def panel_bytes(self) -> int:
        """Bytes of one group's store panels; all stores of a kernel take turns with them."""
        if self.over is not None:
            return 0
        largest = max((self.panels(op).tile.panel_bytes for op in self.stores), default=0)
        return largest * self.plan.store_panels

    def map_of(self, op: Op, rows: int, cols: int, width: int) -> str:
        """The parameter name of the tensor map with that box on the op's array."""
        assert op.array is not None
        spanned = [d for d, span in enumerate(op.spans) if span.size is not None]
        if len(spanned) != 2 or spanned[1] != len(op.spans) - 1:
            raise InputError(
                f"{op.where}: {op.kind} of {op.array}: TMA tiles span two dimensions, the second "
                "of them the last of the array"
            )
        if len(op.spans) > 5:
            raise InputError(f"{op.where}: {op.array} has more than 5 dimensions, TMA's limit")
        box = [1] * len(op.spans)
        box[spanned[0]], box[spanned[1]] = rows, cols
        entry = {
            "kind": "map",
            "array": op.array.name,
            "dtype": op.array.dtype.name,
            "box": list(reversed(box)),
            "swizzle": width,
            "written": op.kind.startswith("store"),
        }
        for known in self.parameters:
            if {k: v for k, v in known.items() if k != "name"} == entry:
                return known["name"]
        name = f"{op.array.name}_map"
        taken = sum(p["array"] == op.array.name for p in self.parameters)
        entry["name"] = f"{name}{taken or ''}"
        self.parameters.append(entry)
        return entry["name"]


def coordinates(op: Op, names: dict[str, str], row: str, col: str) -> str:
    """The coordinates of a box from (row, col) of the op's tile on, innermost first."""
    inner = iter([row, col])
    values: list[str] = []
    for span in op.spans:
        start = c_index(span.start, names)
        extra = "" if span.size is None else next(inner)
        values.append(f"{start} + {extra}" if extra and extra != "0" else start)
    return ", ".join(reversed(values))


def fill_lines(maps: Maps, op: Op, names: dict[str, str]) -> list[str]:
    """Start the copies of one load into the producer's current slot."""
    assert op.dst is not None and op.array is not None
    if op.value not in (0, 0.0):
        raise InputError(f"{op.where}: load with edge={op.value} through TMA: it gives only 0.0")
    ring, buffer = maps.block.home(op.dst.name)
    tile = buffer.tile
    multicast = is_multicast(maps.block.placement.program, maps.plan, op)
    blocks = maps.plan.cluster[1] if multicast else 1
    if multicast and blocks not in MULTICAST_MASKS:
        raise InputError(
            f"{op.where}: {op.label} is the same for all {blocks} blocks of a cluster; multicast "
            f"is over {', '.join(map(str, MULTICAST_MASKS))}"
        )
    rows, panels = _slice(tile, blocks)
    if not rows:
        raise InputError(
            f"{op.where}: tile of {tile.rows} rows and {tile.panels} panels cannot be cut for "
            f"multicast over {blocks} blocks"
        )
    high = rows // boxes(rows)
    map_name = f"&{maps.map_of(op, high, tile.panel_cols, tile.width)}"
    rest = tile.rows - (blocks - 1) * rows
    if rows < tile.rows and rest < rows:
        other = maps.map_of(op, rest, tile.panel_cols, tile.width)
        map_name = f"(rank < {blocks - 1} ? {map_name} : &{other})"
    name, text = tma_load(len(op.spans), multicast)
    maps.helpers[name] = text
    slot = f"{ring.name}_base + {ring.name}_cursor.slot * {ring.slot_bytes}"
    bar = f"{ring.name}_full + {ring.name}_cursor.slot * 8"
    mask = f", {MULTICAST_MASKS[blocks]}" if multicast else ""
    lines: list[str] = []
    for panel in range(panels):
        at = buffer.offset + panel * tile.panel_bytes
        row, col, shift = "0", str(panel * tile.panel_cols), ""
        if blocks > 1 and rows < tile.rows:
            row, shift = f"rank * {rows}", f" + rank * {rows * tile.width}"
        elif blocks > 1:
            col = f"(rank * {panels} + {panel}) * {tile.panel_cols}"
            shift = f" + rank * {panels * tile.panel_bytes}"
        for above in range(0, rows, high):
            down = row if not above else str(above) if row == "0" else f"{row} + {above}"
            where = coordinates(op, names, down, col)
            to = f"{slot} + {at + above * tile.width}{shift}"
            lines.append(f"{name}({to}, {map_name}, {bar}, {where}{mask});")
    return lines


def _slice(tile: SharedTile, blocks: int) -> tuple[int, int]:
    """(rows, panels) that each block of a cluster copies, the last one what is left of the rows."""
    if tile.panels % blocks == 0:
        return tile.rows, tile.panels // blocks
    groups = tile.rows // CORE_ROWS
    rows = -(-groups // blocks) * CORE_ROWS
    if rows * (blocks - 1) < tile.rows:
        return rows, tile.panels
    return 0, 0  # some blocks would have nothing
