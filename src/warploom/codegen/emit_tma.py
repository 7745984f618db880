"""Code for TMA: one box a panel, multicast slices over a cluster, stores through shared panels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.codegen.block import BlockProgram
from warploom.codegen.emit_ops import direct_store_lines
from warploom.codegen.layout import CORE_ROWS, MAX_BOX, SWIZZLES, SharedTile, boxes, shared_tile
from warploom.codegen.names import c_name
from warploom.codegen.plan import LaunchPlan
from warploom.codegen.prelude import tma_load, tma_store
from warploom.codegen.tasks import cluster_axis
from warploom.codegen.values import At, Values, c_index
from warploom.errors import InputError
from warploom.tile import Op

MULTICAST_MASKS = {2: "3", 4: "15", 8: "255"}


def is_multicast(plan: LaunchPlan, op: Op) -> bool:
    """Whether all blocks of a cluster want the same tile: no range uses the cluster's axis."""
    axis, blocks = plan.cluster
    return blocks > 1 and not any(axis in span.start.symbols() for span in op.spans)


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

        Elements of one byte have no panels; they are written from registers.
        """
        kind = op.srcs[0].type
        return self.plan.store == "tma" and len(kind.axes) == 2 and kind.dtype.bytes > 1

    def panel(self, op: Op) -> SharedTile:
        """The shared form of the tile one group stores; it is used panel by panel."""
        tile = shared_tile(self.placement.local(op.srcs[0].type))
        if tile.rows > MAX_BOX:
            raise InputError(f"{op.where}: store of {tile.rows} rows, at most {MAX_BOX} a group")
        return tile

    def panel_bytes(self) -> int:
        """Bytes of one group's store panels; all stores of a kernel take turns with them."""
        largest = max((self.panel(op).panel_bytes for op in self.stores), default=0)
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


def _coordinates(op: Op, names: dict[str, str], row: str, col: str) -> str:
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
    multicast = is_multicast(maps.plan, op)
    blocks = maps.plan.cluster[1] if multicast else 1
    rows, panels = _slice(op, tile, blocks)
    high = rows // boxes(rows)
    map_name = maps.map_of(op, high, tile.panel_cols, tile.width)
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
            where = _coordinates(op, names, down, col)
            to = f"{slot} + {at + above * tile.width}{shift}"
            lines.append(f"{name}({to}, &{map_name}, {bar}, {where}{mask});")
    return lines


def _slice(op: Op, tile: SharedTile, blocks: int) -> tuple[int, int]:
    """(rows, panels) that one block of a cluster copies."""
    if tile.panels % blocks == 0:
        return tile.rows, tile.panels // blocks
    if tile.rows % (blocks * CORE_ROWS) == 0:
        return tile.rows // blocks, tile.panels
    raise InputError(
        f"{op.where}: tile of {tile.rows} rows and {tile.panels} panels cannot be cut for "
        f"multicast over {blocks} blocks"
    )


