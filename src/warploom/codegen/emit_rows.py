"""Code along the rows of register tiles: reductions over the warps of a compute group.

A column's rows are spread over the blocks of 64 rows, the 4 warps and the 8 quads of a warp: each
thread combines its own, shuffles combine the quads, and shared memory the warps.
"""

from __future__ import annotations

from warploom.codegen.names import c_name
from warploom.codegen.values import FLOAT_OPS, INT_OPS, At, Values
from warploom.errors import InputError
from warploom.tile import Op

Names = dict[str, str]
WARPS = 4
COMBINES = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul"}
FLOAT_IDENTITY = {"add": "0.0f", "max": "-INFINITY", "min": "INFINITY", "mul": "1.0f"}
INT_IDENTITY = {"add": "0", "max": "-2147483647 - 1", "min": "2147483647", "mul": "1"}


def row_reduce_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One value a column, the same in all threads that hold the column."""
    assert op.dst is not None
    source = op.srcs[0]
    if values.form(source.type) != "tile" or op.axis != source.type.names[0]:
        raise InputError(
            f"{op.where}: {op.kind} along {op.axis!r} of {source.type}: no code for it"
        )
    if values.form(op.dst.type) != "col" or source.type.shape[1] % 8:
        raise InputError(
            f"{op.where}: {op.kind} along {op.axis!r} of {source.type}: its columns must be "
            "columns everywhere in the program, a multiple of 8"
        )
    integer = source.type.dtype.name == "int32"
    table, identity = (INT_OPS, INT_IDENTITY) if integer else (FLOAT_OPS, FLOAT_IDENTITY)
    combine = COMBINES[op.kind]
    word, name, cols = "int" if integer else "float", c_name(op.dst.name), source.type.shape[1]
    parts, blocks = values.placement.parts, values.blocks(source.type)
    across = f"{op.dst.name}_{op.id}_at"
    part = f"{across}[{'part' if parts > 1 else '0'}]"
    element = values.element(source, At("tile", "t", "((i >> 1) * 4 + h * 2 + (i & 1))"), names)
    column = "(i >> 1) * 8 + thread_col + (i & 1)"
    loop = ["#pragma unroll", f"for (int i = 0; i < {cols // 4}; ++i)"]
    shuffled = f"__shfl_xor_sync(0xffffffffu, {name}[i], step)"
    joined = table[combine].format(f"{name}[i]", element)
    own = [
        f"{name}[i] = {identity[combine]};",
        "#pragma unroll",
        f"for (int t = 0; t < {blocks}; ++t)",
        "#pragma unroll",
        f"  for (int h = 0; h < 2; ++h) {name}[i] = {joined};",
        "#pragma unroll",
        "for (int step = 4; step < 32; step *= 2)",
        f"  {name}[i] = {table[combine].format(f'{name}[i]', shuffled)};",
    ]
    met = table[combine].format(f"{name}[i]", f"{part}[s][{column}]")
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
        "}",
    ]


def group_sync(parts: int) -> str:
    """All threads of this compute group meet (named barriers 1 ... parts)."""
    if parts == 1:
        return "named_sync<1, 128>();"
    last = f"named_sync<{parts}, 128>();"
    head = " else ".join(f"if (part == {p}) named_sync<{1 + p}, 128>();" for p in range(parts - 1))
    return f"{head} else {last}"
