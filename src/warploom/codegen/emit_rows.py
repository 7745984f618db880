"""Code along the rows of register tiles: reductions over the warps of a compute group.

A column's rows are spread over the blocks of 64 rows, the 4 warps and the 8 quads of a warp: each
thread combines its own, shuffles combine the quads, and shared memory the warps.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.names import c_name
from warploom.codegen.values import FLOAT_OPS, INT_OPS, REDUCE, At, Values, rounded
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]
WARPS = 4


def combining(op: Op) -> tuple[str, Callable[[str, str], str], str]:
    """(C++ type, how two values are combined, what a reduction begins with)."""
    combine, real, whole = REDUCE[op.kind]
    if op.srcs[0].type.dtype.name == "int32":
        return "int", INT_OPS[combine].format, whole
    return "float", FLOAT_OPS[combine].format, real


def row_reduce_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One value a column, the same in all threads that hold the column."""
    assert op.dst is not None
    source = op.srcs[0]
    kind = values.placement.oriented(source.type)
    if values.form(kind) != "tile" or op.axis != kind.names[0]:
        raise InputError(
            f"{op.where}: {op.kind} along {op.axis!r} of {source.type}: no code for it"
        )
    if values.form(op.dst.type) != "col" or kind.shape[1] % 8:
        raise InputError(
            f"{op.where}: {op.kind} along {op.axis!r} of {source.type}: its columns must be "
            "columns everywhere in the program, a multiple of 8"
        )
    word, join, identity = combining(op)
    name, cols = c_name(op.dst.name), kind.shape[1]
    parts, blocks = values.placement.parts, values.blocks(source.type)
    across = f"{op.dst.name}_{op.id}_at"
    part = f"{across}[{'part' if parts > 1 else '0'}]"
    element = values.element(source, At("tile", "t", "((i >> 1) * 4 + h * 2 + (i & 1))"), names)
    column = "(i >> 1) * 8 + thread_col + (i & 1)"
    loop = ["#pragma unroll", f"for (int i = 0; i < {cols // 4}; ++i)"]
    shuffled = f"__shfl_xor_sync(0xffffffffu, {name}[i], step)"
    joined = join(f"{name}[i]", element)
    own = [
        f"{name}[i] = {identity};",
        "#pragma unroll",
        f"for (int t = 0; t < {blocks}; ++t)",
        "#pragma unroll",
        f"  for (int h = 0; h < 2; ++h) {name}[i] = {joined};",
        "#pragma unroll",
        "for (int step = 4; step < 32; step *= 2)",
        f"  {name}[i] = {join(f'{name}[i]', shuffled)};",
    ]
    met = join(f"{name}[i]", f"{part}[s][{column}]")
    done = rounded(op, f"{name}[i]")
    return [
        f"__shared__ {word} {across}[{parts}][{WARPS}][{cols}];",
        *loop,
        "{",
        *[f"  {line}" for line in own],
        "}",
        group_sync(parts),
        "if (lane < 4) {",
        *[f"  {line}" for line in loop],
        f"    {part}[threadIdx.x % 128 / 32][{column}] = {name}[i];",
        "}",
        group_sync(parts),
        *loop,
        "{",
        f"  {name}[i] = {part}[0][{column}];",
        f"  for (int s = 1; s < {WARPS}; ++s) {name}[i] = {met};",
        *([] if done == f"{name}[i]" else [f"  {name}[i] = {done};"]),
        "}",
    ]


def group_sync(parts: int) -> str:
    """All threads of this compute group meet (named barriers 1 ... parts)."""
    if parts == 1:
        return "named_sync<1, 128>();"
    last = f"named_sync<{parts}, 128>();"
    head = " else ".join(f"if (part == {p}) named_sync<{1 + p}, 128>();" for p in range(parts - 1))
    return f"{head} else {last}"
