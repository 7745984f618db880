"""Code for the ops that a compute group runs on registers: elementwise, reductions, loads, stores.

Every function gives the lines of one op; loops over elements are unrolled by the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.codegen.analysis.exchanges import crosses_rows, exchanges, over_lanes
from warploom.codegen.analysis.register_tiles import LANES, PACKED
from warploom.codegen.cuda.emit_blocks import lower_inverse_lines
from warploom.codegen.cuda.emit_cols import argmax_lines, cumsum_lines, slice_lines
from warploom.codegen.cuda.emit_exchange import exchange_lines
from warploom.codegen.cuda.emit_lanes import ALONG_LANES
from warploom.codegen.cuda.emit_rows import (
    combining,
    group_sync,
    row_argmax_lines,
    row_cumsum_lines,
    row_reduce_lines,
)
from warploom.codegen.cuda.lines import indent, unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import REDUCE, rounded
from warploom.codegen.cuda.values import GROUP, MOVED, At, Values
from warploom.errors import InputError
from warploom.tile import Op, TileType, Var
from warploom.tile.index import multiple_of
from warploom.tile.ops import OPS
from warploom.tile.typing import QUAD_PLACES

Names = dict[str, str]
ALONG_COLUMNS = {"argmax": argmax_lines, "cumsum": cumsum_lines, "slice": slice_lines}
ALONG_ROWS = {"argmax": row_argmax_lines, "cumsum": row_cumsum_lines} | dict.fromkeys(
    REDUCE, row_reduce_lines
)
FEW_QUADS = 4  # of a vector in fragments that all lie in registers at once


def compute_lines(values: Values, op: Op, names: Names) -> list[str]:
    """The lines of an op whose result is a register tile."""
    assert op.dst is not None
    group = OPS[op.kind].group
    if crosses_rows(values.placement, op):
        if values.halves == 1:
            raise InputError(
                f"{op.where}: {op.kind} over rows with lower_rows: expected ops of single rows"
            )
        return ALONG_ROWS[op.kind](values, op, names)
    if over_lanes(values.placement, op) and op.kind in ALONG_LANES:
        return ALONG_LANES[op.kind](values, op, names)
    if exchanges(values.placement, op):
        return exchange_lines(values, op, names, _assign)
    if op.dst.name in values.placement.spread:
        return spread_lines(values, op, names)
    if op.kind in REDUCE:
        return reduce_lines(values, op, names)
    if op.kind in ALONG_COLUMNS:
        return ALONG_COLUMNS[op.kind](values, op, names)
    if op.kind == "lower_inverse":
        return lower_inverse_lines(values, op, names)
    if op.kind == "cast" and values.is_fragment(op.dst):
        return fragment_lines(values, op, names)
    if op.kind in ("where", "copy") and values.is_fragment(op.dst):
        return _chosen_fragment(values, op, names)
    if group in ("unary", "binary", "compare", "select") or op.kind in (
        "cast",
        "copy",
        "transpose",
        "rename",
        "fill",
        "coordinate",
        "load",
    ):
        return elementwise_lines(values, op, names)
    raise InputError(
        f"{op.where}: {op.kind} has no code beside matmuls; a program without one takes a SIMT "
        "schedule"
    )


def _in_registers(values: Values, var: Var) -> bool:
    """Whether a tile lies there as it is, with every element where its transpose has it."""
    placement = values.placement
    there = var.name not in placement.fusion.inlined and not placement.is_shared(var)
    return there and values.form(var.type) == "tile" and not values.is_fragment(var)


def elementwise_lines(values: Values, op: Op, names: Names) -> list[str]:
    """`dst = f(srcs)` for every element this thread holds."""
    assert op.dst is not None
    # A packed tile rounds when a pair is put together.
    packed = values.form(op.dst.type) == "tile" and op.dst.type.dtype.name in PACKED
    if packed and op.kind == "where" and values.form(op.srcs[0].type) in ("row", "scalar"):
        return _chosen_words(values, op, names)
    word = values.product_word(op, "t", "i", names) if packed else ""
    if packed and (mask := values.masked(op)) is not None:
        low, high = (
            values.element(mask[1], At("tile", "t", f"(2 * i + {n})"), names) for n in (0, 1)
        )
        word = f"pack_{op.dst.type.dtype}({low}, {high}) & {op.dst.name}_mask[t][i]"
    if packed and op.kind in MOVED and _in_registers(values, op.srcs[0]):
        word = values.word(op.srcs[0], "t", "i", names)
    if word:
        blocks, count = values.extents(op.dst.type)
        line = f"    {c_name(op.dst.name)}[t][i] = {word};"
        return [*unrolled("t", blocks), *values.each(count, 2), line]

    def value(at: At) -> str:
        text = values.expression(op, at, names, rounds=not packed)
        return text if packed else rounded(op, text)

    lines = _assign(values, op.dst, value, whole=op.kind == "fill")
    if not (vectors := values.fragments_of(op)):
        return lines
    reads = [line for var in vectors for line in _quads_read(var)]
    return ["{", *indent([*reads, *lines]), "}"]


def _quads_read(var: Var) -> list[str]:
    """A thread's columns of a vector in fragments, four of 16 in one access.

    Few are read in their place. Many would fill registers: the compiler may read them when it needs
    them (H200, attention backward: of 128 rows 2.45 to 2.39 ms; of 64, 2.10 to 2.11).
    """
    count, own = var.type.shape[0] // QUAD_PLACES, f"{var.name}_own"
    if count > FEW_QUADS:
        at = f"{var.name}_slot + n * {QUAD_PLACES} + thread_col * 2"
        read = f"read_quad_later(&{own}[4 * n], {at});"
    else:
        at = f"smem_address({var.name}_slot) + n * {4 * QUAD_PLACES} + thread_col * 8"
        read = f"read_quad(&{own}[4 * n], {at});"
    return [f"float {own}[{4 * count}];", *unrolled("n", count), f"    {read}"]


def spread_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Each thread loads its elements of a vector that the group shares."""
    assert op.dst is not None
    length, name = op.dst.type.shape[0], c_name(op.dst.name)
    read = f"{name}[piece] = {values.load(op, At('spread', i='column'), names)};"
    return [
        *unrolled("piece", values.pieces(op.dst.type)),
        "{",
        f"  const int column = threadIdx.x % {GROUP} + piece * {GROUP};",
        f"  if (column < {length}) {read}",
        "}",
    ]


