"""Code along the columns of register tiles: argmax, running sums, parts.

A row's columns are spread over the 4 lanes of a quad, two neighbours of every eight each
(`cuda.values`), so everything here ends with shuffles inside quads. A vector along columns is one
row, which all quads hold.
"""

from __future__ import annotations

from warploom.codegen.analysis.register_tiles import COLUMN_GROUP, PACKED
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import rounded
from warploom.codegen.cuda.values import At, Values
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]


def _columns(values: Values, op: Op) -> int:
    """The columns of the source; raises when the op does not run along a tile's columns."""
    source = values.placement.oriented(op.srcs[0].type)
    if source.shape[-1] % COLUMN_GROUP or op.axis != source.names[-1]:
        raise InputError(
            f"{op.where}: {op.kind} along {op.axis!r} of {source}: beside matmuls there is code "
            f"for tiles with a multiple of {COLUMN_GROUP} columns; other programs take a SIMT "
            "schedule"
        )
    return source.shape[-1]


def _at(values: Values, op: Op, pair: str, which: str) -> At:
    """Where a thread's element `which` (0 or 1) of the eight columns `pair` is."""
    if values.form(op.srcs[0].type) == "col":
        return At("col", i=f"(2 * {pair} + {which})")
    return At("tile", "t", f"(4 * {pair} + 2 * h + {which})")


def _loops(values: Values, op: Op, body: list[str]) -> list[str]:
    if values.form(op.srcs[0].type) == "col":
        return ["{", *[f"  {line}" for line in body], "}"]
    blocks = values.blocks(op.srcs[0].type)
    return [
        "#pragma unroll",
        f"for (int t = 0; t < {blocks}; ++t)",
        "#pragma unroll",
        "  for (int h = 0; h < 2; ++h) {",
        *[f"    {line}" for line in body],
        "  }",
    ]


def argmax_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One position a row: the first of the largest; NaN is larger than every number."""
    assert op.dst is not None
    groups = _columns(values, op) // COLUMN_GROUP
    source = op.srcs[0]
    integer = source.type.dtype.name == "int32"
    word, least = ("FoundInt", "-2147483647 - 1") if integer else ("Found", "-INFINITY")
    element = values.element(source, _at(values, op, "j", "i"), names)
    place = "" if values.form(source.type) == "col" else "[t][h]"
    body = [
        f"{word} best{{{least}, 2147483647}};",
        "#pragma unroll",
        f"for (int j = 0; j < {groups}; ++j)",
        "#pragma unroll",
        f"  for (int i = 0; i < 2; ++i) best = better(best, "
        f"{word}{{{element}, j * 8 + thread_col + i}});",
        "best = better(best, swap_with(best, 1));",
        "best = better(best, swap_with(best, 2));",
        f"{c_name(op.dst.name)}{place} = best.place;",
    ]
    return _loops(values, op, body)


def cumsum_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Running sums of every row: over the quad within eight columns, then on to the next eight."""
    assert op.dst is not None
    groups = _columns(values, op) // COLUMN_GROUP
    source = op.srcs[0]
    word = "int" if source.type.dtype.name == "int32" else "float"
    low, high = (values.element(source, _at(values, op, "j", str(i)), names) for i in (0, 1))
    into = c_name(op.dst.name)
    sums = ("before + low", "before + low + high")
    if values.form(op.dst.type) == "col":
        written = [f"  {into}[2 * j + {i}] = {rounded(op, sums[i])};" for i in (0, 1)]
    elif op.dst.type.dtype.name in PACKED:
        written = [f"  {into}[t][2 * j + h] = pack_{op.dst.type.dtype}({', '.join(sums)});"]
    else:
        written = [
            f"  {into}[t][4 * j + 2 * h + {i}] = {rounded(op, text)};"
            for i, text in enumerate(sums)
        ]
    body = [
        f"{word} carry = 0;",
        "#pragma unroll",
        f"for (int j = 0; j < {groups}; ++j) {{",
        f"  const {word} low = {low}, high = {high};",
        f"  {word} running = low + high;",
        "  #pragma unroll",
        "  for (int step = 1; step < 4; step *= 2) {",
        f"    const {word} before = __shfl_up_sync(0xffffffffu, running, step);",
        "    if (int(lane % 4) >= step) running += before;",
        "  }",
        f"  {word} before = __shfl_up_sync(0xffffffffu, running, 1);",
        "  before = lane % 4 == 0 ? carry : carry + before;",
        *written,
        "  carry += __shfl_sync(0xffffffffu, running, lane | 3);",
        "}",
    ]
    return _loops(values, op, body)


def slice_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Some of the columns, in whole groups of eight: registers of the same thread.

    Other parts are exchanged (`cuda.emit_exchange`).
    """
    assert op.dst is not None
    source, start = op.srcs[0], int(op.value or 0)
    form, into = values.form(source.type), c_name(op.dst.name)
    extents = values.extents(op.dst.type)
    if form == "col":
        element = values.element(source, At("col", i=f"(i + {start // 4})"), names)
        return ["#pragma unroll", f"for (int i = 0; i < {extents[0]}; ++i) {into}[i] = {element};"]
    if op.dst.type.dtype.name in PACKED:
        element = values.word(source, "t", f"(i + {start // 4})", names)
    else:
        element = values.element(source, At("tile", "t", f"(i + {start // 2})"), names)
    return [
        "#pragma unroll",
        f"for (int t = 0; t < {extents[0]}; ++t)",
        "#pragma unroll",
        f"  for (int i = 0; i < {extents[1]}; ++i) {into}[t][i] = {element};",
    ]
