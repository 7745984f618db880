"""Code along an axis: reductions, argmax and running sums over what threads hold and share."""

from __future__ import annotations

from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import FLOAT_OPS, INT_OPS, literal
from warploom.codegen.cuda.simt.emit_map import rounded
from warploom.codegen.cuda.simt.emit_memory import Access, unroll
from warploom.codegen.cuda.simt.places import col, inside_col, peers, row
from warploom.codegen.cuda.values import c_index
from warploom.codegen.simt.forms import COL, TILE, Layout, axis_form
from warploom.codegen.simt.picks import Pick
from warploom.codegen.simt.schedule import WARP
from warploom.codegen.simt.weighted import Weighted
from warploom.tile import Op, TileType

FLOAT_IDENTITY = {"add": "0.0f", "max": "-INFINITY", "min": "INFINITY", "mul": "1.0f"}
INT_IDENTITY = {"add": "0", "max": "-2147483647 - 1", "min": "2147483647", "mul": "1"}
COMBINES = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul"}


def _own(layout: Layout, kind: TileType, form: str, axis: str) -> tuple[int, int, str]:
    """(results, elements of each a thread holds, condition that element `s` of result `t` is one).

    Results are the thread's rows or columns that stay; the reduced axis is what is run over.
    """
    extents = layout.extents(kind, form)
    along = axis_form(kind, form, axis)
    size = kind.size(axis)
    inside = inside_col(layout, size, "s")
    if along != COL:
        inside = f"{row(layout, 's')} < {size}" if layout.ragged_rows(size) else ""
    count = extents[-1] if along == COL else extents[0]
    if form != TILE:
        return 1, count, inside
    return extents[0] if along == COL else extents[1], count, inside


def element(form: str, along: str, name: str) -> str:
    """Element s of result t."""
    if form != TILE:
        return f"{name}[s]"
    return f"{name}[t][s]" if along == COL else f"{name}[s][t]"


def combined(
    layout: Layout, along: str, results: int, name: str, word: str, function: str
) -> list[str]:
    """What threads hold of each result, put together over a block and then over a cluster."""
    combine = f"[]({word} a, {word} b) {{ return {function}; }}"
    if layout.schedule.cluster > 1 and along == COL:
        return [
            f"combine<{_of_warp(layout)}, {results}>({name}, shared, {combine});",
            _over_blocks(layout, results, name, combine),
        ]
    return [f"combine<{peers(layout, along)}, {results}>({name}, shared, {combine});"]


def _over_blocks(layout: Layout, results: int, name: str, combine: str) -> str:
    """What the threads of a warp have in common, put together over the blocks of a cluster."""
    schedule = layout.schedule
    shape = f"{schedule.cluster}, {schedule.lanes}, {schedule.rows}, {results}, in_turns"
    return f"combine_blocks<{shape}>({name}, cluster_at, cluster_turn, {combine});"


def reduce_lines(layout: Layout, op: Op, form: str, source: str, into: str) -> list[str]:
    """`into` (an array of results, or the address of a scalar) = the reduction of `source`."""
    assert op.dst is not None
    kind = op.srcs[0].type
    along = axis_form(kind, form, op.axis)
    results, count, inside = _own(layout, kind, form, op.axis)
    integer = kind.dtype.kind == "int"
    combine = COMBINES[op.kind]
    table, identity = (INT_OPS, INT_IDENTITY) if integer else (FLOAT_OPS, FLOAT_IDENTITY)
    word = "int" if integer else "float"
    value = element(form, along, source)
    step = table[combine].format("total", f"({inside} ? {value} : {identity[combine]})" if inside
                                 else value)  # fmt: skip
    function = table[combine].format("a", "b")
    body = [f"{word} total = {identity[combine]};", *unroll("s", count, [f"total = {step};"])]
    lines = [
        *unroll("t", results, [*body, f"({into})[t] = total;"]),
        *combined(layout, along, results, into, word, function),
    ]
    return [*lines, *_rounded(op, results, into)]


