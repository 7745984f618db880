"""Ops that read what other threads hold, on the result of a matmul: gathers, scans, odd parts."""

import numpy as np

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan

ROWS, COLS = 128, 32
ALL = ("turned", "mixed", "down", "shifted")
ALONG_ROWS = ("moved", "below", "first", "least")


def _body(a, b, pick, where, one, rows_only, **out):
    (i,) = t.grid(m=t.cdiv(t.size("m"), ROWS))
    rows, cols = t.span(i * ROWS, ROWS), t.span(0, COLS)
    acc = t.zeros(m=ROWS, n=COLS)
    for k in t.loop(t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        acc += t.load(a, rows, part) @ t.load(b, part, cols)
    result = {
        "turned": t.gather(acc, t.load(pick, cols), "n"),
        "mixed": t.gather(acc.cast(t.BF16), t.load(where, rows, cols), "n").cast(t.FP32),
        "down": t.cumsum(acc, "n"),
        "shifted": acc * t.sum_along(acc.sub("n", 3, 16), "n"),
    }
    if rows_only:
        result |= {
            "moved": t.gather(acc, t.load(one, rows), "m"),
            "below": t.cumsum(acc, "m"),
            "first": t.argmax_along(acc, "m"),
            "least": t.argmax_along(acc.cast(t.INT32), "m"),
        }
    for name, tile in result.items():
        if len(tile.type.axes) == 1:
            t.store(out[name], i, cols, tile=tile)
        else:
            t.store(out[name], rows, cols, tile=tile)


def exchange_case(groups=1):
    """(program, schedule, arrays); with one group the rows are exchanged as well."""
    rows_only = groups == 1
    names = ALL + (ALONG_ROWS if rows_only else ())
    places = ("first", "least")
    arrays = {
        "a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "pick": t.array(t.INT32, "n"),
        "where": t.array(t.INT32, "m n"), "one": t.array(t.INT32, "m"),
        **{n: t.array(t.INT32, "tiles n") if n in places else t.array(t.FP32, "m n")
           for n in names},
    }  # fmt: skip
    program = t.trace(_body, arrays, name="exchanges", rows_only=rows_only)
    split = "" if rows_only else "m"
    schedule = schedule_for(
        program, Policy("inflight", LaunchPlan(split=split, store="direct"), groups=groups, depth=2)
    )
    random = np.random.default_rng(4)
    m, k = 200, 40
    values = {
        "a": random.integers(-5, 6, (m, k)) / 4, "b": random.integers(-5, 6, (k, COLS)) / 8,
        "pick": random.integers(0, COLS, COLS), "where": random.integers(0, COLS, (m, COLS)),
        "one": random.integers(0, ROWS, m),
        **{n: np.zeros((2, COLS) if n in places else (m, COLS)) for n in names},
    }  # fmt: skip
    return program, schedule, values
