"""Code for `reduce_scatter`: the blocks of a cluster add up tiles through shared memory.

Every block pushes part r of its tile into the shared memory of block r (st.async, which counts the
bytes at a barrier there), then adds up what the others pushed to it, in the order of the blocks. A
block pushes again when all blocks have read what it pushed before. Threads exchange their own
registers, so that a part of the columns of a tile is a part of every thread's registers. Blocks
beyond the last part of the columns get none: their part is zero.

    full    1 arrival and the bytes of all blocks: a block's parts are there
    free    an arrival of every warp of every block with a part: what was pushed to it has been read
"""

from __future__ import annotations

from warploom.codegen.analysis.cluster_reduce import QUAD_COLUMNS, WORD, shares
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import Values
from warploom.tile import Op, Program
from warploom.tile.interpret import cluster_reductions

THREADS = 128
WARPS = 4


def reduction_barriers(program: Program, parts: int) -> list[str]:
    """The code that sets up the barriers of all groups."""
    blocks = shares(cluster_reductions(program)[0])
    return [
        f"for (int s = 0; s < {parts}; ++s) {{",
        "  barrier_init(reduce_full + s * 8, 1);",
        f"  barrier_init(reduce_free + s * 8, {WARPS * blocks});",
        "}",
    ]


def cluster_reduce_lines(values: Values, op: Op, room: int) -> list[str]:
    """One reduction; `room` is `exchange_bytes`."""
    assert op.dst is not None
    source, into = c_name(op.srcs[0].name), c_name(op.dst.name)
    parts, blocks = int(op.value or 0), values.blocks(op.srcs[0].type)
    quads = values.columns(op.dst.type) // QUAD_COLUMNS  # of every part and block of rows
    stride = THREADS * 4 * WORD  # bytes of all threads' quads of registers
    each = blocks * quads * stride
    push: list[str] = []
    some = shares(op)
    for part in range(some):
        push += [
            "{",
            f"  const unsigned to = in_peer(own, {part}), bar = in_peer(full, {part});",
            *_loops(blocks, quads),
            f"      push_quad(to + (t * {quads} + i) * {stride}, "
            f"&{source}[t][4 * (i + {part * quads})], bar);",
            "}",
        ]
    mine = "" if some == parts else f"if (rank < {some}) "
    take = [
        "barrier_wait(full, reduce_parity);",
        f"const unsigned at = parts + threadIdx.x % {THREADS} * 16;",
        *_loops(blocks, quads),
        f"    read_quad(&{into}[t][4 * i], at + (t * {quads} + i) * {stride});",
        "#pragma unroll 1",
        f"for (int other = 1; other < {parts}; ++other) {{",
        f"  const unsigned next = at + other * {each};",
        *indent(_loops(blocks, quads)),
        f"      add_quad(&{into}[t][4 * i], next + (t * {quads} + i) * {stride});",
        "}",
        "__syncwarp();",
        f"if (lane < {parts}) barrier_arrive_at(reduce_free + part * 8, lane);",
    ]
    if mine:
        none = [*_loops(blocks, 4 * quads), f"    {into}[t][i] = 0.0f;"]
        take = [f"{mine}{{", *indent(take), "} else {", *indent(none), "}"]
    return [
        "{",
        f"  const unsigned full = reduce_full + part * 8, parts = reduce_room + part * {room};",
        f"  const unsigned own = parts + rank * {each} + threadIdx.x % {THREADS} * 16;",
        "  barrier_wait(reduce_free + part * 8, reduce_parity ^ 1);",
        f"  {mine}if (threadIdx.x % {THREADS} == 0) barrier_expect(full, {parts * each});",
        *indent(push),
        *indent(take),
        "  reduce_parity ^= 1;",
        "}",
    ]


def _loops(blocks: int, quads: int) -> list[str]:
    return [
        "#pragma unroll",
        f"for (int t = 0; t < {blocks}; ++t)",
        "#pragma unroll",
        f"  for (int i = 0; i < {quads}; ++i)",
    ]
