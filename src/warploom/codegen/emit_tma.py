"""Code for TMA: one box a panel, multicast slices over a cluster, stores through shared panels."""

from __future__ import annotations

from typing import Any

from warploom.codegen.block import BlockProgram
from warploom.codegen.layout import CORE_ROWS, SWIZZLES, SharedTile
from warploom.codegen.prelude import tma_load, tma_store
from warploom.codegen.tasks import cluster_axis
from warploom.codegen.values import At, Values, c_index
from warploom.errors import InputError
from warploom.tile import Op

STORE_WIDTH = 128  # bytes of a store panel's rows: one full swizzle
MULTICAST_MASKS = {2: "3", 4: "15", 8: "255"}


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
            if op.kind.startswith("store") and self.through_shared(op):
                self.stores.append(op)
            elif op.array is not None and not (op.dst and self.placement.is_shared(op.dst)):
                if op.array.name not in self.direct:
                    self.direct.append(op.array.name)

    def through_shared(self, op: Op) -> bool:
        """Whether a store goes through shared memory: a tile, under a plan that says so."""
        return self.plan.store == "tma" and len(op.srcs[0].type.axes) == 2

    def is_multicast(self, op: Op) -> bool:
        """Whether all blocks of a cluster want the same tile: no range uses the cluster's axis."""
        axis, blocks = self.plan.cluster
        return blocks > 1 and not any(axis in span.start.symbols() for span in op.spans)

    def panel_cols(self, op: Op) -> int:
        """Columns of a store panel."""
        return STORE_WIDTH // op.srcs[0].type.dtype.bytes

    def panel_bytes(self) -> int:
        """Bytes of one group's store panels; all stores of a kernel take turns with them."""
        sizes = [self.placement.local(op.srcs[0].type).shape[0] * STORE_WIDTH for op in self.stores]
        return max(sizes, default=0) * self.plan.store_panels

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
    multicast = maps.is_multicast(op)
    blocks = maps.plan.cluster[1] if multicast else 1
    rows, panels = _slice(op, tile, blocks)
    map_name = maps.map_of(op, rows, tile.panel_cols, tile.width)
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
        where = _coordinates(op, names, row, col)
        lines.append(f"{name}({slot} + {at}{shift}, &{map_name}, {bar}, {where}{mask});")
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
    if kind.dtype.name not in ("bf16", "fp16", "fp32"):
        raise InputError(f"{op.where}: store of {kind} through shared memory is not there yet")
    rows = maps.placement.local(kind).shape[0]
    cols = maps.panel_cols(op)
    if kind.shape[1] % cols:
        raise InputError(f"{op.where}: {kind.shape[1]} columns, expected a multiple of {cols}")
    panels = kind.shape[1] // cols
    slots = maps.plan.store_panels
    map_name = maps.map_of(op, rows, cols, STORE_WIDTH)
    name, text = tma_store(len(op.spans), op.kind == "store_add")
    maps.helpers[name] = text
    first = values.first_row(kind.names[0], kind.shape[0])
    lines: list[str] = []
    for panel in range(panels):
        # Slots are taken in turn; when a store does not end on the last one, the next starts over.
        pending = slots - 1 if panel or panels % slots == 0 else 0
        at = f"panels + part * {maps.panel_bytes()} + {panel % slots * rows * STORE_WIDTH}"
        where = _coordinates(op, names, first, str(panel * cols))
        lines += [
            "{",
            f"  if (threadIdx.x % 128 == 0) store_wait_read<{pending}>();",
            f"  {_group_sync(values)}",
            f"  const unsigned panel = {at};",
            *[f"  {line}" for line in _panel_lines(values, op, panel, names)],
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


def _panel_lines(values: Values, op: Op, panel: int, names: dict[str, str]) -> list[str]:
    source = op.srcs[0]
    blocks = values.blocks(source.type)
    mask = SWIZZLES[STORE_WIDTH][0]
    del mask
    if source.type.dtype.bytes == 2:
        # stmatrix: lane l gives the address of row l % 16, 8-column group l / 16 of the pair.
        base = "(threadIdx.x % 128 / 32 * 16 + lane % 16) * 128"
        lines = [
            "#pragma unroll",
            f"for (int t = 0; t < {blocks}; ++t)",
            "#pragma unroll",
            "  for (int j = 0; j < 8; j += 2) {",
        ]
        first = panel * 16
        word = [f"{source.name}[t][{first} + 2 * j + {i}]" for i in range(4)]
        lines += [
            f"    const unsigned to = panel + t * 8192 + {base} + ((j + lane / 16) ^ lane % 8) * 16;",
            f"    stmatrix(to, {', '.join(word)});",
            "  }",
        ]
        return lines
    low = values.element(source, At("tile", i=f"{panel * 16} + 4 * j + 2 * h"), names)
    high = values.element(source, At("tile", i=f"{panel * 16} + 4 * j + 2 * h + 1"), names)
    return [
        "#pragma unroll",
        f"for (int t = 0; t < {blocks}; ++t)",
        "#pragma unroll",
        "  for (int j = 0; j < 4; ++j)",
        "#pragma unroll",
        "    for (int h = 0; h < 2; ++h) {",
        "      const unsigned row = thread_row + h * 8;",
        "      const unsigned chunk = (2 * j + lane % 4 / 2) ^ row % 8;",
        "      store_shared_pair(panel + t * 8192 + row * 128 + chunk * 16 + lane % 2 * 8, "
        f"{low}, {high});",
        "    }",
    ]
