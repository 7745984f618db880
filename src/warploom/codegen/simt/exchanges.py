"""How much shared memory the ops of a kernel without matmuls exchange; they use it in turn.

A transpose, a sub-tile, a gather, another order and a vector that is needed in its other form go
there as a whole, in rows of odd pitch: columns of it then lie in different banks. What runs along
an axis leaves one value of every warp there, where the axis goes over several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from warploom.codegen.simt.forms import COL, ROW, SCALAR, TILE, Layout, axis_form, wanted_form
from warploom.tile import Op, Program, TileType, Var
from warploom.tile.ops import OPS

WORD = 4  # bytes of an element in the exchange
PLACED = 8  # bytes of a value with its place, or of a largest value with its sum
WARP = 32
EXCHANGES = ("transpose", "slice", "gather", "quad_order")
Forms = Mapping[str, str]


def pitch(kind: TileType) -> int:
    """Elements from one row to the next in shared memory."""
    return kind.shape[-1] | 1


def exchange_bytes(kind: TileType) -> int:
    """Shared memory one exchange of the tile takes."""
    return WORD * (kind.shape[0] * pitch(kind) if len(kind.axes) == 2 else kind.shape[0])


def shared_bytes(
    program: Program, layout: Layout, forms: Forms, pairs: Collection[int] = ()
) -> int:
    """Bytes of shared memory that the neediest op of a program exchanges; the reductions `pairs`
    exchange two words of a result."""
    needs = (n for op in program.ops() for n in _needs(op, layout, forms, op.id in pairs))
    return max(needs, default=0)


def cluster_room(
    program: Program, layout: Layout, forms: Forms, pairs: Collection[int] = ()
) -> int:
    """Bytes of one exchange of the neediest reduction among the blocks that share the columns."""
    if layout.schedule.cluster == 1:
        return 0
    needs = [0]
    for op in program.ops():
        if OPS[op.kind].group != "reduce":
            continue
        kind, form = op.srcs[0].type, forms[op.srcs[0].name]
        if axis_form(kind, form, op.axis) == COL:
            results = layout.extents(kind, form)[0] if form == TILE else 1
            each = PLACED if op.kind == "argmax" or op.id in pairs else WORD
            warps = layout.lanes // WARP
            needs.append(warps * layout.schedule.rows * results * each)
    return -(-max(needs) // 16) * 16


def converts(form: str, wanted: str) -> bool:
    """Whether an operand of one form is exchanged to have another."""
    return form not in (wanted, SCALAR, TILE)


def _needs(op: Op, layout: Layout, forms: Forms, pair: bool = False) -> Iterator[int]:
    """The exchanges of one op."""
    if op.dst is None or op.kind == "load":
        return
    own, group = forms[op.dst.name], OPS[op.kind].group
    if op.kind in EXCHANGES:
        form = forms[op.srcs[0].name]
        yield exchange_bytes(op.srcs[0].type)
        if op.kind == "gather":
            yield from _operand(op.srcs[1], wanted_form(op.dst.type, form, op.srcs[1].type), forms)
    elif group in ("reduce", "scan"):
        form = forms[op.srcs[0].name]
        yield _along_axis(layout, op, form) * (2 if pair else 1)
        if group == "reduce":
            if form != TILE:
                return
            form = ROW if axis_form(op.srcs[0].type, form, op.axis) == COL else COL
    else:
        form = own
        for src in op.srcs:
            yield from _operand(src, wanted_form(op.dst.type, own, src.type), forms)
    if form != own:
        yield exchange_bytes(op.dst.type)


def needs_one_block(op: Op, layout: Layout, forms: Forms) -> bool:
    """Whether an op moves elements between columns, which only the threads of a block can."""
    group = OPS[op.kind].group
    if op.dst is None or op.kind == "load" or group == "reduce":
        return group == "reduce" and forms[op.srcs[0].name] == TILE and _changes(op, forms)
    if group == "scan" or op.kind in EXCHANGES:
        return True
    return any(True for _ in _needs(op, layout, forms))


def _changes(op: Op, forms: Forms) -> bool:
    assert op.dst is not None
    along = axis_form(op.srcs[0].type, TILE, op.axis)
    return forms[op.dst.name] != (ROW if along == COL else COL)


def _operand(var: Var, wanted: str, forms: Forms) -> Iterator[int]:
    if converts(forms[var.name], wanted):
        yield exchange_bytes(var.type)


def _along_axis(layout: Layout, op: Op, form: str) -> int:
    """Bytes that an op along an axis exchanges: its warps' values of each result."""
    kind, schedule = op.srcs[0].type, layout.schedule
    extents = layout.extents(kind, form)
    along = axis_form(kind, form, op.axis)
    count = extents[-1] if along == COL else extents[0]
    results = 1 if form != TILE else extents[0] if along == COL else extents[1]
    threads, stride = (schedule.lanes, 1) if along == COL else (schedule.rows, schedule.lanes)
    in_warp = min(max(1, WARP // stride), threads)
    if threads == in_warp:
        return 0
    if op.kind == "cumsum":
        results *= count // (schedule.vector if along == COL else 1)
    return schedule.threads // in_warp * results * (PLACED if op.kind == "argmax" else WORD)
