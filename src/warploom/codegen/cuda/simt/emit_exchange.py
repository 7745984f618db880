"""Code for what moves elements between threads: transposes, sub-tiles, gathers, changes of form.

Every exchange is the same: the tile is written to shared memory in rows of odd pitch (columns of it
then lie in different banks), and read again by those who need it.
"""

from __future__ import annotations

from warploom.codegen.cuda.simt.emit_memory import unroll
from warploom.codegen.cuda.simt.places import col, row
from warploom.codegen.simt.exchanges import pitch
from warploom.codegen.simt.forms import COL, ROW, TILE, Layout
from warploom.tile import Op, TileType


def put_lines(layout: Layout, kind: TileType, form: str, name: str) -> list[str]:
    """Write a tile to shared memory, once everybody has read what was there before."""
    word = kind.dtype.kind
    extents = layout.extents(kind, form)
    to = f"static_cast<{word}*>(static_cast<void*>(shared))"
    conditions: list[str] = []
    if form in (TILE, ROW) and layout.ragged_rows(kind.shape[0]):
        conditions.append(f"{row(layout)} < {kind.shape[0]}")
    if form in (TILE, COL) and layout.ragged_cols(kind.shape[-1]):
        conditions.append(f"{col(layout)} < {kind.shape[-1]}")
    if form == ROW and layout.schedule.lanes > 1:
        conditions.append("thread_col == 0")
    if form == COL and layout.schedule.rows > 1:
        conditions.append("thread_row == 0")
    check = f"if ({' && '.join(conditions)}) " if conditions else ""
    if form == TILE:
        at = f"{row(layout)} * {pitch(kind)} + {col(layout)}"
        body = unroll("j", extents[1], [f"{check}{to}[{at}] = {name}[i][j];"])
        lines = unroll("i", extents[0], body)
    elif form == ROW:
        lines = unroll("i", extents[0], [f"{check}{to}[{row(layout)}] = {name}[i];"])
    else:
        lines = unroll("j", extents[0], [f"{check}{to}[{col(layout)}] = {name}[j];"])
    return ["__syncthreads();", *lines, "__syncthreads();"]


def get_lines(
    layout: Layout, source: TileType, target: TileType, form: str, into: str, at: tuple[str, ...],
    outside: str = "",
) -> list[str]:  # fmt: skip
    """Read `into`, of type `target`, from the exchanged `source`; `at` is the position there.

    `outside` is a condition under which there is no such position, and the value then.
    """
    word = source.dtype.kind
    place = f"({at[0]}) * {pitch(source)} + {at[1]}" if len(at) == 2 else at[0]
    read = f"static_cast<const {word}*>(static_cast<void*>(shared))[{place}]"
    conditions: list[str] = []
    if form in (TILE, ROW) and layout.ragged_rows(target.shape[0]):
        conditions.append(f"{row(layout)} < {target.shape[0]}")
    if form in (TILE, COL) and layout.ragged_cols(target.shape[-1]):
        conditions.append(f"{col(layout)} < {target.shape[-1]}")
    if outside:
        missing = "NAN" if source.dtype.is_float else "0"
        read = f"({outside} ? {read} : {missing})"
    if conditions:
        read = f"({' && '.join(conditions)} ? {read} : {word}(0))"
    extents = layout.extents(target, form)
    if form == TILE:
        return unroll("i", extents[0], unroll("j", extents[1], [f"{into}[i][j] = {read};"]))
    name = "i" if form == ROW else "j"
    return unroll(name, extents[0], [f"{into}[{name}] = {read};"])


def position(layout: Layout, form: str) -> tuple[str, ...]:
    """The position of the element at hand in its own tile."""
    if form == TILE:
        return row(layout), col(layout)
    return (row(layout),) if form == ROW else (col(layout),)


def transpose_lines(layout: Layout, op: Op, source: str, into: str) -> list[str]:
    """`into` = `source` with its axes exchanged."""
    assert op.dst is not None
    kind = op.srcs[0].type
    at = (col(layout), row(layout))
    return [
        *put_lines(layout, kind, TILE, source),
        *get_lines(layout, kind, op.dst.type, TILE, into, at),
    ]


def slice_lines(layout: Layout, op: Op, form: str, source: str, into: str) -> list[str]:
    """`into` = the part of `source` from `op.value` on along the axis."""
    assert op.dst is not None
    kind, start = op.srcs[0].type, int(op.value or 0)
    at = list(position(layout, form))
    number = kind.names.index(op.axis)
    at[number] = f"{at[number]} + {start}"
    return [
        *put_lines(layout, kind, form, source),
        *get_lines(layout, kind, op.dst.type, form, into, tuple(at)),
    ]


def quad_place_text(place: str) -> str:
    """The C++ of the element that a place has in the order of quads."""
    return f"({place} & ~14 | ({place} & 2) << 2 | ({place} & 12) >> 1)"


def quad_lines(layout: Layout, op: Op, form: str, source: str, into: str) -> list[str]:
    """`into` = `source` in the order of quads along the axis (`typing.quad_places`)."""
    kind = op.srcs[0].type
    at = list(position(layout, form))
    number = kind.names.index(op.axis)
    at[number] = quad_place_text(f"({at[number]})")
    return [
        *put_lines(layout, kind, form, source),
        *get_lines(layout, kind, kind, form, into, tuple(at)),
    ]


def gather_lines(
    layout: Layout, op: Op, form: str, source: str, index: str, into: str
) -> list[str]:
    """`into` = elements of `source` at positions `index` along the axis; NaN (0) where none is.

    `index` is the C++ of the position for the element at hand.
    """
    assert op.dst is not None
    kind = op.srcs[0].type
    at = list(position(layout, form))
    number = kind.names.index(op.axis)
    at[number] = index
    exists = f"static_cast<unsigned>({index}) < {kind.shape[number]}u"
    return [
        *put_lines(layout, kind, form, source),
        *get_lines(layout, kind, op.dst.type, form, into, tuple(at), exists),
    ]


def convert_lines(
    layout: Layout, kind: TileType, form: str, wanted: str, name: str, into: str
) -> list[str]:
    """A vector beside rows becomes one beside columns, or the other way round."""
    return [
        *put_lines(layout, kind, form, name),
        *get_lines(layout, kind, kind, wanted, into, position(layout, wanted)),
    ]
