"""Register tiles that a matmul reads from shared memory: a copy after every op that writes one.

The copy lies in the layout of a loaded operand (`ir.layout`), in a region of the group's own, or
where every group writes its part in one of all, between two meetings (`passes.meetings`).
Joins keep the op behind the matmuls that read the copy before (`analysis.hazards`).
The way back is `from_slots_lines`: an op works on the elements of a loaded operand.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.register_tiles import PACKED
from warploom.codegen.cuda.emit_rows import WARP
from warploom.codegen.cuda.lines import indent, unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import rounded
from warploom.codegen.cuda.values import At, Values
from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.codegen.ir.layout import CHUNK
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.reads import SLOT_COLUMNS
from warploom.errors import InputError
from warploom.tile import Op, TileType, Var
from warploom.tile.ops import NIBBLES

Names = dict[str, str]

MATRIX_BYTES = 32  # of a row of a tile that one stmatrix writes
FEW = 2  # staged tiles, whose addresses a loop may keep
# (from, to) -> the device function that casts two bytes at once
BYTE_PAIRS = {
    ("e4m3", "fp16"): "halves_e4m3",
    ("int8", "bf16"): "bytes_bf16",
    ("int8", "fp16"): "bytes_fp16",
}


def vectors_of(values: Values, ring: Ring) -> list[str]:
    """Where the vectors of a ring's slot are. What is read at once is volatile: the compiler would
    read it where it is used."""
    lines: list[str] = []
    for buffer in ring.buffers:
        for var in (op.dst for op in buffer.loads if op.dst and len(op.dst.type.axes) == 1):
            word = var.type.dtype.kind
            shift = f"({ring.name}_at - in_block(smem_address(shared_raw))) + {buffer.offset}"
            lines.append(
                f"const {word}* const {var.name}_slot = reinterpret_cast<const {word}*>("
                f"__builtin_assume_aligned(shared_raw + {shift}, {CHUNK}));"
            )
            if values.reads_at_once(var):
                (count, halves), place = values.extents(var.type), At("row", i="h")
                row = values.row(var.type.names[0], var.type.shape[0], place)
                read = f"*static_cast<const volatile {word}*>(&{var.name}_slot[{row}])"
                lines += [
                    f"{word} {var.name}_own[{count}][{halves}];",
                    *unrolled("t", count),
                    *unrolled("h", halves),
                    f"    {var.name}_own[t][h] = {read};",
                ]
    return lines


def from_slots_lines(
    block: BlockProgram, values: Values, ops: Sequence[Op], names: Names
) -> list[str]:
    """Ops on the same elements of what lies in slots: `ldmatrix` brings 16 columns at a time into
    registers, transposing where the tile has its rows along the columns there. Elements of 8 bits
    come in pairs, each lane's own."""
    first = ops[0]
    assert first.dst is not None
    inner = _slot_reads(block, values, first)
    for op in ops:
        lines = _from_words(values, op, names)
        inner += ["{", *indent(lines), "}"] if len(ops) > 1 else lines
    return [
        *unrolled("t", values.blocks(first.dst.type)),
        *unrolled("s", values.columns(first.dst.type) // SLOT_COLUMNS),
        "{",
        *indent(inner),
        "}",
    ]


def read_together(values: Values, one: Op, other: Op) -> bool:
    """Whether two ops take the same elements of tiles in slots and neither takes the other's."""
    placement = values.placement
    read = placement.slots_read(one)
    if one.dst is None or other.dst is None or not any(len(var.type.axes) == 2 for var in read):
        return False
    return (
        {var.name for var in read} == {var.name for var in placement.slots_read(other)}
        and placement.oriented(one.dst.type).axes == placement.oriented(other.dst.type).axes
        and one.dst not in placement.fusion.sources(other)
        and other.dst not in placement.fusion.sources(one)
        and all(
            moves_on(placement, op) or op.dst.name not in placement.staged
            for op in (one, other)
            if op.dst
        )
    )


def _slot_reads(block: BlockProgram, values: Values, op: Op) -> list[str]:
    """The words of 16 columns of what an op reads from slots."""
    assert op.dst is not None
    kind = values.placement.oriented(op.dst.type)
    begin = values.part_size(kind.names[1], kind.shape[1])
    col = f"part * {begin} + s * 16" if begin else "s * 16"
    read = values.placement.slots_read(op)
    return [line for var in read for line in _slot_read(block, values, var, kind, col)]


def _slot_read(
    block: BlockProgram, values: Values, var: Var, kind: TileType, col: str
) -> list[str]:
    """The words of 16 columns of a tile in a slot, for a tile of registers of that kind."""
    tile, (ring, buffer) = values.placement.shared[var.name][1], block.home(var.name)
    first = values.first_row(kind.names[0], kind.shape[0])
    row = f"{first} + t * 64 + int(threadIdx.x % 128 / 32 * 16)"
    base, words = f"{ring.name}_base", f"{c_name(var.name)}_words"
    # Reads need the block's number in a cluster, which descriptors must not have.
    number = f" + ({base} - in_block({base}))" if block.launch.cluster[1] > 1 else ""
    at = f"{words}, {ring.name}_at + {buffer.offset}{number}, {row}, {col}"
    if var.type.dtype.bytes == 1:
        return [
            f"unsigned short {words}[4];",
            f"read_bytes<{tile.width}, {tile.rows}>({at});",
        ]
    deep = str(kind.names[0] == var.type.names[0]).lower()
    return [f"unsigned {words}[4];", f"read_left<{tile.width}, {tile.rows}, {deep}>({at});"]


def _from_words(values: Values, op: Op, names: Names) -> list[str]:
    """What an op makes of the words of 16 columns."""
    assert op.dst is not None
    moved, name = moves_on(values.placement, op), c_name(op.dst.name)
    into = "moved[i]" if moved else f"{name}[t][4 * s + i]"
    read = {var.name: f"{c_name(var.name)}_words[i]" for var in values.placement.slots_read(op)}
    whole = _nibble_pair(values, op) or _byte_pair(values, op)
    whole = whole or values.product_word(op, "t", "4 * s + i", names, read)
    if whole:
        count, body = 4, f"{into} = {whole};"
    elif op.dst.type.dtype.name in PACKED:
        low, high = (
            values.expression(op, At("tile", i=f"(8 * s + 2 * i + {c})"), names, rounds=False)
            for c in (0, 1)
        )
        count, body = 4, f"{into} = pack_{op.dst.type.dtype}({low}, {high});"
    else:
        text = rounded(op, values.expression(op, At("tile", i="(8 * s + i)"), names))
        count, body = 8, f"{name}[t][8 * s + i] = {text};"
    inner = [*unrolled("i", count), f"  {body}"]
    if moved:
        room, place = _staged_place(values, op, True)
        words = ", ".join(f"moved[{i}]" for i in range(4))
        inner = ["unsigned moved[4];", *inner, f"stmatrix({room}({place}), {words});"]
    return inner


def moves_on(placement: Placement, op: Op) -> bool:
    """Whether a tile goes from a slot straight into a group's own staged region, 16 columns at a
    time, as matmuls alone read it, and there: all of it is more than registers hold."""
    if op.dst is None or op.dst.type.dtype.name not in PACKED:
        return False
    name = op.dst.name
    if name not in placement.staged or name in placement.common or not placement.slots_read(op):
        return False
    ops = placement.program.ops()
    readers = [one for one in ops if any(var.name == name for var in one.srcs)]
    right = all(one.kind == "mma" and one.srcs[0] != op.dst for one in readers)
    whole = placement.staged[name].cols % SLOT_COLUMNS == 0
    return right and whole and not placement.transposed(op.dst.type)


def held_name(var: Var) -> str:
    """The registers that have the first columns of a loaded first operand of matmuls."""
    return f"{c_name(var.name)}_held"


def held_lines(block: BlockProgram, values: Values, ring: Ring) -> list[str]:
    """Read what a ring's slot has of the launch plan's `held_steps` into registers."""
    lines: list[str] = []
    products = [op for op in block.placement.program.ops() if op.kind == "mma"]
    for op in {op.srcs[0].name: op for op in products}.values():
        held = block.launch.held_steps.get(op.srcs[0].name)
        if not held or block.home(op.srcs[0].name)[0] != ring:
            continue
        assert op.dst is not None
        var, kind, blocks = op.srcs[0], values.placement.oriented(op.dst.type), values.blocks
        own, words = held_name(var), f"{c_name(var.name)}_words"
        lines.append(f"unsigned {own}[{blocks(op.dst.type)}][{4 * len(held)}];")
        for place, step in enumerate(held):
            read = _slot_read(block, values, var, kind, str(step * SLOT_COLUMNS))
            lines += [
                *unrolled("t", blocks(op.dst.type)),
                "{",
                *indent(read),
                "  #pragma unroll",
                f"  for (int i = 0; i < 4; ++i) {own}[t][{4 * place} + i] = {words}[i];",
                "}",
            ]
    return lines


def hand_lines(values: Values, var: Var) -> list[str]:
    """Leave a vector along rows for the other groups, in the slot whose turn it is."""
    return _handed(values, var, "if (lane % 4 == 0) {place} = {own};")


def take_lines(values: Values, var: Var) -> list[str]:
    """Take a vector along rows that one group has left for all."""
    return _handed(values, var, "{own} = {place};")


def _handed(values: Values, var: Var, form: str) -> list[str]:
    name, rows = var.name, var.type.shape[0]
    blocks, halves = values.extents(var.type)
    place = f"{name}_handed[{name}_turn * {rows} + t * 64 + thread_row + h * 8]"
    return [
        f"{name}_turn ^= 1;",
        *unrolled("t", blocks),
        *unrolled("h", halves),
        f"    {form.format(place=place, own=f'{c_name(name)}[t][h]')}",
    ]


def turn_lines(block: BlockProgram, op: Op) -> list[str]:
    """Turn a loaded 8-bit tile: transposed and in the order of quads into the slot acquired, by the
    warps behind the producer's."""
    assert op.dst is not None
    role = next(role for role in block.roles if role.transposes)
    (ring, buffer), (source, raw) = map(
        block.home, (op.dst.name, block.placement.turned[op.dst.name])
    )
    # Reads need the block's number in a cluster, which descriptors must not have.
    base = f"{source.name}_base"
    number = f" + ({base} - in_block({base}))" if block.launch.cluster[1] > 1 else ""
    tile, loaded = buffer.tile, raw.tile
    form = (
        f"{tile.width}, {tile.rows}, {loaded.width}, {loaded.rows}, {loaded.cols}, {role.warps}, "
        f"{steps_ahead(role.registers)}"
    )
    to = f"{ring.name}_base + {ring.name}_cursor.slot * {ring.slot_bytes} + {buffer.offset}"
    return [f"turn_tile<{form}>({to}, {source.name}_at + {raw.offset}{number});"]


def steps_ahead(registers: int) -> int:
    """How many steps of turning a wide tile have their matrices on their way, in so many registers
    a thread: each takes four and addresses, and more spill."""
    return max(1, 3 + (registers - 40) // 6)


def _nibble_pair(values: Values, op: Op) -> str:
    """The packed word of two neighbours, where an op casts nibbles of what lies in slots."""
    inner = values.placement.fusion.inlined.get(op.srcs[0].name)
    if op.kind != "cast" or inner is None or inner.kind not in NIBBLES or op.dst is None:
        return ""
    if op.dst.type.dtype.name not in PACKED or not values.placement.is_shared(inner.srcs[0]):
        return ""
    shift = 4 if inner.kind == "high_nibble" else 0
    return f"nibbles_{op.dst.type.dtype}({c_name(inner.srcs[0].name)}_words[i], {shift})"


def _byte_pair(values: Values, op: Op) -> str:
    """The packed word of two neighbours, where an op casts bytes in a few instructions a pair."""
    source = op.srcs[0]
    kinds = source.type.dtype.name, op.dst.type.dtype.name if op.dst else ""
    if op.kind != "cast" or kinds not in BYTE_PAIRS or not values.placement.is_shared(source):
        return ""
    return f"{BYTE_PAIRS[kinds]}({c_name(source.name)}_words[i])"


def at_use(placement: Placement, address: str) -> str:
    """The address of a staged tile where it is used.

    ptxas keeps what it derives from an address, descriptors too, in registers over the whole loop.
    Of many staged tiles that is more than there are (the gated delta rule: 312 B of spills).
    """
    return f"at_use({address})" if len(placement.staged) > FEW else address


def takes_turns(block: BlockProgram, name: str) -> bool:
    """Whether a staged tile has several slots."""
    return block.launch.staged_slots > 1 and name in block.placement.common


def fenced_as_met(block: BlockProgram, name: str) -> bool:
    """Whether groups fence what they wrote of a staged tile as they meet."""
    handed = block.launch.divided and name in block.placement.handed
    return handed or (block.launch.fence_at_meeting and takes_turns(block, name))


def stage_lines(
    values: Values,
    op: Op,
    names: Names,
    fence: bool,
    slot: int = 0,
    later: bool = False,
    kept: bool = False,
) -> list[str]:
    """Copy the tile that `op` has written; `fence` where the copy engine's proxy reads it. In a
    region of all groups it is fenced here, or `later` as they meet; what is in a group's own, the
    steps around it see to (`passes.group_syncs`). `slot`: bytes of one, where the tile has two in
    turn; `kept`: the places in them stand in registers (`kept_places`)."""
    assert op.dst is not None
    tile = values.placement.staged[op.dst.name]
    if values.placement.transposed(op.dst.type):
        raise InputError(
            f"{op.where}: tile {op.dst.name} is transposed in its registers and a matmul's operand "
            "in shared memory: there is no code for both; let the matmul contract its other axis"
        )
    common = op.dst.name in values.placement.common
    head = [*unrolled("t", values.blocks(op.dst.type))]
    turn, size = f"{op.dst.name}_turn", op.dst.type.dtype.bytes
    matrices = (
        fence and tile.cols * size % MATRIX_BYTES == 0
    )  # stmatrix came with Hopper, as the proxy did
    room, place = _staged_place(values, op, matrices, turn if slot else "", fence)
    if matrices:
        words = ", ".join(values.word(op.dst, "t", f"4 * s + {i}", names) for i in range(4))
        to = f"{op.dst.name}_places[t][s] + {turn}" if kept else f"{room}({place})"
        lines = [
            *head,
            *unrolled("s", tile.cols * size // MATRIX_BYTES),
            f"    stmatrix({to}, {words});",
        ]
    else:
        word = values.word(op.dst, "t", "i", names)
        lines = [
            *head,
            *unrolled("i", tile.cols * size // 8),
            f"    shared_write({room}({place}), int({word}));",
        ]
    return [
        *([f"{turn} ^= {slot};"] if slot else []),
        *lines,
        *(["fence_async();"] if common and fence and not later else []),
    ]


def kept_places(values: Values, name: str) -> list[str]:
    """Where a lane writes its parts of a staged tile in the first of two slots. What a shuffle
    gives, ptxas keeps, and does not work out again in every iteration."""
    op = next(o for o in values.placement.program.ops() if o.dst is not None and o.dst.name == name)
    assert op.dst is not None
    tile, blocks = values.placement.staged[name], values.blocks(op.dst.type)
    count = tile.cols * op.dst.type.dtype.bytes // MATRIX_BYTES
    room, place = _staged_place(values, op, True)
    return [
        f"unsigned {name}_places[{blocks}][{count}];",
        *unrolled("t", blocks),
        *unrolled("s", count),
        f"    {name}_places[t][s] = __shfl_sync(0xffffffffu, {room}({place}), lane);",
    ]


def _staged_place(
    values: Values, op: Op, matrices: bool, turn: str = "", fence: bool = True
) -> tuple[str, str]:
    """(the region of a staged tile with the function of a place in it, the place that a lane writes
    of block t: for four matrices of 16 columns s, or for word i)."""
    assert op.dst is not None
    placement, name = values.placement, op.dst.name
    tile = placement.staged[name]
    first = values.first_row(op.dst.type.names[0], op.dst.type.shape[0])
    begin = f"{f'{first} + ' if name in placement.common else ''}t * 64"
    room = f"{name}_room + {turn}" if turn else f"{name}_room"
    room = at_use(placement, room) if fence else room
    if matrices:
        place = f"{begin} + {WARP} * 16 + lane % 16, (s * 16 + lane / 16 * 8) * 2"
    else:
        place = f"{begin} + thread_row + i % 2 * 8, (i / 2 * 8 + thread_col) * 2"
    return f"{room} + tile_offset<{tile.width}, {tile.rows}>", place
