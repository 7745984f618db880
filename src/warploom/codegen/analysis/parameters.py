"""What a kernel takes, in order: tensor maps, arrays with their strides, sizes, scalars.

A load into shared memory is cut into boxes of a tensor map; where all blocks of a cluster want the
same tile, each copies a slice of it to all of them. Maps are named in the order in which the roles
first use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.analysis.stores import STORES, StorePath
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, steps_of
from warploom.codegen.ir.layout import CORE_ROWS, SharedTile, boxes
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Fill, Run, Step
from warploom.errors import InputError
from warploom.tile import Op, Program
from warploom.tile.evaluate import parts_of
from warploom.tile.index import multiple_of
from warploom.tile.ir import joint_axis

MULTICASTS = (2, 4, 8)  # blocks of a cluster that one copy can bring a tile to
MOST_DIMENSIONS = 5  # of a tensor map
PIECE = 8  # elements of one 16-byte copy without TMA


@dataclass(frozen=True)
class TensorMap:
    """One tensor map: the box is innermost first, in elements; swizzle and promotion in bytes."""

    name: str
    array: str
    dtype: str
    box: tuple[int, ...]
    swizzle: int
    written: bool
    promotion: int

    def to_json(self) -> dict[str, Any]:
        """The parameter as plain data; the usual promotion goes without saying."""
        own = {} if self.promotion == LaunchPlan.l2_promotion else {"promotion": self.promotion}
        return {
            "kind": "map",
            "array": self.array,
            "dtype": self.dtype,
            "box": list(self.box),
            "swizzle": self.swizzle,
            "written": self.written,
            "name": self.name,
            **own,
        }


@dataclass(frozen=True)
class TileCopy:
    """How one load is copied into its slot.

    blocks       of the cluster, each of which copies a slice to all; 1: the block alone
    rows, panels of a slice; the last slice has what is left of the rows. Of a tile of stacked
                 parts: of a part
    box_rows     of a box
    map          its tensor map, and that of the last slice where it has fewer rows ("": it has not)
    """

    blocks: int
    rows: int
    panels: int
    box_rows: int
    map: str
    last_map: str = ""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a kernel, and which tensor maps its loads and stores use (by op number).

    `direct` are the arrays that are read or written through a pointer.
    """

    maps: tuple[TensorMap, ...]
    copies: Mapping[int, TileCopy]
    stores: Mapping[int, str]
    direct: tuple[str, ...]
    all: tuple[dict[str, Any], ...]


def kernel_parameters(block: BlockProgram, paths: Mapping[int, StorePath]) -> Parameters:
    """The parameters of a block program for a GPU with TMA.

    Raises `InputError` at the user's line for a tile that the copy engine cannot bring.
    """
    maps = _Maps(block.launch.l2_promotion)
    copies: dict[int, TileCopy] = {}
    stores: dict[int, str] = {}
    for op in _in_order(block):
        if op.dst is not None and op.id not in copies:
            copies[op.id] = _tile_copy(block, op, maps)
        elif op.kind in STORES and (panels := paths[op.id].panels) is not None:
            if op.array is not None and op.array.fragments:
                continue
            tile = panels.tile
            stores[op.id] = maps.name_of(op, tile.rows, tile.cols, tile.width)
    direct = _direct(block, paths)
    found = tuple(maps.found)
    rest = _pointers_and_sizes(block, direct)
    everything = (*(one.to_json() for one in found), *rest)
    return Parameters(found, copies, stores, direct, everything)


def plain_parameters(block: BlockProgram, paths: Mapping[int, StorePath]) -> Parameters:
    """The parameters for a GPU without TMA: every array is a pointer, and those that are copied in
    pieces of 16 bytes must be aligned to that."""
    for ring in block.rings:
        for buffer in ring.buffers:
            for op in buffer.loads:
                _check_pieces(op)
    arrays = [op.array.name for op in block.placement.program.ops() if op.array]
    direct = tuple(dict.fromkeys((*_direct(block, paths), *arrays)))
    copied = {
        op.array.name
        for ring in block.rings
        for buffer in ring.buffers
        for op in buffer.loads
        if op.array
    }
    found = _pointers_and_sizes(block, direct)
    for parameter in found:
        if parameter["kind"] == "pointer" and parameter["array"] in copied:
            parameter["aligned"] = True
    return Parameters((), {}, {}, direct, tuple(found))


