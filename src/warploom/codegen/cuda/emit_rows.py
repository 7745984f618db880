"""Code along the rows of register tiles: what the warps of a compute group find out together.

A column's rows are spread over the blocks of 64 rows, the 4 warps and the 8 quads of a warp: each
thread combines its own, shuffles combine the quads, shared memory (`analysis.exchanges`) the warps.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.analysis.exchanges import WARPS
from warploom.codegen.analysis.register_tiles import PACKED
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import FLOAT_OPS, INT_OPS, REDUCE, At, Values, rounded
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]
WARP = "threadIdx.x % 128 / 32"
COLUMN = "(i >> 1) * 8 + thread_col + (i & 1)"


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
        if values.form(kind) != "tile" or op.axis != kind.names[0]:
            raise InputError(f"{op.where}: {op.kind} along {op.axis!r} of {kind}: no code for it")
        self.cols, self.blocks = kind.shape[1], values.blocks(kind)
        if self.cols % 8 or (len(op.dst.type.axes) == 1 and values.form(op.dst.type) != "col"):
            raise InputError(
                f"{op.where}: {op.kind} along {op.axis!r} of {kind}: its columns must be "
                "columns everywhere in the program, a multiple of 8"
            )
        self.name, self.parts = c_name(op.dst.name), values.placement.parts
        at = At("tile", "t", "((i >> 1) * 4 + h * 2 + (i & 1))")
        self.element = values.element(op.srcs[0], at, names)
        self.sync = group_sync(self.parts)

    def columns(self, body: list[str]) -> list[str]:
        """`body` for every column i that a thread holds."""
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {self.cols // 4}; ++i) {{",
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
    name = rows.name
    shuffled = f"__shfl_xor_sync(0xffffffffu, {name}[i], step)"
    whole = join(f"{name}[i]", f"met[0][s][{COLUMN}]")
    done = rounded(op, f"{name}[i]")
    return [
        "{",
        rows.region(word),
        *rows.columns(
            [
                f"{name}[i] = {identity};",
                *rows.own(f"{name}[i] = {join(f'{name}[i]', rows.element)};"),
                "#pragma unroll",
                "for (int step = 4; step < 32; step *= 2)",
                f"  {name}[i] = {join(f'{name}[i]', shuffled)};",
            ]
        ),
        rows.sync,
        "if (lane < 4) {",
        *rows.columns([f"met[0][{WARP}][{COLUMN}] = {name}[i];"]),
        "}",
        rows.sync,
        *rows.columns(
            [
                f"{name}[i] = met[0][0][{COLUMN}];",
                f"for (int s = 1; s < {WARPS}; ++s) {name}[i] = {whole};",
                *([] if done == f"{name}[i]" else [f"{name}[i] = {done};"]),
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
                f"if (lane < 4) met[0][{WARP}][{COLUMN}] = best;",
            ]
        ),
        rows.sync,
        *rows.columns(
            [
                f"{word} best = met[0][0][{COLUMN}];",
                f"for (int s = 1; s < {WARPS}; ++s) best = better(best, met[0][s][{COLUMN}]);",
                f"{rows.name}[i] = best.place;",
            ]
        ),
        "}",
    ]


def row_cumsum_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Running sums down every column: over a warp's 16 rows, then after those of the rows above."""
    assert op.dst is not None
    rows = _Rows(values, op, names)
    word = "int" if op.srcs[0].type.dtype.name == "int32" else "float"
    if op.dst.type.dtype.name in PACKED:
        raise InputError(f"{op.where}: cumsum of {op.dst.type} along rows: cast to fp32 first")
    into = f"{rows.name}[t][(i >> 1) * 4 + h * 2 + (i & 1)]"
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
        f"if (lane < 4) met[t][{WARP}][{COLUMN}] = above;",
    ]
    whole = rounded(op, f"{into} + before")
    return [
        "{",
        rows.region(word, rows.blocks),
        rows.sync,
        *rows.columns(
            [
                "#pragma unroll",
                f"for (int t = 0; t < {rows.blocks}; ++t) {{",
                *indent(scan),
                "}",
            ]
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
                f"    before += met[t][s][{COLUMN}];",
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
