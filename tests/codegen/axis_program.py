"""A program that does everything along an axis to the result of a matmul: rows, columns, parts."""

import numpy as np

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan


def _axes(q, k, total, top, low, product, running, where, part, counts, turned, sums):
    (i,) = t.grid(rows=t.cdiv(t.size("rows"), 128))
    rows, keys = t.span(i * 128, 128), t.span(0, 32)
    scores = t.zeros(rows=128, keys=32)
    for j in t.loop(t.cdiv(t.size("d"), 16)):
        scores += t.load(q, rows, t.span(j * 16, 16)) @ t.load(k, keys, t.span(j * 16, 16))
    inside = t.coordinate("rows", 128, i * 128) < t.size("rows")
    t.store(total, i, keys, tile=t.sum_along(scores, "rows"))
    t.store(top, i, keys, tile=t.max_along(t.where(inside, scores, -np.inf), "rows"))
    t.store(low, i, keys, tile=t.min_along(t.where(inside, scores, np.inf), "rows"))
    t.store(
        product, i, keys, tile=t.product_along(t.where(inside, scores * 0.01 + 1.0, 1.0), "rows")
    )
    summed = t.cumsum(scores, "keys")
    t.store(running, rows, keys, tile=summed)
    t.store(where, rows, tile=t.argmax_along(scores, "keys"))
    t.store(part, rows, t.span(0, 16, "keys"), tile=scores.sub("keys", 8, 16).cast(t.BF16))
    t.store(turned, keys, rows, tile=(scores.T * 2.0).cast(t.BF16))
    t.store(sums, rows, tile=t.sum_along(scores.T, "keys"))
    whole = scores > 0.0
    t.store(counts, i, keys, tile=t.sum_along(t.where(whole, scores, 0.0).cast(t.INT32), "rows"))


def axis_case(groups=1):
    """(program, schedule, arrays); with one group the rows are reduced over all of its warps."""
    arrays = {
        "q": t.array(t.BF16, "rows d"), "k": t.array(t.BF16, "keys d"),
        **{name: t.array(t.FP32, "tiles keys") for name in ("total", "top", "low", "product")},
        "running": t.array(t.FP32, "rows keys"), "where": t.array(t.INT32, "rows"),
        "turned": t.array(t.BF16, "keys rows"), "sums": t.array(t.FP32, "rows"),
        "part": t.array(t.BF16, "rows some"), "counts": t.array(t.INT32, "tiles keys"),
    }  # fmt: skip
    program = t.trace(_axes, arrays, name="axes")
    schedule = schedule_for(
        program, Policy("multistage", LaunchPlan(split="", store="direct"), groups=groups)
    )
    random = np.random.default_rng(5)
    rows, tiles = 150, 2
    values = {
        "q": random.normal(size=(rows, 24)), "k": random.normal(size=(30, 24)),
        **{name: np.full((tiles, 30), np.nan) for name in ("total", "top", "low", "product")},
        "running": np.full((rows, 30), np.nan), "where": np.zeros(rows),
        "turned": np.full((30, rows), np.nan), "sums": np.full(rows, np.nan),
        "part": np.full((rows, 16), np.nan), "counts": np.zeros((tiles, 30)),
    }  # fmt: skip
    return program, schedule, values
