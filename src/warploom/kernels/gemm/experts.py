"""Rows of tokens to the experts that they go to, and back: before and behind grouped products.

`gather_rows`    sorted[r] = x[tokens[r]], the row of the token that stands at place r
`combine_rows`   y[t] = sum over j of weights[t, j] * rows[places[t, j]], in the order of j: every
                 token adds up what its experts gave, so no two tasks add to one place
"""

from __future__ import annotations

from warploom import tile as t
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.schedule import WIDEST_BYTES, SimtSchedule

THREADS = 128
PIECE_BYTES = THREADS * WIDEST_BYTES  # of a row that a task takes: an access a thread


def gather_rows(kind: t.DType = t.BF16) -> t.Program:
    """`x: [tokens, n]` and `tokens: [rows]` (int32) to `sorted: [rows, n]`."""
    arrays = {
        "x": t.array(kind, "count n"),
        "tokens": t.array(t.INT32, "rows"),
        "sorted": t.array(kind, "rows n"),
    }
    return t.trace(_gather_rows, arrays, name="gather_rows", width=PIECE_BYTES // kind.bytes)


def _gather_rows(x: t.Array, tokens: t.Array, sorted: t.Array, width: int) -> None:  # noqa: A002
    row, piece = t.grid(rows=t.size("rows"), pieces=t.cdiv(t.size("n"), width))
    cols = t.span(piece * width, width)
    t.store(sorted, row, cols, tile=t.load(x, t.read(tokens, row), cols))


def combine_rows(taken: int, kind: t.DType = t.BF16) -> t.Program:
    """`rows: [all, n]`, int32 `places: [count, taken]` and fp32 `weights` to `y: [count, n]`."""
    arrays = {
        "rows": t.array(kind, "all n"),
        "places": t.array(t.INT32, "count taken"),
        "weights": t.array(t.FP32, "count taken"),
        "y": t.array(kind, "count n"),
    }
    width = PIECE_BYTES // kind.bytes
    return t.trace(_combine_rows, arrays, name="combine_rows", taken=taken, width=width)


def _combine_rows(
    rows: t.Array, places: t.Array, weights: t.Array, y: t.Array, taken: int, width: int
) -> None:
    token, piece = t.grid(count=t.size("count"), pieces=t.cdiv(t.size("n"), width))
    cols = t.span(piece * width, width)
    acc = t.zeros(n=width)
    for choice in range(taken):
        row = t.load(rows, t.read(places, token, choice), cols).cast(t.FP32)
        acc += row * t.load(weights, token, choice)
    t.store(y, token, cols, tile=acc.cast(y.dtype))


def rows_schedule(kind: t.DType = t.BF16) -> SimtSchedule:
    """A block for a piece of a row, 16 bytes an access."""
    launch = LaunchPlan(persistent=False, dependent=True)
    return SimtSchedule("rows", THREADS, THREADS, WIDEST_BYTES // kind.bytes, launch, aligned=True)