def store_lines(maps: Maps, values: Values, op: Op, names: dict[str, str]) -> list[str]:
    """Write a register tile panel by panel to shared memory and start its copy to global memory."""
    assert op.array is not None
    source = op.srcs[0]
    kind = source.type
    tile = maps.panel(op)
    rows, cols, panels = tile.rows, tile.panel_cols, tile.panels
    slots = maps.plan.store_panels
    map_name = maps.map_of(op, rows, cols, tile.width)
    name, text = tma_store(len(op.spans), op.kind == "store_add")
    maps.helpers[name] = text
    first = values.first_row(kind.names[0], kind.shape[0])
    lines: list[str] = []
    row = next(span for span in op.spans if span.axis == kind.names[0])
    if row.stop is not None:
        # A box cannot end early: the last tile of a range is written element by element.
        whole = f"{c_index(row.start, names)} + {first} + {rows} <= {c_index(row.stop, names)}"
        stopless = replace(
            op, spans=tuple(replace(s, stop=None) if s is row else s for s in op.spans)
        )
        return [
            f"if ({whole}) {{",
            *[f"  {line}" for line in store_lines(maps, values, stopless, names)],
            "} else {",
            *[f"  {line}" for line in direct_store_lines(values, op, names)],
            "}",
        ]
    start = c_index(op.spans[-1].start, names)
    base = f"panels + part * {maps.panel_bytes()}"
    if 1 < panels <= slots:
        # Every panel has a slot: all are written between two meetings of the group, and the only
        # wait is for the stores of the task before.
        copies = [
            f"  if ({start} + {p * cols} < {c_name(op.array.dims[-1])}) {name}(&{map_name}, "
            f"{base} + {p * tile.panel_bytes}, {_coordinates(op, names, first, str(p * cols))});"
            for p in range(panels)
        ]
        written: list[str] = []
        for panel in range(panels):
            # The branch keeps ptxas from beginning all panels at once, which spills.
            inside = f"{start} + {panel * cols} < {c_name(op.array.dims[-1])}"
            at = f"{base} + {panel * tile.panel_bytes}"
            written += [f"if ({inside}) {{", f"  const unsigned panel = {at};"]
            written += [f"  {line}" for line in _panel_lines(values, op, tile, panel, names)]
            written += ["}"]
        return [
            "if (threadIdx.x % 128 == 0) store_wait_read<0>();",
            _group_sync(values),
            *written,
            "fence_async();",
            _group_sync(values),
            "if (threadIdx.x % 128 == 0) {",
            *copies,
            "  store_commit();",
            "}",
        ]
    for panel in range(panels):
        # Slots are taken in turn within a task; the first panel finds all of them free. A panel
        # outside of the array is skipped; the branch also keeps ptxas from beginning it early.
        pending = slots - 1 if panel else 0
        at = f"{base} + {panel % slots * tile.panel_bytes}"
        where = _coordinates(op, names, first, str(panel * cols))
        lines += [
            f"if ({start} + {panel * cols} < {c_name(op.array.dims[-1])}) {{",
            f"  if (threadIdx.x % 128 == 0) store_wait_read<{pending}>();",
            f"  {_group_sync(values)}",
            f"  const unsigned panel = {at};",
            *[f"  {line}" for line in _panel_lines(values, op, tile, panel, names)],
            "  fence_async();",
            f"  {_group_sync(values)}",
            "  if (threadIdx.x % 128 == 0) {",
            f"    {name}(&{map_name}, panel, {where});",
            "    store_commit();",
            "  }",
            "}",
        ]
    return lines


def _group_sync(values: Values) -> str:
    parts = values.placement.parts
    if parts == 1:
        return "named_sync<1, 128>();"
    last = f"named_sync<{parts}, 128>();"
    head = " else ".join(f"if (part == {p}) named_sync<{1 + p}, 128>();" for p in range(parts - 1))
    return f"{head} else {last}"


def _panel_lines(
    values: Values, op: Op, tile: SharedTile, panel: int, names: dict[str, str]
) -> list[str]:
    """Registers to one swizzled panel: stmatrix for 16-bit elements, pairs of fp32 otherwise."""
    source = op.srcs[0]
    groups = tile.panel_cols // 8
    mask = SWIZZLES[tile.width][0]
    loops = [
        "#pragma unroll",
        f"for (int t = 0; t < {values.blocks(source.type)}; ++t)",
        "#pragma unroll",
    ]
    block = f"panel + t * {64 * tile.width}"
    if source.type.dtype.bytes == 2:
        # Lane l gives the address of row l % 16, 8-column group l / 16 of a pair of groups.
        first = panel * groups * 2
        words = [values.word(source, "t", f"{first} + 2 * j + {i}", names) for i in range(4)]
        return [
            *loops,
            f"  for (int j = 0; j < {groups}; j += 2) {{",
            "    const unsigned row = threadIdx.x % 128 / 32 * 16 + lane % 16;",
            f"    const unsigned at = row * {tile.width} + (j + lane / 16) * 16;",
            f"    stmatrix({block} + (at ^ (at >> 3 & {mask:#x})), {', '.join(words)});",
            "  }",
        ]
    low, high = (
        values.element(source, At("tile", i=f"{panel * groups * 4} + 4 * j + 2 * h + {c}"), names)
        for c in (0, 1)
    )
    if source.type.dtype.name == "int32":
        low, high = f"__int_as_float({low})", f"__int_as_float({high})"
    return [
        *loops,
        f"  for (int j = 0; j < {groups}; ++j)",
        "#pragma unroll",
        "    for (int h = 0; h < 2; ++h) {",
        f"      const unsigned at = (thread_row + h * 8) * {tile.width} + j * 32 + thread_col * 4;",
        f"      store_shared_pair({block} + (at ^ (at >> 3 & {mask:#x})), {low}, {high});",
        "    }",
    ]