def _check_pieces(op: Op) -> None:
    """Raise where a load cannot be copied in pieces of 16 bytes (cp.async)."""
    assert op.array is not None and op.dst is not None
    if len(op.dst.type.axes) == 1:
        raise InputError(
            f"{op.where}: load of {op.dst}: without TMA the producer brings no vectors; let the "
            "compute groups load it"
        )
    if op.value not in (0, 0.0):
        raise InputError(f"{op.where}: load with edge={op.value} into shared memory: only 0.0")
    if op.array.dtype.bytes != 2:
        raise InputError(
            f"{op.where}: matmul of {op.array.dtype}: mma.sync here multiplies bf16 and fp16"
        )
    spanned = [d for d, span in enumerate(op.spans) if span.size is not None]
    if any(span.others for span in op.spans):
        raise InputError(f"{op.where}: load of stacked parts: only TMA (sm_90a) has code for it")
    if len(spanned) != 2 or spanned[1] != len(op.spans) - 1:
        raise InputError(
            f"{op.where}: load of {op.array}: copies of 16 bytes span two dimensions, the second "
            "of them the last of the array"
        )
    start = op.spans[-1].start
    if multiple_of(start) % PIECE:
        raise InputError(
            f"{op.where}: load of {op.array} from {start}: copies of 16 bytes begin at multiples "
            f"of {PIECE} elements, and this is not one for every value"
        )


@dataclass
class _Maps:
    """Tensor maps, each once."""

    promotion: int
    found: list[TensorMap] = field(default_factory=list[TensorMap])

    def name_of(self, op: Op, rows: int, cols: int, width: int) -> str:
        """The name of the map with that box on the op's array."""
        assert op.array is not None
        sizes = {d: span.size for d, span in enumerate(op.spans) if span.size is not None}
        spanned, joint = list(sizes), joint_axis(op.spans)
        vector = op.dst is not None and len(op.dst.type.axes) == 1
        wanted = 2 - vector
        if joint:  # one box of all its dimensions
            wanted += len([span for span in op.spans if span.axis == joint]) - 1
        if joint and (vector or prod(list(sizes.values())[:-1]) != rows):
            raise InputError(
                f"{op.where}: {op.kind} of {op.array}: an axis that several dimensions are is "
                f"copied in one box of {rows} rows"
            )
        if len(spanned) != wanted or spanned[-1] != len(op.spans) - 1:
            raise InputError(
                f"{op.where}: {op.kind} of {op.array}: TMA tiles span two dimensions, or vectors "
                "one, the last of them the last of the array"
            )
        if len(op.spans) > MOST_DIMENSIONS:
            raise InputError(
                f"{op.where}: {op.array} has more than {MOST_DIMENSIONS} dimensions, TMA's limit"
            )
        box = [1] * len(op.spans)
        box[spanned[0]], box[spanned[-1]] = rows, cols
        if joint:
            box[: spanned[-1]] = [sizes.get(d, 1) for d in range(spanned[-1])]
        array, written = op.array, op.kind in STORES
        taken = sum(one.array == array.name for one in self.found)
        name = f"{array.name}_map{taken or ''}"
        kind, box_ = array.dtype.name, tuple(reversed(box))
        new = TensorMap(name, array.name, kind, box_, width, written, self.promotion)
        for known in self.found:
            if known.to_json() == new.to_json() | {"name": known.name}:
                return known.name
        self.found.append(new)
        return name


def _in_order(block: BlockProgram) -> list[Op]:
    """The loads and stores of the roles as their code names them, the producer's first."""
    roles = sorted(block.roles, key=lambda role: not role.loads)
    moving = [s.op for role in roles for s in _steps(role) if isinstance(s, Fill | Run)]
    copied = [op for op in moving if op.array is not None]
    return [op for op in copied if op.kind in STORES or _is_filled(block, op)]


def _is_filled(block: BlockProgram, op: Op) -> bool:
    return op.dst is not None and block.placement.is_shared(op.dst)


def _steps(role: Role) -> list[Step]:
    found: list[Step] = [*role.ahead]
    for section in role.sections:
        if isinstance(section, Pipeline):
            parts = (*section.prologue, section.steady, *section.epilogue, section.plain)
            found += [step for part in parts for step in part]
        else:
            found += steps_of(section)
    return found


