"""Code for one panel of a store: what the registers of a group hold, swizzled in shared memory."""

from __future__ import annotations

import re

from warploom.codegen.analysis.stores import StorePanels
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.values import At, Values
from warploom.codegen.ir.layout import SWIZZLES
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.tile import Op

Names = dict[str, str]


def panel_lines(
    values: Values, op: Op, panels: StorePanels, origin: tuple[int, int], names: Names
) -> list[str]:
    """Registers to one swizzled panel: stmatrix for 16-bit elements, pairs of fp32 otherwise."""
    source, tile = op.srcs[0], panels.tile
    groups, before = tile.panel_cols // 8, origin[1] // 8
    mask = SWIZZLES[tile.width][0]
    loops = [
        "#pragma unroll",
        f"for (int t = 0; t < {values.blocks(source.type)}; ++t)",
        "#pragma unroll",
    ]
    block = f"panel + t * {ROWS_PER_GROUP * tile.width}"
    if source.type.dtype.bytes == 2:
        # Lane l gives the address of row l % 16, 8-column group l / 16 of a pair of groups.
        words, reads = values.words(source, "t", f"{2 * before} + 2 * j", f"{before} + j", 4, names)
        once, each = _read(reads)
        return [
            *loops[:2],
            *(["{", *indent(once)] if once else []),
            loops[2],
            f"  for (int j = 0; j < {groups}; j += 2) {{",
            *indent(indent(each)),
            "    const unsigned row = threadIdx.x % 128 / 32 * 16 + lane % 16;",
            f"    const unsigned at = row * {tile.width} + (j + lane / 16) * 16;",
            f"    stmatrix({block} + (at ^ (at >> 3 & {mask:#x})), {', '.join(words)});",
            "  }",
            *["}"] * bool(once),
        ]
    low, high = (
        values.element(source, At("tile", i=f"{4 * before} + 4 * j + 2 * h + {c}"), names)
        for c in (0, 1)
    )
    if source.type.dtype.name == "int32":
        low, high = f"__int_as_float({low})", f"__int_as_float({high})"
    elif op.kind == "store_add" and tile.width == max(SWIZZLES):
        return _summed_lines(values, op, panels, origin, names)
    return [
        *loops,
        f"  for (int j = 0; j < {groups}; ++j)",
        "#pragma unroll",
        "    for (int h = 0; h < 2; ++h) {",
        f"      const unsigned at = (thread_row + h * 8) * {tile.width} + j * 32 + thread_col * 4;",
        f"      store_shared_pair({block} + (at ^ (at >> 3 & {mask:#x})), {low}, {high});",
        "    }",
    ]


def _read(reads: dict[str, str]) -> tuple[list[str], list[str]]:
    """Declarations of what is read: before a loop over `j`, and in it."""
    once: list[str] = []
    each: list[str] = []
    for text, name in reads.items():
        (each if re.search(r"\bj\b", text) else once).append(f"const auto {name} = {text};")
    return once, each


def _summed_lines(
    values: Values, op: Op, panels: StorePanels, origin: tuple[int, int], names: Names
) -> list[str]:
    """The panels of sums of fp32, in an order without bank conflicts.

    Half a warp writes 8 bytes of each of 16 lanes at a time: 32 bytes of 4 rows. The swizzle puts
    the rows 2 r and 2 r + 1 of one group of 8 columns into the same banks; odd rows therefore take
    the group after next, and come back to their own two steps later.
    """
    source, tile, before = op.srcs[0], panels.tile, origin[1] // 8
    mask = SWIZZLES[tile.width][0]

    def pair(group: str) -> list[str]:
        return [
            values.element(source, At("tile", i=f"4 * ({before} + {group}) + 2 * h + {c}"), names)
            for c in (0, 1)
        ]

    own, other = pair("j"), pair("(j ^ 2)")
    low, high = (f"odd ? {b} : {a}" for a, b in zip(own, other, strict=True))
    # All that depends on the thread is in `corner`: groups and rows differ from it in other bits.
    return [
        "const bool odd = lane & 4;",
        f"unsigned corner = thread_row * {tile.width} + thread_col * 4;",
        f"corner = (corner ^ (corner >> 3 & {mask:#x})) ^ (odd ? 64 : 0);",
        "#pragma unroll",
        f"for (int t = 0; t < {values.blocks(source.type)}; ++t)",
        "#pragma unroll",
        f"  for (int j = 0; j < {tile.panel_cols // 8}; ++j)",
        "#pragma unroll",
        "    for (int h = 0; h < 2; ++h)",
        f"      store_shared_pair(panel + t * {ROWS_PER_GROUP * tile.width} + "
        f"h * {8 * tile.width} + (corner ^ (j * 32)), {low}, {high});",
    ]


def transposed_lines(
    values: Values, op: Op, panels: StorePanels, origin: tuple[int, int], names: Names
) -> list[str]:
    """One block of 64 register rows to the columns of a panel, 8 x 8 matrices transposed.

    Of two groups of 8 register columns, which are 16 rows of the panel, a warp holds four matrices:
    lane l gives the address of row l % 8 of matrix l / 8, which is half l / 8 % 2 of the warp's 16
    columns in group l / 16.
    """
    source, tile = op.srcs[0], panels.tile
    mask, groups, before = SWIZZLES[tile.width][0], tile.rows // 8, origin[0] // 8
    block = str(origin[1] // ROWS_PER_GROUP)

    def words(group: str, count: int) -> tuple[str, list[str], list[str]]:
        found, reads = values.words(source, block, f"2 * ({group})", group, count, names)
        return ", ".join(found), *_read(reads)

    column = "(threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) * 16"
    address = f"panel + (at ^ (at >> 3 & {mask:#x}))"
    four, once, each = words(f"j + {before}", 4)
    lines = [
        f"const unsigned corner = (lane / 16 * 8 + lane % 8) * {tile.width} + {column};",
        *once,
        "#pragma unroll",
        f"for (int j = 0; j < {groups // 2 * 2}; j += 2) {{",
        *indent(each),
        f"  const unsigned at = corner + j * {8 * tile.width};",
        f"  stmatrix_transposed({address}, {four});",
        "}",
    ]
    if groups % 2:
        # Only the addresses of lanes 0 to 15 count for two matrices.
        last = groups - 1
        two, once, _ = words(str(last + before), 2)
        lines += [
            "{",
            *indent(once),
            f"  const unsigned at = corner + {last * 8 * tile.width};",
            f"  stmatrix_transposed({address}, {two});",
            "}",
        ]
    return lines