def step_lines(layout: Layout, op: Op, source: str, into: str) -> tuple[str, str]:
    """What `into[i]` is before a reduction along columns, and its step by `source[i][j]`."""
    kind = op.srcs[0].type
    integer = kind.dtype.kind == "int"
    table, identity = (INT_OPS, INT_IDENTITY) if integer else (FLOAT_OPS, FLOAT_IDENTITY)
    combine, value = COMBINES[op.kind], f"{source}[i][j]"
    if inside := inside_col(layout, kind.size(op.axis)):
        value = f"({inside} ? {value} : {identity[combine]})"
    step = table[combine].format(f"{into}[i]", value)
    return f"{into}[i] = {identity[combine]};", f"{into}[i] = {step};"


def shared_lines(layout: Layout, op: Op, into: str) -> list[str]:
    """A reduction along the columns from what each thread has of it."""
    kind = op.srcs[0].type
    integer = kind.dtype.kind == "int"
    function = (INT_OPS if integer else FLOAT_OPS)[COMBINES[op.kind]].format("a", "b")
    results = layout.extents(kind, TILE)[0]
    word = "int" if integer else "float"
    lines = combined(layout, COL, results, into, word, function)
    return [*lines, *_rounded(op, results, into)]


def _rounded(op: Op, results: int, into: str) -> list[str]:
    assert op.dst is not None
    lines: list[str] = []
    if op.srcs[0].type.dtype.kind != "int" and op.dst.type.dtype.bits < 32:
        text = rounded(f"({into})[t]", op.dst.type.dtype)
        lines += unroll("t", results, [f"({into})[t] = {text};"])
    return lines


def own_top_lines(layout: Layout, op: Op, source: str, into: str, own: bool = True) -> list[str]:
    """`into` = the largest element of a row that a warp has; 0 where it has only -inf, below which
    nothing can be taken."""
    results, body = _of_own_columns(layout, op, source, into, own)
    kept = f"({into})[t] = ({into})[t] == -INFINITY ? 0.0f : ({into})[t];"
    return [
        *body,
        f"combine<{_of_warp(layout)}, {results}>({into}, shared, {_function('max')});",
        *unroll("t", results, [kept]),
    ]


def weighted_sum_lines(
    layout: Layout, op: Op, one: Weighted, source: str, into: str, own: bool = True
) -> list[str]:
    """`into` = the sum of weights of a row from those of its warps, which makes the largest value
    of a warp the row's; `share_of_` says what a warp's weights count."""
    top = c_name(one.top.name)
    results, body = _of_own_columns(layout, op, source, into, own)
    scale = literal(one.scale, "fp32")
    join = f"[](Weighted a, Weighted b) {{ return joined(a, b, {scale}); }}"
    lines = [
        *body,
        f"combine<{_of_warp(layout)}, {results}>({into}, shared, {_function('add')});",
        f"Weighted of_row[{results}];",
        *unroll("t", results, [
            f"{share_name(one)}[t] = ({into})[t] == 0.0f ? -INFINITY : {top}[t];",
            f"of_row[t] = Weighted{{{share_name(one)}[t], ({into})[t]}};",
        ]),
        _over_blocks(layout, results, "of_row", join) if layout.schedule.cluster > 1 else
        f"combine_warps<{peers(layout, COL)}, {results}>(of_row, shared, {join});",
    ]  # fmt: skip
    return [
        *lines,
        *unroll("t", results, [
            f"{share_name(one)}[t] = share_of({share_name(one)}[t], of_row[t].value, {scale});",
            f"{top}[t] = of_row[t].value;",
            f"({into})[t] = of_row[t].sum;",
        ]),
    ]  # fmt: skip


def share_name(one: Weighted) -> str:
    """The variable that has what the weights of a warp count in its rows."""
    return f"share_of_{c_name(one.total.name)}"


def _of_warp(layout: Layout) -> str:
    return f"{min(WARP, layout.schedule.lanes)}, 1"


def _function(combine: str) -> str:
    return f"[](float a, float b) {{ return {FLOAT_OPS[combine].format('a', 'b')}; }}"


def _of_own_columns(
    layout: Layout, op: Op, source: str, into: str, own: bool
) -> tuple[int, list[str]]:
    """(rows, lines) of a reduction over the columns that a thread holds."""
    results, count, inside = _own(layout, op.srcs[0].type, TILE, op.axis)
    if not own:
        return results, []
    combine = COMBINES[op.kind]
    value = element(TILE, COL, source)
    value = f"({inside} ? {value} : {FLOAT_IDENTITY[combine]})" if inside else value
    step = FLOAT_OPS[combine].format("total", value)
    body = [f"float total = {FLOAT_IDENTITY[combine]};", *unroll("s", count, [f"total = {step};"])]
    return results, unroll("t", results, [*body, f"({into})[t] = total;"])


