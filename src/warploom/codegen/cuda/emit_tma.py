"""Code for TMA: one box a panel of a load, multicast slices over a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from warploom.codegen.analysis.parameters import TileCopy
from warploom.codegen.cuda.prelude import tma_fetch, tma_load
from warploom.codegen.cuda.values import c_index
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.layout import SharedTile
from warploom.tile import Op, Span
from warploom.tile.evaluate import parts_of


def coordinates(spans: Sequence[Span], names: dict[str, str], row: str, col: str) -> str:
    """The coordinates of a box from (row, col) of a range on, innermost first."""
    sized = sum(span.size is not None for span in spans)
    inner = iter([row, *["0"] * (sized - 2), col] if sized > 1 else [col])
    values: list[str] = []
    for span in spans:
        start = c_index(span.start, names)
        extra = "" if span.size is None else next(inner)
        values.append(f"{start} + {extra}" if extra and extra != "0" else start)
    return ", ".join(reversed(values))


def fill_lines(
    block: BlockProgram, copy: TileCopy, op: Op, names: dict[str, str], helpers: dict[str, str]
) -> list[str]:
    """Start the copies of one load into the producer's current slot; adds what they call to
    `helpers`."""
    assert op.dst is not None
    ring, buffer = block.home(op.dst.name)
    tile, blocks = block.placement.shared[op.dst.name][1], copy.blocks
    inside = any(op in loop.body for loop in block.placement.program.loops())
    name, text = tma_load(len(op.spans), blocks > 1, block.launch.read_once and inside)
    helpers[name] = text
    slot = f"{ring.name}_base + {ring.name}_cursor.slot * {ring.slot_bytes}"
    bar = f"{ring.name}_full + {ring.name}_cursor.slot * 8"
    # One bit a block of the cluster.
    mask = f", {(1 << blocks) - 1}" if blocks > 1 else ""
    return [
        f"{name}({slot} + {buffer.offset + at}{shift}, {_map(copy)}, {bar}, {where}{mask});"
        for at, shift, where in _boxes(tile, copy, op, names)
    ]


def fetch_lines(
    block: BlockProgram, copy: TileCopy, op: Op, names: dict[str, str], helpers: dict[str, str]
) -> list[str]:
    """Ask L2 for what the copies of one load bring."""
    assert op.dst is not None
    name, text = tma_fetch(len(op.spans))
    helpers[name] = text
    tile = block.placement.shared[op.dst.name][1]
    return [f"{name}({_map(copy)}, {where});" for _, _, where in _boxes(tile, copy, op, names)]


def _map(copy: TileCopy) -> str:
    one = f"&{copy.map}"
    return f"(rank < {copy.blocks - 1} ? {one} : &{copy.last_map})" if copy.last_map else one


def _boxes(
    tile: SharedTile, copy: TileCopy, op: Op, names: dict[str, str]
) -> Iterator[tuple[int, str, str]]:
    """Of every box its place in the slot, what a block's number adds to it, and coordinates."""
    multicast = copy.blocks > 1
    for panel in range(copy.panels):
        at = panel * tile.panel_bytes
        row, col, shift = "0", str(panel * tile.panel_cols), ""
        if multicast and copy.rows < tile.rows:
            row, shift = f"rank * {copy.rows}", f" + rank * {copy.rows * tile.width}"
        elif multicast:
            col = f"(rank * {copy.panels} + {panel}) * {tile.panel_cols}"
            shift = f" + rank * {copy.panels * tile.panel_bytes}"
        for number, spans in enumerate(parts_of(op.spans)):
            for above in range(0, copy.rows, copy.box_rows):
                down = row if not above else str(above) if row == "0" else f"{row} + {above}"
                where = coordinates(spans, names, down, col)
                yield at + (number * copy.rows + above) * tile.width, shift, where