def share_lines(values: Values, tiles: Sequence[Var]) -> list[str]:
    """Put vectors into the group's shared memory."""
    sync = group_sync(values.placement.groups)
    written: list[str] = []
    for var in tiles:
        for n in range(values.pieces(var.type)):
            column = f"threadIdx.x % {GROUP} + {n * GROUP}"
            into = f"{var.name}_shared[{column}] = {c_name(var.name)}[{n}];"
            written.append(f"if ({column} < {var.type.shape[0]}) {into}")
    return [sync, *written, sync]


def _chosen_words(values: Values, op: Op, names: Names) -> list[str]:
    """A `where` of packed tiles by a condition on rows: the two columns of a word go together."""
    assert op.dst is not None
    blocks, count = values.extents(op.dst.type)
    condition = values.element(op.srcs[0], At("tile", i="2 * i"), names)
    left, right = (values.word(src, "t", "i", names) for src in op.srcs[1:])
    line = f"    {c_name(op.dst.name)}[t][i] = {condition} ? {left} : {right};"
    return [*unrolled("t", blocks), *values.each(count, 2), line]


def _assign(
    values: Values, dst: Var, expression: Callable[[At], str], whole: bool = False
) -> list[str]:
    """A value for every element that a thread holds; `whole`: of rows that are not there, too."""
    form, name = values.form(dst.type), c_name(dst.name)
    extents = values.extents(dst.type)
    if form == "scalar":
        return [f"{name} = {expression(At('scalar'))};"]
    if form in ("col", "lane"):
        return [*unrolled("i", extents[0]), f"    {name}[i] = {expression(At(form))};"]
    packed = form == "tile" and dst.type.dtype.name in PACKED
    if packed:
        low, high = expression(At("tile", i="2 * i")), expression(At("tile", i="2 * i + 1"))
        body = f"{name}[t][i] = pack_{dst.type.dtype}({low}, {high});"
    else:
        body = f"{name}[t][i] = {expression(At(form))};"
    some = unrolled("i", values.halves) if form == "row" else values.each(extents[1], 1 + packed)
    some = unrolled("i", extents[1]) if whole else some
    return [*unrolled("t", extents[0]), *some, f"    {body}"]


