"""Code along the rows of register tiles: what the warps of a compute group find out together.

A column's rows are spread over the blocks of 64 rows, the 4 warps and the 8 quads of a warp: each
thread combines its own, shuffles combine the quads, shared memory (`analysis.exchanges`) the warps.
A vector along rows is one column, which the 4 lanes of a row all hold.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.analysis.exchanges import WARPS
from warploom.codegen.analysis.register_tiles import PACKED
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import FLOAT_OPS, INT_OPS, REDUCE, rounded
from warploom.codegen.cuda.values import At, Values
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]
WARP = "threadIdx.x % 128 / 32"


def combining(op: Op) -> tuple[str, Callable[[str, str], str], str]:
    """(C++ type, how two values are combined, what a reduction begins with)."""
    combine, real, whole = REDUCE[op.kind]
    if op.srcs[0].type.dtype.name == "int32":
        return "int", INT_OPS[combine].format, whole
    return "float", FLOAT_OPS[combine].format, real


class _Rows:
    """What the ops along rows share: the source's columns, loops over them, its elements."""

    def __init__(self, values: Values, op: Op, names: Names) -> None:
        assert op.dst is not None
        kind = values.placement.oriented(op.srcs[0].type)
        self.vector = values.form(kind) == "row"
        self.blocks, self.cols = values.blocks(kind), (*kind.shape, 1)[1]
        if self.cols % 8 and not self.vector:
            raise InputError(
                f"{op.where}: {op.kind} along {op.axis!r} of {kind}: its columns must be a "
                "multiple of 8"
            )
        self.name, self.parts = c_name(op.dst.name), values.placement.parts
        self.one = self.name if self.vector else f"{self.name}[i]"
        place = "((i >> 1) * 4 + h * 2 + (i & 1))"
        self.own_place = f"{self.name}[t][{'h' if self.vector else place}]"
        at = At("row", "t", "h") if self.vector else At("tile", "t", place)
        self.element = values.element(op.srcs[0], at, names)
        self.column = "0" if self.vector else "(i >> 1) * 8 + thread_col + (i & 1)"
        self.writers = f"lane < {1 if self.vector else 4}"
        self.sync = group_sync(values.placement.groups)

    def columns(self, body: list[str]) -> list[str]:
        """`body` for every column i that a thread holds."""
        return [
            *([] if self.vector else ["#pragma unroll"]),
            "{" if self.vector else f"for (int i = 0; i < {self.cols // 4}; ++i) {{",
            *indent(body),
            "}",
        ]

    def own(self, body: str) -> list[str]:
        """`body` for every row (block t, half h) that a thread holds of a column."""
        return [
            "#pragma unroll",
            f"for (int t = 0; t < {self.blocks}; ++t)",
            "#pragma unroll",
            f"  for (int h = 0; h < 2; ++h) {body}",
        ]

    def region(self, word: str, blocks: int = 1) -> str:
        """Declares `met`: a value of every warp (and block of rows) for every column."""
        shape = f"[{blocks}][{WARPS}][{self.cols}]"
        return f"auto& met = *reinterpret_cast<{word} (*){shape}>(scratch);"


def row_reduce_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One value a column, the same in all threads that hold the column."""
    rows = _Rows(values, op, names)
    word, join, identity = combining(op)
    one = rows.one
    shuffled = f"__shfl_xor_sync(0xffffffffu, {one}, step)"
    whole = join(one, f"met[0][s][{rows.column}]")
    done = rounded(op, one)
    return [
        "{",
        rows.region(word),
        *rows.columns(
            [
                f"{one} = {identity};",
                *rows.own(f"{one} = {join(one, rows.element)};"),
                "#pragma unroll",
                "for (int step = 4; step < 32; step *= 2)",
                f"  {one} = {join(one, shuffled)};",
            ]
        ),
        rows.sync,
        f"if ({rows.writers}) {{",
        *rows.columns([f"met[0][{WARP}][{rows.column}] = {one};"]),
        "}",
        rows.sync,
        *rows.columns(
            [
                f"{one} = met[0][0][{rows.column}];",
                f"for (int s = 1; s < {WARPS}; ++s) {one} = {whole};",
                *([] if done == one else [f"{one} = {done};"]),
            ]
        ),
        "}",
    ]


def row_argmax_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One position a column: the first of the largest; NaN is larger than every number."""
    rows = _Rows(values, op, names)
    integer = op.srcs[0].type.dtype.name == "int32"
    word, least = ("FoundInt", "-2147483647 - 1") if integer else ("Found", "-INFINITY")
    place = "t * 64 + thread_row + h * 8"
    return [
        "{",
        rows.region(word),
        rows.sync,
        *rows.columns(
            [
                f"{word} best{{{least}, 2147483647}};",
                *rows.own(f"best = better(best, {word}{{{rows.element}, {place}}});"),
                "#pragma unroll",
                "for (int step = 4; step < 32; step *= 2) best = better(best, "
                "swap_with(best, step));",
                f"if ({rows.writers}) met[0][{WARP}][{rows.column}] = best;",
            ]
        ),
        rows.sync,
        *rows.columns(
            [
                f"{word} best = met[0][0][{rows.column}];",
                f"for (int s = 1; s < {WARPS}; ++s) best = better(best, met[0][s][{rows.column}]);",
                f"{rows.one} = best.place;",
            ]
        ),
        "}",
    ]


def row_cumsum_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Running sums down every column: over a warp's 16 rows, then after those of the rows above."""
    assert op.dst is not None
    rows = _Rows(values, op, names)
    word = "int" if op.srcs[0].type.dtype.name == "int32" else "float"
    if op.dst.type.dtype.name in PACKED and not rows.vector:
        raise InputError(f"{op.where}: cumsum of {op.dst.type} along rows: cast to fp32 first")
    into = rows.own_place
    scan = [
        f"{word} above = 0;",
        "#pragma unroll",
        "for (int h = 0; h < 2; ++h) {",
        f"  {word} running = {rows.element};",
        "#pragma unroll",
        "  for (int step = 4; step < 32; step *= 2) {",
        f"    const {word} before = __shfl_up_sync(0xffffffffu, running, step);",
        "    if (int(lane) >= step) running += before;",
        "  }",
        f"  {into} = above + running;",
        "  above += __shfl_sync(0xffffffffu, running, 28 + (lane & 3));",
        "}",
        f"if ({rows.writers}) met[t][{WARP}][{rows.column}] = above;",
    ]
    whole = rounded(op, f"{into} + before")
    return [
        "{",
        rows.region(word, rows.blocks),
        rows.sync,
        *rows.columns(
            ["#pragma unroll", f"for (int t = 0; t < {rows.blocks}; ++t) {{", *indent(scan), "}"]
        ),
        rows.sync,
        *rows.columns(
            [
                f"{word} before = 0;",
                "#pragma unroll",
                f"for (int t = 0; t < {rows.blocks}; ++t)",
                f"  for (int s = 0; s < {WARPS}; ++s) {{",
                f"    if (s == {WARP}) {{",
                "#pragma unroll",
                f"      for (int h = 0; h < 2; ++h) {into} = {whole};",
                "    }",
                f"    before += met[t][s][{rows.column}];",
                "  }",
            ]
        ),
        "}",
    ]


def group_sync(parts: int) -> str:
    """All threads of this compute group meet (named barriers 1 ... parts)."""
    if parts == 1:
        return "named_sync<1, 128>();"
    last = f"named_sync<{parts}, 128>();"
    head = " else ".join(f"if (part == {p}) named_sync<{1 + p}, 128>();" for p in range(parts - 1))
    return f"{head} else {last}"
