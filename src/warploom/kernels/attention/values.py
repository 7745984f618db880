"""Values of 8-bit attention: `v: [batch, kv_heads, keys, d]` as the matmul of weights and values
wants it, `out: [batch, kv_heads, d, places]`.

8-bit wgmma reads both operands with the contracted axis last, so keys stand last, and in the order
in which threads hold weights (`Tile.quad_order`): place 16 n + 4 q + 2 h + c has key
16 n + 8 h + 2 q + c. `places` is the next multiple of 16 of `keys`; places without a key are 0.
"""

from __future__ import annotations

from warploom.tile import (
    E4M3,
    Array,
    DType,
    Program,
    array,
    cdiv,
    grid,
    load,
    size,
    span,
    store,
    trace,
)

KEYS, COLUMNS = 128, 64  # of a task


def ordered_values(dtype: DType = E4M3) -> Program:
    """The program that puts 8-bit values into the order that attention takes them in."""

    def body(v: Array, out: Array) -> None:
        tasks = {"d": cdiv(size("d"), COLUMNS), "places": cdiv(size("places"), KEYS)}
        batch, head, j, i = grid(batch=size("batch"), kv_heads=size("kv_heads"), **tasks)
        columns = span(j * COLUMNS, COLUMNS)
        block = load(v, batch, head, span(i * KEYS, KEYS), columns)
        ordered = block.T.quad_order("keys")
        store(out, batch, head, columns, span(i * KEYS, KEYS, "keys"), tile=ordered)

    arrays = {
        "v": array(dtype, "batch kv_heads keys d"),
        "out": array(dtype, "batch kv_heads d places"),
    }
    return trace(body, arrays, name="ordered_values")