def fragment_lines(values: Values, op: Op, names: Names) -> list[str]:
    """A tile cast to 8 bits, as the first operand of a matmul wants it.

    Of every 16 columns a lane holds the pairs 2 q, 2 q + 1 and 8 + 2 q, 9 + 2 q (q = lane % 4) and
    must give columns 4 q to 4 q + 3: two lanes of its quad have them (PTX ISA, wgmma register
    fragments of 32-bit accumulators and of 8-bit operands).
    """
    assert op.dst is not None
    if op.dst.type.shape[1] % 32:
        raise InputError(f"{op.where}: cast to {op.dst.type}: columns must be a multiple of 32")
    return _fragment_words(values, op.dst, _fragment_word(values, op.dst.type, op.srcs[0], names))


def _fragment_words(values: Values, dst: Var, word: str) -> list[str]:
    blocks, words = values.blocks(dst.type), values.columns(dst.type) // 8
    line = f"    {c_name(dst.name)}[t][i] = {word};"
    return [*unrolled("t", blocks), *values.each(words, 2), line]


def _fragment_word(values: Values, kind: TileType, source: Var, names: Names) -> str:
    """Word i of a fragment: rows + 8 (i % 2), columns 16 (i / 2) and on, of elements of a tile.

    In the order of quads (`Tile.quad_order`) each thread has what it must give.
    """
    inner = values.placement.fusion.inlined.get(source.name)
    ordered = inner is not None and inner.kind == "quad_order"
    if inner is not None and ordered:
        source = inner.srcs[0]
    first = "16 * (i / 4) + 8 * (i % 4 / 2) + 2 * (i % 2)"
    at = [
        values.element(source, At("tile", i=f"{first} + {4 * pair + c}"), names)
        for pair in range(2)
        for c in range(2)
    ]
    word = f"pack_{kind.dtype}({', '.join(at)})"
    return word if ordered else f"quad_fragment({word})"


def _chosen_fragment(values: Values, op: Op, names: Names) -> list[str]:
    """A `where` of fragments by a condition on rows: the four columns of a word go together."""
    assert op.dst is not None

    def word(var: Var) -> str:
        inner = values.placement.fusion.inlined.get(var.name)
        if inner is None:
            return f"{c_name(var.name)}[t][i]"
        return _fragment_word(values, var.type, inner.srcs[0], names)

    if op.kind == "copy":
        # As a move the compiler would bring it behind matmuls that read the old words, and drain
        # them: 0 is added that it cannot know.
        size = next(iter(values.placement.program.arrays)).dims[0]
        return _fragment_words(values, op.dst, f"{word(op.srcs[0])} | ({c_name(size)} >> 31)")
    condition = values.element(op.srcs[0], At("tile", i="2 * i"), names)
    left, right = (word(src) for src in op.srcs[1:])
    return _fragment_words(values, op.dst, f"{condition} ? {left} : {right}")


