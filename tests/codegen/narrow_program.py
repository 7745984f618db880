"""A program whose every store has an element type of its own, beside a matmul; and its inputs."""

import numpy as np

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan

ROWS, COLS, DEPTH = 64, 32, 16
FLAT = {"sums": t.INT32, "tops": t.FP32, "added": t.FP32, "halves": t.BF16}
TILES = {"eight": t.E4M3, "five": t.E5M2, "yes": t.BOOL, "whole": t.INT32,
         **dict.fromkeys(("rest", "turned", "back", "picked", "scan"), t.FP32)}  # fmt: skip


def _body(a, b, small, mask, **out):
    (i,) = t.grid(m=t.cdiv(t.size("m"), ROWS))
    rows, cols = t.span(i * ROWS, ROWS), t.span(0, COLS)
    acc = t.zeros(m=ROWS, n=COLS)
    for k in t.loop(t.cdiv(t.size("k"), DEPTH)):
        part = t.span(k * DEPTH, DEPTH)
        acc += t.load(a, rows, part) @ t.load(b, part, cols)
    # The rest of a value that bf16 leaves: nothing, if the cast in the middle does not round.
    tiles = {
        "eight": acc.cast(t.E4M3), "five": acc.cast(t.E5M2), "yes": acc > 0.0,
        "whole": acc.cast(t.INT32) * 3, "rest": (acc - acc.cast(t.BF16).cast(t.FP32)) * 256.0,
        "turned": t.Complex(acc * 0.1, acc * 1000.0).exp().re,
        "back": acc.cast(t.E5M2).cast(t.FP32) + t.full(0.3, t.E4M3, n=COLS).cast(t.FP32),
        "picked": t.where(t.load(mask, rows, cols), acc, t.load(small, rows, cols).cast(t.FP32)),
        "scan": t.cumsum(acc.cast(t.BF16), "n").cast(t.FP32),
    }  # fmt: skip
    for name, tile in tiles.items():
        t.store(out[name], rows, cols, tile=tile)
    t.store(out["sums"], rows, tile=t.sum_along(acc.cast(t.INT32) * 1000003, "n"))
    t.store(out["tops"], rows, tile=t.sum_along(acc.cast(t.BF16), "n").cast(t.FP32))
    t.store(out["added"], cols, tile=t.sum_along(acc, "m"), add=True)
    t.store(out["halves"], rows, tile=t.max_along(acc, "n").cast(t.BF16), add=True)


def narrow_case():
    """(program, schedule, arrays) in which every store has an element type of its own."""
    arrays = {
        "a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"),
        "small": t.array(t.E4M3, "m n"), "mask": t.array(t.BOOL, "m n"),
        **{name: t.array(kind, "m n") for name, kind in TILES.items()},
        **{name: t.array(kind, "n" if name == "added" else "m") for name, kind in FLAT.items()},
    }  # fmt: skip
    program = t.trace(_body, arrays, name="narrow")
    random = np.random.default_rng(2)
    m, n, k = 90, COLS, 40
    # Small whole numbers: their sums are exact in any order, so every result has one value.
    values = {
        "a": random.integers(-40, 41, (m, k)) / 4, "b": random.integers(-5, 6, (k, n)) / 8,
        "small": random.normal(size=(m, n)), "mask": random.integers(0, 2, (m, n)),
        **{name: np.zeros((m, n)) for name in TILES},
        **{name: np.full(n if name == "added" else m, 0.5 if name == "added" else 0)
           for name in FLAT},
    }  # fmt: skip
    return (
        program,
        schedule_for(
            program, Policy("inflight", LaunchPlan(split="", store="direct"), groups=1, depth=2)
        ),
        values,
    )


def _added(a, b, sums, counts, halves):
    i, s = t.grid(m=t.cdiv(t.size("m"), ROWS), slices=3)
    rows, cols = t.span(i * ROWS, ROWS), t.span(0, COLS)
    acc = t.zeros(m=ROWS, n=COLS)
    last = t.minimum_index(t.cdiv(t.size("k"), DEPTH), (s + 1) * 2)
    for k in t.loop(s * 2, t.maximum_index(last, s * 2)):
        part = t.span(k * DEPTH, DEPTH)
        acc += t.load(a, rows, part) @ t.load(b, part, cols)
    t.store(sums, rows, cols, tile=acc, add=True)
    t.store(counts, rows, cols, tile=(acc > 0.0).cast(t.INT32), add=True)
    t.store(halves, rows, cols, tile=acc.cast(t.BF16), add=True)


def added_case(store="tma"):
    """(program, schedule, arrays): slices of a sum meet in memory, in three element types."""
    kinds = {"sums": t.FP32, "counts": t.INT32, "halves": t.BF16}
    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n")}
    arrays |= {name: t.array(kind, "m n") for name, kind in kinds.items()}
    program = t.trace(_added, arrays, name="added")
    random = np.random.default_rng(3)
    m, k = 90, 72  # 5 steps over 3 slices: the last has one
    values = {
        "a": random.integers(-1, 2, (m, k)), "b": random.integers(-1, 2, (k, COLS)),
        **{name: np.ones((m, COLS)) for name in kinds},
    }  # fmt: skip
    return (
        program,
        schedule_for(
            program, Policy("inflight", LaunchPlan(split="", store=store), groups=1, depth=2)
        ),
        values,
    )