def pick_lines(layout: Layout, pick: Pick, into: str, stored: bool) -> list[str]:
    """`into` = one element of each row, from memory; of an array that is `stored` to further down
    by an access that keeps its place before the barrier there."""
    load = pick.load
    assert load.dst is not None
    access = Access(layout, load, load.dst.type, TILE)
    inside = access.inside(f"unsigned(at) < {load.dst.type.shape[1]}u")
    edge = access.edge()
    where = f"{access.line}, {access.first_column} + at"
    reading = "read_any" if access.step else "read_whole"
    stride = f", {access.step}" if access.step else ""
    lines = [
        f"const int at = {c_name(pick.place.name)}[i] - ({c_index(pick.start)});",
        f"Line<{access.element}, 1> one;",
        f"{reading}(one, {where}, {access.length}{stride}, {inside}, {edge});"
        if access.step or stored
        else f"read_early<false>(one, {access.line} + {access.first_column} + at, "
        f"{access.first_column} + at, {access.length}, {inside}, {edge});",
        f"values_of(&({into})[i], one);",
        f"if (unsigned(at) >= {load.dst.type.shape[1]}u) ({into})[i] = 0;",
    ]
    return unroll("i", layout.groups(load.dst.type.shape[0]), lines)


def argmax_lines(layout: Layout, op: Op, form: str, source: str, into: str) -> list[str]:
    """`into` = the position of the first largest element along the axis."""
    kind = op.srcs[0].type
    along = axis_form(kind, form, op.axis)
    results, count, inside = _own(layout, kind, form, op.axis)
    integer = kind.dtype.kind == "int"
    word, least = ("FoundInt", INT_IDENTITY["max"]) if integer else ("Found", "-INFINITY")
    place = col(layout, "s") if along == COL else row(layout, "s")
    value = element(form, along, source)
    found = f"{word}{{{value}, {place}}}"
    step = f"best = better(best, {found});"
    body = [
        f"{word} best{{{least}, 2147483647}};",
        *unroll("s", count, [f"if ({inside}) {step}" if inside else step]),
        "found[t] = best;",
    ]
    return [
        f"{word} found[{results}];",
        *unroll("t", results, body),
        *combined(layout, along, results, "found", word, "better(a, b)"),
        *unroll("t", results, [f"({into})[t] = found[t].place;"]),
    ]


def scan_lines(layout: Layout, op: Op, form: str, source: str, into: str) -> list[str]:
    """`into` = running sums of `source`: within the thread's neighbours, over the peers, on from
    one chunk (or group of rows) to the next.
    """
    assert op.dst is not None
    kind = op.srcs[0].type
    along = axis_form(kind, form, op.axis)
    results, count, inside = _own(layout, kind, form, op.axis)
    width = layout.schedule.vector if along == COL else 1
    pieces = count // width
    word = "int" if kind.dtype.kind == "int" else "float"
    value = element(form, along, source)
    value = f"({inside} ? {value} : 0)" if inside else value
    target = element(form, along, into)
    number = results * pieces
    at = f"t * {pieces} + part"
    summed = [f"const int s = part * {width} + h;", f"before[{at}] += {value};"]
    written = [f"const int s = part * {width} + h;", f"running += {value};"]
    kept = rounded("running", op.dst.type.dtype) if word == "float" else "running"
    written.append(f"{target} = {kept};")
    return [
        f"{word} before[{number}], total[{number}];",
        *unroll("t", results, unroll("part", pieces, [
            f"before[{at}] = 0;", *unroll("h", width, summed)])),
        f"scan<{peers(layout, along)}, {number}>(before, total, shared);",
        *unroll("t", results, [
            f"{word} carry = 0;",
            *unroll("part", pieces, [
                f"{word} running = carry + before[{at}];",
                *unroll("h", width, written),
                f"carry += total[{at}];",
            ]),
        ]),
    ]  # fmt: skip