def reduce_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One value a row: over this thread's columns, then over the 4 lanes of the row."""
    assert op.dst is not None
    source = op.srcs[0]
    _, join, identity = combining(op)
    name = c_name(op.dst.name)
    if values.form(source.type) == "col":
        element = values.element(source, At("col"), names)
        shuffled = f"__shfl_xor_sync(0xffffffffu, {name}, step)"
        return [
            "{",
            f"  {name} = {identity};",
            *indent(unrolled("i", values.extents(source.type)[0])),
            f"    {name} = {join(name, element)};",
            "  #pragma unroll",
            f"  for (int step = 1; step < 4; step *= 2) {name} = {join(name, shuffled)};",
            *rounded_in_place(op, name),
            "}",
        ]
    blocks = values.extents(op.dst.type)[0]
    count = values.columns(source.type) // 2
    element = values.element(source, At("tile"), names)
    half = f"{name}[t][i >> 1 & 1]"
    lane = f"{name}[t][i]"
    shuffled = f"__shfl_xor_sync(0xffffffffu, {lane}, step)"
    return [
        *unrolled("t", blocks),
        "{",
        f"  {name}[t][0] = {name}[t][1] = {identity};",
        *indent(values.each(count)),
        f"    {half} = {join(half, element)};",
        *indent(unrolled("i", values.halves)),
        "  #pragma unroll",
        "    for (int step = 1; step < 4; step *= 2)",
        f"      {lane} = {join(lane, shuffled)};",
        *rounded_in_place(op, f"{name}[t][0]", f"{name}[t][1]"),
        "}",
    ]


def rounded_in_place(op: Op, *elements: str) -> list[str]:
    """Lines that round the result of a reduction to its element type, where that is narrow."""
    lines = [f"  {element} = {rounded(op, element)};" for element in elements]
    return lines if rounded(op, "x") != "x" else []


def direct_store_lines(values: Values, op: Op, names: Names) -> list[str]:
    """A store from registers, element by element, with bounds."""
    assert op.array is not None
    source = op.srcs[0]
    form = values.form(source.type)
    at = At(form)
    offset, inside = values.address(op, source.type, at, names)
    element = values.element(source, at, names, rounds=False)
    dtype = op.array.dtype.name
    pointer = f"{op.array.name}_data + {offset}"
    if op.kind == "store_add":
        write = f"add_{dtype}({pointer}, {element});"
    elif dtype in ("fp32", "int32"):
        write = f"*({pointer}) = {element};"
    else:
        write = f"write_{dtype}({pointer}, {element});"
    if form == "row":
        blocks = values.extents(source.type)[0]
        return [
            "if ((threadIdx.x & 3) == 0) {",
            *indent((*unrolled("t", blocks), *unrolled("i", values.halves))),
            f"    if ({inside}) {write}",
            "}",
        ]
    if form in ("col", "lane"):
        only = f"threadIdx.x % 128 < {4 if form == 'col' else LANES}"
        if form == "lane" and source.type.shape[0] % LANES:
            inside += f" && {values.place(*source.type.axes[0], at)} < {source.type.shape[0]}"
        return [
            f"if ({only}) {{",
            *[f"  {line}" for line in unrolled("i", values.extents(source.type)[0])],
            f"    if ({inside}) {write}",
            "}",
        ]
    if form == "scalar":
        return [f"if (threadIdx.x % 128 == 0) {{ if ({inside}) {write} }}"]
    blocks, count = values.blocks(source.type), values.columns(source.type) // 2
    lines = [*unrolled("t", blocks), *unrolled("i", count), f"    if ({inside}) {write}"]
    return _in_pairs(values, op, names, lines) if _pairs(values, op) else lines


def _pairs(values: Values, op: Op) -> bool:
    """Whether neighbours of a row that a thread holds are neighbours in memory: of fp32 elements,
    stored as they lie, from an even column on."""
    assert op.array is not None
    kind, last = op.srcs[0].type, op.spans[-1]
    return (
        op.kind == "store"
        and op.array.dtype.name == "fp32"
        and kind.names == tuple(s.axis for s in op.spans if s.size is not None)
        and not values.placement.transposed(kind)
        and last.size is not None
        and last.stop is None
        and multiple_of(last.start) % 2 == 0
    )


