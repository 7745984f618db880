"""Rows of tokens to the experts that they go to, and back: before and behind grouped products.

`gather_rows`    sorted[r] = x[tokens[r]], the row of the token that stands at place r
`combine_rows`   y[t] = sum over j of weights[t, j] * rows[places[t, j]], in the order of j: every
                 token adds up what its experts gave, so no two tasks add to one place
"""

from __future__ import annotations

from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.schedule import WIDEST_BYTES, SimtSchedule
from warploom.tile import (
    BF16,
    FP32,
    INT32,
    Array,
    DType,
    Program,
    array,
    cdiv,
    grid,
    load,
    read,
    size,
    span,
    store,
    trace,
    zeros,
)

THREADS = 128
PIECE_BYTES = THREADS * WIDEST_BYTES  # of a row that a task takes: an access a thread


def gather_rows(kind: DType = BF16) -> Program:
    """`x: [tokens, n]` and `tokens: [rows]` (int32) to `sorted: [rows, n]`."""
    arrays = {
        "x": array(kind, "count n"),
        "tokens": array(INT32, "rows"),
        "sorted": array(kind, "rows n"),
    }
    return trace(_gather_rows, arrays, name="gather_rows", width=PIECE_BYTES // kind.bytes)


def _gather_rows(x: Array, tokens: Array, sorted: Array, width: int) -> None:  # noqa: A002
    row, piece = grid(rows=size("rows"), pieces=cdiv(size("n"), width))
    cols = span(piece * width, width)
    store(sorted, row, cols, tile=load(x, read(tokens, row), cols))


def combine_rows(taken: int, kind: DType = BF16) -> Program:
    """`rows: [all, n]`, int32 `places: [count, taken]` and fp32 `weights` to `y: [count, n]`."""
    arrays = {
        "rows": array(kind, "all n"),
        "places": array(INT32, "count taken"),
        "weights": array(FP32, "count taken"),
        "y": array(kind, "count n"),
    }
    width = PIECE_BYTES // kind.bytes
    return trace(_combine_rows, arrays, name="combine_rows", taken=taken, width=width)


def _combine_rows(
    rows: Array, places: Array, weights: Array, y: Array, taken: int, width: int
) -> None:
    token, piece = grid(count=size("count"), pieces=cdiv(size("n"), width))
    cols = span(piece * width, width)
    acc = zeros(n=width)
    for choice in range(taken):
        row = load(rows, read(places, token, choice), cols).cast(FP32)
        acc += row * load(weights, token, choice)
    store(y, token, cols, tile=acc.cast(y.dtype))


def rows_schedule(kind: DType = BF16) -> SimtSchedule:
    """A block for a piece of a row, 16 bytes an access."""
    launch = LaunchPlan(persistent=False, dependent=True)
    return SimtSchedule("rows", THREADS, THREADS, WIDEST_BYTES // kind.bytes, launch, aligned=True)
