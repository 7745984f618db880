"""Code that reads what other threads hold: gathers, and parts of a tile that are no whole groups.

The group's part of the source goes to shared memory (`analysis.exchanges`), one word an element,
and every thread reads the places of its own elements of the result.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.analysis.exchanges import over_lanes, pitch
from warploom.codegen.cuda.emit_lanes import from_lanes_lines
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.values import At, Values
from warploom.tile import Op, Var

Names = dict[str, str]
Assign = Callable[[Values, Var, Callable[[At], str]], list[str]]


def exchange_lines(values: Values, op: Op, names: Names, assign: Assign) -> list[str]:
    """The lines of a gather, a slice or a rename; `assign` writes every element of a variable."""
    assert op.dst is not None
    source, dst = op.srcs[0], op.dst
    if over_lanes(values.placement, op):
        reads = assign(values, dst, lambda at: _read(values, op, at, names))
        return from_lanes_lines(values, op, names, reads)
    word = "int" if source.type.dtype.name == "int32" else "float"
    sync = group_sync(values.placement.groups)
    return [
        "{",
        f"{word}* const met = reinterpret_cast<{word}*>(scratch);",
        sync,
        *_write(values, source, names),
        sync,
        *assign(values, op.dst, lambda at: _read(values, op, at, names)),
        "}",
    ]


def _row(at: At) -> str:
    return f"(({at.t}) * 64 + thread_row + ({at.h}) * 8)"


def _write(values: Values, source: Var, names: Names) -> list[str]:
    form, kind = values.form(source.type), source.type
    at = At(form)
    element = values.element(source, at, names)
    if form == "tile":
        return [
            "#pragma unroll",
            f"for (int t = 0; t < {values.blocks(kind)}; ++t)",
            "#pragma unroll",
            f"  for (int i = 0; i < {values.columns(kind) // 2}; ++i)",
            f"    met[{_row(at)} * {pitch(values.columns(kind))} + {values.col(at)}] = {element};",
        ]
    if form == "row":
        return [
            "if ((lane & 3) == 0) {",
            "#pragma unroll",
            f"  for (int t = 0; t < {values.blocks(kind)}; ++t)",
            "#pragma unroll",
            f"    for (int i = 0; i < 2; ++i) met[{_row(at)}] = {element};",
            "}",
        ]
    return [
        "if (threadIdx.x % 128 < 4) {",
        "#pragma unroll",
        f"  for (int i = 0; i < {kind.shape[0] // 4}; ++i) met[{values.col(at)}] = {element};",
        "}",
    ]


def _read(values: Values, op: Op, at: At, names: Names) -> str:
    kind, form = op.srcs[0].type, values.form(op.srcs[0].type)
    if op.kind == "rename":
        assert op.dst is not None
        place = {"row": _row(at), "col": values.col(at)}.get(at.kind)
        if place is None:
            size = kind.shape[0]
            place = f"::min({values.place(*op.dst.type.axes[0], at)}, {size - 1})"
        return f"met[{place}]"
    along_rows = op.axis in values.placement.rows
    length = values.placement.local(kind).size(op.axis)
    mine = _row(at) if along_rows else values.col(at)
    if form == "lane":
        assert op.dst is not None
        mine = values.place(*op.dst.type.axes[0], at)
    if op.kind == "gather":
        place = values.element(op.srcs[1], at, names)
    else:
        place = f"({mine} + {int(op.value or 0)})"
    if form == "tile":
        row, col = (place, values.col(at)) if along_rows else (_row(at), place)
        offset = f"{row} * {pitch(values.columns(kind))} + {col}"
    else:
        offset = place
    if op.kind != "gather":
        return f"met[{f'::min({offset}, {length - 1})' if form == 'lane' else offset}]"
    nothing = "0" if kind.dtype.name == "int32" else "NAN"
    return f"(unsigned({place}) < {length}u ? met[{offset}] : {nothing})"