def _in_pairs(values: Values, op: Op, names: Names, single: list[str]) -> list[str]:
    """A store of fp32 tiles, 8 bytes a lane where pitches allow it: a row's four lanes then write a
    whole sector, of which single elements would write every second one."""
    source, array = op.srcs[0], op.array
    assert array is not None
    few = values.halves == 1
    first, half = ("4 * j", "0") if few else ("2 * j", "")
    offset, *inside = values.bounds(op, source.type, At("tile", i=first, half=half), names)
    places = [At("tile", i=i, half=half) for i in (first, f"{first} + 1")]
    pair = ", ".join(values.element(source, place, names) for place in places)
    store = f"store_pair({array.name}_data + {offset}, {pair});"
    strides = [f"{array.name}_stride{d}" for d in range(len(array.dims) - 1)]
    odd = " | ".join([*strides, c_name(array.dims[-1])])
    address = f"reinterpret_cast<unsigned long long>({array.name}_data)"
    count = values.columns(source.type) // 4
    if few:  # a warp without a row leaves all out
        each = unrolled("j", count // 2)
        lines = [
            f"if ({inside[0] or 'true'}) {{",
            *indent(each),
            f"    if ({inside[1]}) {store}",
            "}",
        ]
    else:
        check = " && ".join(one for one in inside if one)
        lines = [*unrolled("j", count), f"    if ({check}) {store}"]
    return [
        f"if ((({odd}) & 1) == 0 && {address} % 8 == 0) {{",
        *indent((*unrolled("t", values.blocks(source.type)), *lines)),
        "} else {",
        *indent(single),
        "}",
    ]


def wide_store_lines(values: Values, op: Op, names: Names) -> list[str]:
    """A store from registers, 16 bytes a lane where pitches allow it (`StorePath.wide`).

    The four lanes of a row exchange words, so that each holds 8 neighbouring columns and together
    they write 64 bytes: two whole sectors. Where the columns are no multiple of that, the last 64
    bytes of a row overlap the ones before.
    """
    source, plain = op.srcs[0], direct_store_lines(values, op, names)
    assert op.array is not None
    groups, array = values.columns(source.type) // 8, op.array
    half = "h" if values.halves == 1 else ""
    at = At("tile", i="4 * (j + lane % 4) + 2 * h", half=half)
    offset, *inside = values.bounds(op, source.type, at, names)
    words = [values.word(source, "t", f"2 * (j + {g}) + h", names) for g in range(4)]
    strides = [f"{array.name}_stride{d}" for d in range(len(array.dims) - 1)]
    odd = " | ".join([*strides, c_name(array.dims[-1])])
    address = f"reinterpret_cast<unsigned long long>({array.name}_data)"
    store = f"store_16_bytes({array.name}_data + {offset} - thread_col"
    if values.halves == 1:
        wide = _wide_of_few(words, groups, store, *inside)
    else:
        wide = [
            "#pragma unroll",
            f"    for (int q = 0; q < {groups}; q += 4) {{",
            f"      const int j = ::min(q, {groups - 4});",
            f"      unsigned w[4] = {{{', '.join(words)}}};",
            "      quad_exchange(w, lane % 4);",
            f"      if ({' && '.join(one for one in inside if one)})",
            f"        {store}, w);",
            "    }",
        ]
    return [
        f"if ((({odd}) & 7) == 0 && {address} % 16 == 0) {{",
        *indent((*unrolled("t", values.blocks(source.type)), *unrolled("h", values.halves))),
        *indent(wide),
        "} else {",
        *indent(plain),
        "}",
    ]


def _wide_of_few(words: list[str], groups: int, store: str, rows: str, column: str) -> list[str]:
    """All words of the eight rows of a warp before the first store; nothing where the array has
    none of them. Lanes exchange words, so that a warp goes on together."""
    pieces = -(-groups // 4)
    first = f"const int j = ::min(4 * q, {groups - 4});"
    each = ["#pragma unroll", f"for (int q = 0; q < {pieces}; ++q) {{", f"  {first}"]
    return [
        f"    if (__any_sync(0xffffffffu, {rows or 'true'})) {{",
        f"      unsigned w[{pieces}][4];",
        *[f"      {line}" for line in each],
        *[f"        w[q][{g}] = {word};" for g, word in enumerate(words)],
        "        quad_exchange(w[q], lane % 4);",
        "      }",
        *[f"      {line}" for line in each],
        f"        if ({' && '.join(one for one in (rows, column) if one)})",
        f"          {store}, w[q]);",
        "      }",
        "    }",
    ]
