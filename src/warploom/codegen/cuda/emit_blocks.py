"""Code for the inverse of a unit lower triangular tile of 64 rows, each warp with 16 of them.

Of a block of 16 x 16 a thread has 8 elements: i = 4 j + 2 h + b is row lane / 4 + 8 h, column
8 j + 2 (lane % 4) + b (`cuda.values`). With L of the elements below the diagonal, D_w the inverse
of warp w's block on it and G_w = -D_w L to the left of that, the rest of its rows is

    T_w = G_w T,  T the rows above

A warp makes D_w from the inverses of two blocks of 8 rows, by forward substitution in fp32, and G_w
by itself. Rows 16 to 31 follow from one block of T, the next ones from three, the last from six:
blocks are fp16 on their way through shared memory, sums fp32. All numbers are parts of inverses, so
none grows beyond them, as powers of L do.
"""

from __future__ import annotations

from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.lines import indent, unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import At, Values
from warploom.errors import InputError
from warploom.tile import Op
from warploom.tile.ops import BLOCK

Names = dict[str, str]
WARPS = 4  # of a group: 16 rows each
SIDE = BLOCK // WARPS  # rows and columns of a block
EACH = SIDE * SIDE // 32  # elements that a thread has of a block
BYTES = SIDE * SIDE * 2  # of one in shared memory
ROW, COLUMN = "lane / 4 + i / 2 % 2 * 8", "i / 4 * 8 + thread_col + i % 2"
HALF = 8  # rows of the blocks that are inverted by substitution
TAKE = "__shfl_sync(0xffffffffu, "


def lower_inverse_lines(values: Values, op: Op, names: Names) -> list[str]:
    """The inverse in the registers of the result, by way of the group's exchange region."""
    assert op.dst is not None
    kind, own = op.srcs[0].type, values.placement.oriented(op.srcs[0].type)
    if own.names != kind.names or values.placement.local(kind) != kind:
        raise InputError(
            f"{op.where}: lower_inverse of {kind}: expected rows of register tiles, all of one "
            "group, as its first axis"
        )
    element = values.element(op.srcs[0], At("tile", "0", f"{EACH} * s + i"), names)
    sync, found = group_sync(values.placement.groups), c_name(op.dst.name)
    lines = [
        # The same in all threads: else the compiler takes what a warp does for divergent.
        f"const int warp_at = {TAKE}int(threadIdx.x % 128 / 32), 0);",
        "const unsigned blocks_at = smem_address(scratch);",
        f"const unsigned own_row_at = {_row('warp_at')}, own_at = own_row_at + warp_at * {BYTES};",
        f"float low_at[{WARPS * EACH}], sum_at[{WARPS * EACH}] = {{}};",
        f"unsigned words_at[4], left_at[{WARPS - 1}][4];",
        *unrolled("s", WARPS),
        *unrolled("i", EACH),
        f"    low_at[{EACH} * s + i] = {element};",
        sync,
        *unrolled("s", WARPS - 1),
        "  if (s < warp_at) {",
        f"    block_words(words_at, low_at + {EACH} * s);",
        f"    block_store(own_row_at + s * {BYTES}, words_at);",
        "  }",
        *_diagonal(),
        *unrolled("s", WARPS - 1),
        "  if (s < warp_at) {",
        f"    float found[{EACH}] = {{}};",
        f"    block_product(found, words_at, own_row_at + s * {BYTES});",
        *indent(indent(unrolled("i", EACH))),
        "      found[i] = -found[i];",
        "    block_words(left_at[s], found);",
        "  }",
        *(line for row in range(WARPS - 1) for line in _take(row, sync)),
        *unrolled("s", WARPS),
        *unrolled("i", EACH),
        f"    {found}[0][{EACH} * s + i] = s == warp_at ? inverse_at[i] : sum_at[{EACH} * s + i];",
    ]
    return ["{", *indent(lines), "}"]


def _row(row: str) -> str:
    """The address of the blocks of a warp's rows."""
    return f"blocks_at + {row} * ({row} + 1) / 2 * {BYTES}"


def _diagonal() -> list[str]:
    """The inverse of a warp's block on the diagonal, in `inverse_at`, `words_at` and its place."""
    return [
        f"float diagonal_at[{EACH}], inverse_at[{EACH}];",
        *unrolled("i", EACH),
        "{",
        "  float found = 0.0f;",
        *indent(unrolled("s", WARPS)),
        f"    if (s == warp_at) found = low_at[{EACH} * s + i];",
        f"  diagonal_at[i] = {ROW} > {COLUMN} ? found : 0.0f;",
        f"  inverse_at[i] = {ROW} == {COLUMN} ? 1.0f : 0.0f;",
        "}",
        "block_words(words_at, diagonal_at);",
        "block_store(own_at, words_at);",
        *(line for column in range(HALF - 1) for line in _column(column)),
        # Of D0 and D1, the halves' inverses, what is below them is -D1 L D0.
        "{",
        "  unsigned right[4];",
        "  float product[4] = {}, below[4] = {};",
        "  __syncwarp();",
        "  block_load(right, own_at);",
        "  __syncwarp();",
        "  block_words(words_at, inverse_at);",
        "  block_store(own_at, words_at);",
        "  const unsigned last[4] = {0, 0, 0, words_at[3]};",
        "  block_mma(product, last, right);",
        "  __syncwarp();",
        "  block_load(right, own_at);",
        "  const unsigned left[4] = {0, pack_fp16(-product[2], -product[3]), 0, 0};",
        "  block_mma(below, left, right);",
        "  inverse_at[2] = below[2]; inverse_at[3] = below[3];",
        "  words_at[1] = pack_fp16(below[2], below[3]);",
        "  __syncwarp();",
        "  block_store(own_at, words_at);",
        "}",
        "__syncwarp();",
    ]


def _column(c: int) -> list[str]:
    """Take row c of both halves off the rows below it: row and column c come by shuffles."""
    row, column = f"{c * 4} + lane % 4", f"(lane & ~3) + {c // 2}"
    lines = list[str]()
    for half in (0, EACH - 2):
        lines.append(f"const float by{half} = {TAKE}diagonal_at[{half + c % 2}], {column});")
        lines += [f"const float done{i} = {TAKE}inverse_at[{i}], {row});" for i in (half, half + 1)]
    lines += [
        f"inverse_at[{i}] -= by{half} * done{i};"
        for half in (0, EACH - 2)
        for i in (half, half + 1)
    ]
    return ["{", *indent(lines), "}"]


def _take(row: int, sync: str) -> list[str]:
    """Add the products with a warp's rows of the inverse to those below, of which the next are
    then whole; each warp's block on the diagonal lies there before."""
    lines = [
        f"block_product(sum_at + {EACH * s}, left_at[{row}], {_place(row, s)});"
        for s in range(row + 1)
    ]
    if row + 1 < WARPS - 1:
        lines.append(f"if (warp_at == {row + 1}) {{")
        for s in range(row + 1):
            lines.append(f"  block_words(words_at, sum_at + {EACH * s});")
            lines.append(f"  block_store({_place(row + 1, s)}, words_at);")
        lines.append("}")
    return [sync, f"if (warp_at > {row}) {{", *indent(lines), "}"]


def _place(row: int, column: int) -> str:
    return f"blocks_at + {(row * (row + 1) // 2 + column) * BYTES}"
