"""Wild random programs without a matmul, for threads: nested loops, every op, odd sizes, ranges."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from warploom import tile as t
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule

from .wild_program import KINDS, Missing, fp32, snap


class Threads:
    """The traced function of one seed; arrays are asked for as they are needed."""

    def __init__(self, seed: int, names: dict[str, tuple[str, t.DType]]) -> None:
        self.draw = draw = random.Random(seed)
        self.names, self.asked = names, 0
        self.bm, self.bn = (
            draw.choice((1, 2, 3, 8, 16, 33)),
            draw.choice((1, 5, 8, 12, 31, 64, 100)),
        )
        self.sizes = {
            "m": draw.choice((1, 3, self.bm, 2 * self.bm + 1, 50)),
            "n": draw.choice((1, self.bn, self.bn + 3, 7)),
            "k": draw.choice((0, 1, 3, 5)),
            "places": self.bn,
            "rows": self.bm,
            "starts": 64,
        }
        self.paging = random.Random(seed + 10**6)
        self.__name__ = f"threads_{seed}"

    def array(self, dims: str, kind: t.DType | None = None) -> t.Array:
        """The next array parameter."""
        name = f"x{self.asked}"
        self.asked += 1
        if name not in self.names:
            self.names[name] = (dims, kind or self.draw.choice(KINDS[:6]))
            raise Missing
        if kind is None:
            self.draw.choice(KINDS[:6])  # as the first time
        return self.given[name]

    def __call__(self, **given: t.Array) -> None:
        self.given, draw = given, self.draw
        (self.i,) = t.grid(m=t.cdiv(t.size("m"), self.bm))
        shift = draw.choice((0, 0, 0, -1, 3))
        self.start = t.read(given["starts"], self.i) if draw.random() < 0.4 else shift
        self.rows = t.span(self.i * self.bm, self.bm, "m")
        self.cols = t.span(self.start, self.bn, "n")
        self.pool = [fp32(t.load(self.array("m n"), self.rows, self.cols))]
        self.pool += [snap(t.load(self.array("m n"), self.rows, t.span(0, self.bn, "n")))]
        self.body(draw.randrange(2, 6))
        for _ in range(draw.choice((0, 1, 1, 2))):
            self.loop(draw.choice((1, 1, 2)))
        self.body(draw.randrange(1, 4))
        for _ in range(draw.randrange(1, 4)):
            self.store(draw.choice(self.pool))

    def body(self, count: int) -> None:
        """Some ops after one another."""
        for _ in range(count):
            self.pool.append(snap(self.op(self.draw.choice(self.pool))))

    def loop(self, depth: int) -> None:
        """A loop, or two nested, that changes tiles made before it."""
        carried = [self.draw.choice(self.pool).copy(), t.full(0.5, m=self.bm, n=self.bn)]
        row = t.zeros(m=self.bm)
        first = self.draw.choice((0, 0, 1, -1))
        known = list(self.pool)
        for k in t.loop(first, t.size("k")):
            self.step(carried, row, k)
            if depth > 1:
                for j in t.loop(k, t.minimum_index(k + 2, t.size("k"))):
                    self.step(carried, row, j)
            if self.draw.random() < 0.3:
                kind = self.draw.choice(KINDS[:3])
                tile = carried[0] if kind is t.FP32 else carried[0].cast(kind)
                t.store(self.array("k m n", kind), k, self.rows, t.span(0, self.bn), tile=tile)
        self.pool = [*known, *carried, carried[0] + row]

    def step(self, carried: list[t.Tile], row: t.Tile, k: Any) -> None:
        """What an iteration does."""
        x = carried[self.draw.randrange(2)]
        at = t.read(self.given["starts"], k + 1) if self.paging.random() < 0.4 else k * 3 - 1
        y = fp32(t.load(self.array("m k2"), self.rows, t.span(at, self.bn, "n")))
        x[:] = snap(x * 0.5 + y)
        row += t.sum_along(x, "n") * 0.25
        row[:] = snap(row)
        carried[1][:] = t.where(x > 0.0, carried[1], snap(self.op(carried[0])))

    def op(self, x: t.Tile) -> t.Tile:
        """One more op or two."""
        draw = self.draw
        axis = draw.choice("nm")
        other = draw.choice(self.pool)
        narrow = draw.choice((t.BF16, t.FP16, t.E5M2))
        choices: tuple[Callable[[], t.Tile], ...] = (
            lambda: x + draw.choice((1.0, -2.0, 0.5)),
            lambda: t.maximum(x, other),
            lambda: x + fp32(t.load(self.array("n"), t.span(0, self.bn, "n"))),
            lambda: x + fp32(t.load(self.array("m"), self.rows)),
            lambda: x - t.max_along(x, axis),
            lambda: x + snap(t.sum_along(x, axis) * 0.125),
            lambda: x - t.min_along(x, axis),
            lambda: fp32(x.cast(draw.choice(KINDS[1:6]))),
            lambda: fp32(x.cast(narrow) * x.cast(narrow) + x.cast(narrow)),
            lambda: (x.cast(t.INT32) * 3 - t.coordinate("n", self.bn, self.i)).cast(t.FP32),
            lambda: t.gather(x, t.load(self.given["places"], t.span(0, self.bn, "n")), "n"),
            lambda: t.gather(x, t.load(self.given["rows"], t.span(0, self.bm, "m")), "m"),
            lambda: t.cumsum(t.minimum(t.relu(x), 0.5), axis) * 0.25,
            lambda: x + t.argmax_along(x, axis).cast(t.FP32) * 0.5,
            lambda: (x.T + snap(other).T * 0.5).T,
            lambda: (x.T + t.load(self.array("n", t.FP32), t.span(0, self.bn, "n"))).T,
            lambda: t.causal(t.coordinate("m", self.bm), t.coordinate("n", self.bn), x, 0.0),
            lambda: t.where(t.coordinate("n", self.bn, self.start) < t.size("n"), x, 2.0),
            lambda: x - t.load(self.array("m n", t.FP32), self.rows, self.cols, edge=np.inf),
            lambda: x + fp32(t.load(self.array("n m"), self.cols, self.rows)).T,
            lambda: self.part(x, axis),
            lambda: t.product_along(t.maximum(t.minimum(x, 1.0), -1.0), axis) + x,
            lambda: t.where((x > 0.0) & ~(x > 3.0) | other.equals(0.0), x, other),
            lambda: x + t.number(self.i, t.FP32),
            lambda: self.again(x),
        )
        return draw.choice(choices)()

    def part(self, x: t.Tile, axis: str) -> t.Tile:
        """A part of the tile joined with the whole."""
        length = x.type.size(axis)
        size = self.draw.randrange(1, length + 1)
        start = self.draw.randrange(0, length - size + 1)
        return x + t.max_along(x.sub(axis, start, size), axis)

    def again(self, x: t.Tile) -> t.Tile:
        """What is stored and loaded again, another way round."""
        into = self.array("m n", t.FP32)
        t.store(into, self.rows, t.span(0, self.bn, "n"), tile=x)
        return t.load(into, self.rows, t.span(1, self.bn, "n"))

    def store(self, x: t.Tile) -> None:
        """Store in some type and way."""
        draw, kind = self.draw, self.draw.choice(KINDS)
        cols = t.span(self.start, self.bn, "n", stop=draw.choice((None, 3, self.bn)))
        rows = t.span(self.i * self.bm, self.bm, "m", stop=draw.choice((None, 2, 40)))
        tile = x if kind is t.FP32 else x > 0.0 if kind is t.BOOL else x.cast(kind)
        form = draw.randrange(6)
        if form < 2:
            t.store(self.array("m n", kind), rows, cols, tile=tile)
        elif form == 2:
            t.store(self.array("n m", kind), cols, rows, tile=tile.T)
        elif form == 3:
            kind = draw.choice((t.FP32, t.INT32, t.BF16, t.FP16))
            whole = snap(x) if kind is t.FP32 else snap(x).cast(kind)
            t.store(self.array("m n", kind), rows, cols, tile=whole, add=True)
        elif form == 4:
            t.store(self.array("n", t.FP32), cols, tile=t.sum_along(x, "m"), add=True)
        else:
            t.store(self.array("m", t.FP32), rows, tile=t.max_along(x, "n"))


def wild_threads(seed: int) -> tuple[t.Program, dict[str, Any]]:
    """(program, arrays) of a seed."""
    names: dict[str, tuple[str, t.DType]] = {}
    while True:
        body = Threads(seed, names)
        specs = {name: t.array(kind, dims) for name, (dims, kind) in names.items()}
        specs |= {n: t.array(t.INT32, n) for n in ("places", "rows", "starts")}
        specs["lengths"] = t.array(t.FP32, "k k2 n m")
        try:
            program = t.trace(body, specs, name=f"threads_{seed}")
        except Missing:
            continue
        break
    draw = np.random.default_rng(seed)
    sizes = {**body.sizes, "k2": 17}
    values = {n: draw.integers(-2, 3, [sizes[d] for d in s.dims]) for n, s in specs.items()}
    values["places"] = draw.integers(0, body.bn, body.bn)
    values["rows"] = draw.integers(0, body.bm, body.bm)
    values["starts"] = draw.integers(-4, 6, 64)
    return program, values


def wild_layout(program: t.Program, draw: random.Random) -> SimtSchedule:
    """A schedule: the usual one, or one with other powers of two."""
    launch = LaunchPlan(
        persistent=draw.random() < 0.5, tile_scheduler="static",
        reverse=tuple(name for name, _ in program.grid if draw.random() < 0.3),
    )  # fmt: skip
    if draw.random() < 0.4:
        return replace(simt(program), launch=launch)
    threads = draw.choice((32, 64, 128))
    return SimtSchedule(
        "drawn", threads, draw.choice((1, 2, 8, 32)), draw.choice((1, 2, 4, 8)), launch,
        stages=draw.choice((1, 2, 3)),
    )  # fmt: skip
