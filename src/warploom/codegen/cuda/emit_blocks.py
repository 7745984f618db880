"""Code for the 16 x 16 blocks on the diagonal of a register tile: each lies within one warp.

Of its block's 16 columns a thread has 8 elements: i = 4 j + 2 h + b is row lane / 4 + 8 h, column
8 j + 2 (lane % 4) + b (`cuda.values`).
"""

from __future__ import annotations

from warploom.codegen.cuda.lines import indent, unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import At, Values
from warploom.errors import InputError
from warploom.tile import Op
from warploom.tile.ops import BLOCK

Names = dict[str, str]
WARPS = 4  # of a group: 16 rows each of every 64
EACH = BLOCK * BLOCK // 32  # elements that a thread has of a block
IDENTITY = "lane / 4 + i / 2 % 2 * 8 == i / 4 * 8 + thread_col + i % 2"
BELOW = IDENTITY.replace("==", ">")


def lower_inverse_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Forward substitution by columns: once row c of the inverse is done, every row below takes its
    share of it off. Row c and column c of the block come by shuffles."""
    assert op.dst is not None
    kind, own = op.srcs[0].type, values.placement.oriented(op.srcs[0].type)
    if own.names != kind.names or own.shape[0] % (WARPS * BLOCK):
        raise InputError(
            f"{op.where}: lower_inverse of {kind}: expected rows of register tiles, a multiple of "
            f"{WARPS * BLOCK}, as its first axis"
        )
    name = c_name(op.dst.name)
    element = values.element(op.srcs[0], At("tile", "t", f"{EACH} * s + i"), names)
    steps = [line for c in range(BLOCK - 1) for line in _column(c)]
    return [
        *unrolled("t", values.blocks(kind)),
        "{",
        "  const int own_at = t * 4 + int(threadIdx.x % 128 / 32);",
        f"  float low_at[{EACH}], inverse_at[{EACH}];",
        *indent(unrolled("i", EACH)),
        "  {",
        "    float found = 0.0f;",
        *indent(indent(unrolled("s", own.shape[1] // BLOCK))),
        f"        if (s == own_at) found = {element};",
        f"    low_at[i] = {BELOW} ? found : 0.0f;",
        f"    inverse_at[i] = {IDENTITY} ? 1.0f : 0.0f;",
        "  }",
        *indent(steps),
        *indent(unrolled("s", own.shape[1] // BLOCK)),
        *indent(unrolled("i", EACH)),
        f"      {name}[t][{EACH} * s + i] = s == own_at ? inverse_at[i] : 0.0f;",
        "}",
    ]


def _column(c: int) -> list[str]:
    """Take row c off the rows below it. Rows above 8 have nothing in columns from 8 on, and are
    above all rows from 8 on."""
    late, take = c // 8, "__shfl_sync(0xffffffffu, "
    row, column = f"{c % 8 * 4} + lane % 4", f"(lane & ~3) + {c % 8 // 2}"
    lines = [
        f"const float by{h}_at = {take}low_at[{4 * late + 2 * h + c % 2}], {column});"
        for h in range(late, 2)
    ]
    for j in range(late + 1):
        for b in range(2):
            place = 4 * j + b
            done = f"{take}inverse_at[{place + 2 * late}], {row})"
            lines.append(f"const float done{place}_at = {done};")
            lines += [
                f"inverse_at[{place + 2 * h}] -= by{h}_at * done{place}_at;" for h in range(late, 2)
            ]
    return ["{", *indent(lines), "}"]
