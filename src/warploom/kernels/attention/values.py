"""Values of 8-bit attention: `v: [batch, kv_heads, keys, d]` as the matmul of weights and values
wants it, `out: [batch, kv_heads, d, places]`.

8-bit wgmma reads both operands with the contracted axis last, so keys stand last, and in the order
in which threads hold weights (`Tile.quad_order`): place 16 n + 4 q + 2 h + c has key
16 n + 8 h + 2 q + c. `places` is the next multiple of 16 of `keys`; places without a key are 0.
"""

from __future__ import annotations

from warploom import tile as t

KEYS, COLUMNS = 128, 64  # of a task


def ordered_values(dtype: t.DType = t.E4M3) -> t.Program:
    """The program that puts 8-bit values into the order that attention takes them in."""

    def body(v: t.Array, out: t.Array) -> None:
        tasks = {"d": t.cdiv(t.size("d"), COLUMNS), "places": t.cdiv(t.size("places"), KEYS)}
        batch, head, j, i = t.grid(batch=t.size("batch"), kv_heads=t.size("kv_heads"), **tasks)
        columns = t.span(j * COLUMNS, COLUMNS)
        block = t.load(v, batch, head, t.span(i * KEYS, KEYS), columns)
        ordered = block.T.quad_order("keys")
        t.store(out, batch, head, columns, t.span(i * KEYS, KEYS, "keys"), tile=ordered)

    arrays = {
        "v": t.array(dtype, "batch kv_heads keys d"),
        "out": t.array(dtype, "batch kv_heads d places"),
    }
    return t.trace(body, arrays, name="ordered_values")
