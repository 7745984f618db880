"""Random programs around a matmul: a seed gives a program, its schedule and its inputs.

Values are small whole numbers, halves and eighths, so every sum is exact in any order and the
interpreter's bits are the only right ones.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan

ROWS, COLS, STEP = 64, 32, 16
FLOATS = (t.FP32, t.BF16, t.FP16, t.E4M3, t.E5M2)
OUTS = ("first", "second", "third")


def fp32(x: t.Tile) -> t.Tile:
    """The tile in fp32."""
    return x if x.dtype is t.FP32 else x.cast(t.FP32)


class Maker:
    """Draws one program; `pool` are the tiles made so far."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kinds = {name: self.draw.choice((*FLOATS, t.INT32, t.BOOL)) for name in OUTS}
        self.loaded = self.draw.choice((t.BF16, t.E4M3, t.INT32))

    def one(self) -> t.Tile:
        """A tile made so far."""
        return fp32(self.draw.choice(self.pool))

    def body(self, a: Any, b: Any, v: Any, r: Any, index: Any, wide: Any, **out: Any) -> None:
        """The traced function."""
        (i,) = t.grid(m=t.cdiv(t.size("m"), ROWS))
        rows, cols = t.span(i * ROWS, ROWS), t.span(0, COLS)
        acc = t.zeros(m=ROWS, n=COLS)
        sums = t.zeros(m=ROWS)
        change = self.draw.randrange(5)
        for k in t.loop(t.cdiv(t.size("k"), STEP)):
            part = t.span(k * STEP, STEP)
            acc += t.load(a, rows, part) @ t.load(b, part, cols)
            if change == 0:
                acc[:] = t.maximum(acc, -3.0)
            elif change == 1:
                acc[:] = t.where(acc > 20.0, 20.0, acc)
            elif change == 2:
                sums += t.sum_along(acc, "n").cast(t.BF16).cast(t.FP32)
            elif change == 3:
                acc *= t.where(t.load(v, cols) > 0.0, 1.0, 0.5)
        self.pool = [acc]
        self.vectors = [t.load(v, cols), t.load(r, rows), sums]
        self.index, self.wide = t.load(index, cols), t.load(wide, rows, cols)
        self.places = t.coordinate("m", ROWS, i * ROWS), t.coordinate("n", COLS)
        for _ in range(self.draw.randrange(3, 9)):
            self.pool.append(self.op(self.one()))
        for number, name in enumerate(OUTS):
            tile = self.pool[max(-1 - number, -len(self.pool))]
            t.store(out[name], rows, cols, tile=self.as_kind(tile, self.kinds[name]))
        last = fp32(self.pool[-1])
        t.store(out["row_sums"], rows, tile=t.sum_along(last, "n"))
        t.store(out["across"], cols, rows, tile=last.T)
        t.store(out["added"], cols, tile=t.sum_along(last, "m"), add=True)

    def as_kind(self, x: t.Tile, kind: t.DType) -> t.Tile:
        """The tile in an element type; as conditions: where it is positive."""
        if x.dtype is kind:
            return x
        return fp32(x) > 0.0 if kind is t.BOOL else fp32(x).cast(kind)

    def op(self, x: t.Tile) -> t.Tile:
        """One more op or two."""
        draw = self.draw
        axis = draw.choice("nm")
        half = x.copy()
        choices = (
            lambda: x + draw.choice((1.0, -2.0, 0.5)),
            lambda: x * draw.choice((0.5, 2.0, -1.0)),
            lambda: t.maximum(x, self.one()),
            lambda: t.where(x > draw.choice((0.0, 1.0)), x, -x),
            lambda: x + draw.choice(self.vectors),
            lambda: x - t.max_along(x, axis),
            lambda: x + t.sum_along(x, axis) * 0.125,
            lambda: x - t.min_along(x, axis),
            lambda: x.cast(draw.choice(FLOATS[1:])),
            lambda: x.cast(t.INT32).cast(t.FP32) * 2.0,
            lambda: t.gather(x, self.index, "n"),
            lambda: t.cumsum(t.relu(x) * 0.25, axis),
            lambda: x + t.argmax_along(x, axis).cast(t.FP32),
            lambda: abs(x) - t.relu(x),
            lambda: (x.T + draw.choice(self.vectors)).T,
            lambda: t.causal(*self.places, x, 0.0),
            lambda: x + fp32(self.wide),
            lambda: self.mutated(half, x),
            lambda: t.where((x > 0.0) & ~(x > 8.0) | x.equals(0.0), x, 1.0),
        )
        return draw.choice(choices)()

    @staticmethod
    def mutated(copy: t.Tile, x: t.Tile) -> t.Tile:
        """A tile changed after it was read."""
        before = copy + 1.0
        copy += 2.0
        copy[:] = copy - before * 0.5
        return copy + x


def random_case(seed: int, store: str = "direct") -> tuple[t.Program, KernelSchedule, Any]:
    """(program, schedule, arrays)."""
    maker = Maker(seed)
    dims = {"a": "m k", "b": "k n", "v": "n", "r": "m", "index": "n", "wide": "m n"}
    kinds = {"a": t.BF16, "b": t.BF16, "index": t.INT32, "wide": maker.loaded}
    dims |= dict.fromkeys(OUTS, "m n") | {"row_sums": "m", "across": "n m", "added": "n"}
    arrays = {
        name: t.array(kinds.get(name, maker.kinds.get(name, t.FP32)), text)
        for name, text in dims.items()
    }
    program = t.trace(maker.body, arrays, name=f"random_{seed}")
    draw = np.random.default_rng(seed)
    sizes = {"m": 72, "n": COLS, "k": 40}
    values = {
        name: draw.integers(-3, 4, [sizes[d] for d in text.split()])
        for name, text in dims.items()
        if name in "abvrwide"
    }
    values["index"] = draw.integers(0, COLS, COLS)
    for name, text in dims.items():
        values.setdefault(name, np.zeros([sizes[d] for d in text.split()]))
    plan = LaunchPlan(split="", store=store)
    depth = 1 + seed % 3
    policy = Policy("inflight" if depth > 1 else "lcsf", plan, groups=1, depth=depth)
    return program, schedule_for(program, policy), values