def _tile_copy(block: BlockProgram, op: Op, maps: _Maps) -> TileCopy:
    assert op.dst is not None
    if op.value not in (0, 0.0):
        raise InputError(f"{op.where}: load with edge={op.value} through TMA: it gives only 0.0")
    plan = block.launch
    tile = block.placement.shared[op.dst.name][1]
    blocks = plan.cluster[1] if is_multicast(block.placement.program, plan, op) else 1
    if blocks > 1 and blocks not in MULTICASTS:
        raise InputError(
            f"{op.where}: {op.label} is the same for all {blocks} blocks of a cluster; multicast "
            f"is over {', '.join(map(str, MULTICASTS))}"
        )
    rows, panels = _slice(tile, blocks)
    if not rows:
        raise InputError(
            f"{op.where}: tile of {tile.rows} rows and {tile.panels} panels cannot be cut for "
            f"multicast over {blocks} blocks"
        )
    parts, cut = parts_of(op.spans), rows < tile.rows
    if rows % (len(parts) * CORE_ROWS) and len(parts) > 1:
        raise InputError(
            f"{op.where}: load of {len(parts)} parts of {rows // len(parts)} rows: what is stacked "
            f"in shared memory has a multiple of {CORE_ROWS} rows"
        )
    rows //= len(parts)
    high = rows // boxes(rows) if rows > 1 else rows
    name, last = maps.name_of(op, high, tile.panel_cols, tile.swizzled), ""
    left = tile.rows - (blocks - 1) * rows
    if cut and left < rows:
        last = maps.name_of(op, left, tile.panel_cols, tile.swizzled)
    return TileCopy(blocks, rows, panels, high, name, last)


def _slice(tile: SharedTile, blocks: int) -> tuple[int, int]:
    """(rows, panels) that each block of a cluster copies, the last one what is left of the rows."""
    if tile.panels % blocks == 0:
        return tile.rows, tile.panels // blocks
    groups = tile.rows // CORE_ROWS
    rows = -(-groups // blocks) * CORE_ROWS
    if rows * (blocks - 1) < tile.rows:
        return rows, tile.panels
    return 0, 0  # some blocks would have nothing


def _direct(block: BlockProgram, paths: Mapping[int, StorePath]) -> tuple[str, ...]:
    """The arrays whose elements are read or written one by one, at least at the end of a range: a
    box cannot end early."""
    program = block.placement.program
    found: dict[str, None] = {}
    for op in program.ops():
        if op.array is None or _is_filled(block, op):
            continue
        stopped = any(span.stop is not None for span in op.spans) or op.array.fragments
        if op.kind in STORES and paths[op.id].panels is not None and not stopped:
            continue
        found[op.array.name] = None
    found |= {op.turn.counts.name: None for op in program.ops() if op.turn is not None}
    return tuple(found | dict.fromkeys(read.array.name for read in program.every_read()))


def _pointers_and_sizes(block: BlockProgram, direct: tuple[str, ...]) -> list[dict[str, Any]]:
    program = block.placement.program
    result: list[dict[str, Any]] = []
    for name in direct:
        result += array_parameters(program, name)
    result += [{"kind": "dim", "name": dim} for dim in program.dims]
    if block.launch.tile_scheduler == "dynamic":
        result.append({"kind": "counter"})
    return result + scalar_parameters(program)


def array_parameters(program: Program, name: str) -> list[dict[str, Any]]:
    """The pointer of an array and the strides of all dimensions but the last."""
    array = program.array(name)
    written = any(
        (op.array == array and op.kind in STORES)
        or (op.turn is not None and op.turn.counts == array)
        for op in program.ops()
    )
    pointer = {"kind": "pointer", "array": name, "dtype": array.dtype.name, "written": written}
    strides = [{"kind": "stride", "array": name, "dim": dim} for dim in range(len(array.dims) - 1)]
    return [pointer, *strides]


def scalar_parameters(program: Program) -> list[dict[str, Any]]:
    """The scalars of a program."""
    return [
        {"kind": "scalar", "name": var.name, "dtype": var.type.dtype.name}
        for var in program.scalars
    ]
