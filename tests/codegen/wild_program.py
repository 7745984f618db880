"""Wild random programs: a seed gives a program with several loops and matmuls, sizes and arrays.

Loops in sequence with trip counts from 0 up; products of all four forms, of loaded tiles, tiles
made in registers and states kept in shared memory; masks, packed ranges read from arrays, stores in
loops. Values are snapped to halves and clamped between ops, so that every sum is exact in any order
and the interpreter's bits are the only right ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warploom import tile as t
from warploom.errors import InputError

NARROW = (t.BF16, t.FP16)
PAGES = 11  # numbers of pages, some of them of no page
KINDS = (t.FP32, t.BF16, t.FP16, t.E4M3, t.E5M2, t.INT32, t.BOOL)


def fp32(x: t.Tile) -> t.Tile:
    """The tile in fp32."""
    return x if x.dtype is t.FP32 else x.cast(t.FP32)


def snap(x: t.Tile) -> t.Tile:
    """Whole halves between -8 and 8, exact in every narrow type."""
    return (t.minimum(t.maximum(fp32(x), -8.0), 8.0) * 2.0).cast(t.INT32).cast(t.FP32) * 0.5


@dataclass
class Case:
    """A program and what it runs on."""

    seed: int
    program: t.Program
    arrays: dict[str, Any]
    rows: str = "m"
    notes: list[str] = field(default_factory=list[str])


class Wild:
    """Draws the shape of a program, then traces it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        draw = self.draw
        self.bm = draw.choice((64, 64, 64, 128, 192))
        self.bn = draw.choice((16, 24, 32, 32, 40, 64, 72))
        self.bk = draw.choice((16, 16, 32, 32, 48, 64))
        self.kind = draw.choice((t.BF16, t.BF16, t.BF16, t.FP16, t.E4M3))
        if self.kind is t.E4M3:
            self.bk = draw.choice((32, 64))
            self.bn = draw.choice((32, 64, 96))
        self.batched = draw.random() < 0.3
        self.packed = draw.random() < 0.25
        self.grid_n = draw.random() < 0.4
        self.loops = [self.loop_kind() for _ in range(draw.choice((1, 1, 1, 2, 2, 3)))]
        self.sizes = {
            "m": draw.choice((1, 7, self.bm - 8, self.bm, self.bm + 3, 2 * self.bm + 9)),
            "n": draw.choice((1, self.bn - 1, self.bn, self.bn + 8, 2 * self.bn + 5)),
            "k": self.length(self.bk),
            "h": draw.choice((1, 2, 3)),
            "two": 2,
            "places": self.bn,
        }

    def length(self, step: int) -> int:
        """A length of some blocks: none, one, a part of one, many."""
        trips = self.draw.choice((0, 1, 1, 2, 3, 4, 7))
        return max(0, trips * step - self.draw.choice((0, 0, 1, step // 2)))

    def loop_kind(self) -> str:
        """What a loop does."""
        if self.kind is t.E4M3:
            return self.draw.choice(("gemm", "gemm", "two"))
        return self.draw.choice(
            ("gemm", "gemm", "gemm", "chain", "chain", "state", "made", "two", "across", "stores")
        )


def wild_case(seed: int) -> Case:
    """The case of a seed; raises `InputError` for a program the language refuses."""
    wild = Wild(seed)
    # Arrays must be known before tracing: a first run on a recorder finds them.
    names: dict[str, tuple[str, t.DType]] = {}
    while True:
        before = len(names)
        body = Body(wild, names)
        specs = {name: t.array(kind, dims) for name, (dims, kind) in names.items()}
        specs["out"] = t.array(t.FP32, "h m n" if wild.batched else "m n")
        specs["places"] = t.array(t.INT32, "places")
        specs["lengths"] = t.array(t.FP32, "k s d")  # nobody reads it: it names dimensions
        specs["pages"] = t.array(t.INT32, "pages")
        specs["bounds"] = t.array(t.INT32, "h two" if wild.batched else "m_blocks two")
        try:
            program = t.trace(body, specs, name=f"wild_{seed}")
        except Missing:
            assert len(names) > before
            continue
        break
    return Case(seed, program, fill_arrays(wild, specs, body), notes=body.notes)


class Missing(Exception):
    """An array is asked for that the program does not have yet."""


class Body:
    """The traced function of one seed."""

    def __init__(self, wild: Wild, names: dict[str, tuple[str, t.DType]]) -> None:
        self.wild, self.names = wild, names
        self.draw = random.Random(wild.seed + 10**6)
        self.asked = 0
        self.paging = random.Random(wild.seed + 2 * 10**6)
        self.notes: list[str] = list(wild.loops)
        self.__name__ = f"wild_{wild.seed}"

    def array(self, dims: str, kind: t.DType) -> t.Array:
        """The next array parameter."""
        name = f"x{self.asked}"
        self.asked += 1
        if name not in self.names:
            self.names[name] = (dims, kind)
            raise Missing
        return self.given[name]

    def chance(self, p: float) -> bool:
        """True with that probability."""
        return self.draw.random() < p

    def __call__(self, **given: t.Array) -> None:
        self.given, wild = given, self.wild
        axes: dict[str, Any] = {}
        if wild.batched:
            axes["h"] = t.size("h")
        axes["m"] = t.cdiv(t.size("m"), wild.bm)
        if wild.grid_n:
            axes["n"] = t.cdiv(t.size("n"), wild.bn)
        found = dict(zip(axes, t.grid(**axes), strict=True))
        self.h, self.i = found.get("h"), found["m"]
        self.j = found.get("n", 0)
        self.rows, self.cols = t.span(self.i * wild.bm, wild.bm), t.span(self.j * wild.bn, wild.bn)
        self.places = (
            t.coordinate("m", wild.bm, self.i * wild.bm),
            t.coordinate("n", wild.bn, self.j * wild.bn),
        )
        self.first = self.last = None
        if wild.packed:
            at = self.h if wild.batched else self.i
            self.first = t.read(given["bounds"], at, 0)
            self.last = t.read(given["bounds"], at, 1)
        self.pool = []
        for number, kind in enumerate(wild.loops):
            getattr(self, f"loop_{kind}")(number)
        for _ in range(self.draw.randrange(5)):
            self.pool.append(snap(self.op(self.one())))
        self.stores()

    # ---- pieces

    def load(self, dims: str, kind: t.DType, *spans: Any) -> t.Tile:
        """A tile of a new array, of this batch where there are some."""
        if self.wild.batched and self.chance(0.7):
            return t.load(self.array(f"h {dims}", kind), self.h, *spans)
        return t.load(self.array(dims, kind), *spans)

    def range(self, dim: str, step: int) -> Any:
        """The loop over blocks of a dimension, with bounds of some form."""
        last = t.cdiv(t.size(dim), step)
        form = self.draw.randrange(5)
        if self.last is not None and form < 3:
            return t.loop(self.first, t.minimum_index(self.last, last))
        if form == 3:
            self.notes.append("causal")
            return t.loop(t.minimum_index(self.i + 1, last))
        return t.loop(last)

    def loop_gemm(self, number: int) -> None:
        """acc += a @ b."""
        wild = self.wild
        acc = t.zeros(m=wild.bm, n=wild.bn)
        change = self.draw.randrange(6)
        paged = self.paging.choice(("", "", "page", "pages"))
        self.notes += [paged] if paged else []
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            left = self.left(("m", "k"), (self.rows, part))
            acc += left @ (
                self.paged(k, paged == "pages")
                if paged
                else self.right(("k", "n"), (part, self.cols))
            )
            if change == 0:
                acc[:] = t.maximum(acc, -3.0)
            elif change == 1:
                acc[:] = t.where(self.places[0] >= self.places[1], acc, 1.0)
            elif change == 2:
                acc *= t.where(self.load("n", t.FP32, self.cols) > 0.0, 1.0, 0.5)
                acc[:] = snap(acc)
        self.pool.append(snap(acc))

    def paged(self, k: t.Index, stacked: bool) -> t.Tile:
        """A second operand from a page that the iteration reads the number of, or from several."""
        wild, count = self.wild, 2 if stacked and self.wild.bk % 16 == 0 else 1
        pages = self.given["pages"]
        found = [t.read(pages, (k * count + n) % PAGES) for n in range(count)]
        step = wild.bk // count
        page = found[0] if count == 1 else found
        if wild.kind is t.E4M3:
            return t.load(
                self.array("n k", wild.kind), self.cols, t.span(found[0] * wild.bk, wild.bk)
            )
        return t.load(self.array("p s n", wild.kind), page, t.span(0, step, "k"), self.cols)

    def left(self, axes: tuple[str, str], at: tuple[Any, Any]) -> t.Tile:
        """A first operand; its second axis is contracted."""
        return self.stored(axes, at, self.wild.kind is t.E4M3)

    def right(self, axes: tuple[str, str], at: tuple[Any, Any]) -> t.Tile:
        """A second operand; its first axis is contracted."""
        return self.stored(axes, at, self.wild.kind is t.E4M3, turned=True)

    def stored(
        self, axes: tuple[str, str], at: tuple[Any, Any], fixed: bool, turned: bool = False
    ) -> t.Tile:
        """An operand; either order of its axes in memory where the type allows."""
        turn = turned if fixed else self.chance(0.5)
        last = at[0 if turn else 1].size * self.wild.kind.bytes
        if not fixed and last % (32 if last < 128 else 16):
            turn = not turn  # no swizzle has such rows
        if turn:
            axes, at = (axes[1], axes[0]), (at[1], at[0])
        return self.load(" ".join(axes), self.wild.kind, *at)

    def loop_two(self, number: int) -> None:
        """Two accumulators, or one that two products add to."""
        wild = self.wild
        acc, other = t.zeros(m=wild.bm, n=wild.bn), t.zeros(m=wild.bm, n=wild.bn)
        same, shared = self.chance(0.3), self.chance(0.5)
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            a = self.left(("m", "k"), (self.rows, part))
            b = self.right(("k", "n"), (part, self.cols))
            acc += a @ b
            if not shared:
                a = self.left(("m", "k"), (self.rows, part))
            into = acc if same else other
            into += a @ self.right(("k", "n"), (part, self.cols))
        self.pool += [snap(acc), snap(other)]

    def loop_chain(self, number: int) -> None:
        """o += f(q @ k) @ v, as attention, f exact."""
        wild, draw = self.wild, self.draw
        block = draw.choice((16, 32, 48, 64))
        depth = draw.choice((16, 32))
        q = self.load("m d", wild.kind, self.rows, t.span(0, depth))
        o, best = t.zeros(m=wild.bm, n=wild.bn), t.full(-9.0, m=wild.bm)
        total = t.zeros(m=wild.bm)
        form, settle = draw.randrange(6), self.chance(0.4)
        for k in self.range("s", block):
            part = t.span(k * block, block)
            s = q @ self.stored(("d", "s"), (t.span(0, depth), part), False)
            keys = t.coordinate("s", block, k * block)
            s[:] = t.where(keys < t.size("s"), snap(s), -9.0)
            if form == 0:
                s[:] = t.causal(self.places[0], keys, s, -9.0)
            elif form == 1:
                near = (self.places[0] >= keys) & (self.places[0] < keys + 20)
                s[:] = t.where(near, s, -9.0)
            if form > 2:
                new = t.maximum(best, t.max_along(s, "s"))
                if settle:
                    right = best >= new
                    o[:] = t.where(right, o, snap(o * 0.5))
                    total[:] = t.where(right, total, snap(total * 0.5))
                else:
                    o *= t.where(best >= new, 1.0, 0.5)
                best[:] = new
                s -= best
            total += t.sum_along(t.maximum(s, -2.0), "s")
            p = t.maximum(s, -4.0).cast(wild.kind)
            o += p @ self.stored(("s", "n"), (part, self.cols), False)
            o[:] = snap(o)
        self.pool += [snap(o + total), snap(o - best)]

    def loop_state(self, number: int) -> None:
        """o from a state that the loop adds to: an operand made in registers, in shared memory."""
        wild = self.wild
        deep = 64
        state = t.zeros(d=deep, n=wild.bn)
        kept = t.zeros(wild.kind, d=deep, n=wild.bn)
        o = t.zeros(m=wild.bm, n=wild.bn)
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            o += self.load("m d", wild.kind, self.rows, t.span(0, deep)) @ kept
            o[:] = snap(o)
            state += self.stored(("d", "k"), (t.span(0, deep), part), False) @ self.stored(
                ("k", "n"), (part, self.cols), False
            )
            state[:] = snap(state)
            kept[:] = state.cast(wild.kind)
        self.pool.append(o)

    def loop_made(self, number: int) -> None:
        """An operand that is made in registers of what is loaded."""
        wild = self.wild
        acc = t.zeros(m=wild.bm, n=wild.bn)
        source = self.draw.choice((t.E4M3, t.INT32, t.FP32, wild.kind))
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            a = fp32(self.load("m k", source, self.rows, part))
            if self.draw.random() < 0.5:
                a = t.maximum(a * 0.5, -1.0)
            acc += a.cast(wild.kind) @ self.stored(("k", "n"), (part, self.cols), False)
        self.pool.append(snap(acc))

    def loop_across(self, number: int) -> None:
        """The product the other way round, beside one as usual."""
        wild = self.wild
        acc = t.zeros(m=wild.bm, n=wild.bn)
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            a = self.stored(("m", "k"), (self.rows, part), True)
            b = self.stored(("k", "n"), (part, self.cols), False)
            acc += a @ b
        turned = snap(acc).T
        turned = turned + self.load("n", t.FP32, self.cols)
        self.pool.append(snap(turned.T))

    def loop_stores(self, number: int) -> None:
        """A loop that stores what it has, every iteration."""
        wild = self.wild
        into = self.array("k m n" if self.chance(0.5) else "k n m", self.draw.choice(KINDS[:3]))
        acc = t.zeros(m=wild.bm, n=wild.bn)
        for k in self.range("k", wild.bk):
            part = t.span(k * wild.bk, wild.bk)
            a = self.stored(("m", "k"), (self.rows, part), False)
            acc += a @ self.stored(("k", "n"), (part, self.cols), False)
            acc[:] = snap(acc)
            one = acc.cast(into.dtype) if into.dtype is not t.FP32 else acc
            turned = into.dims[1] == "n"
            where = (self.cols, self.rows) if turned else (self.rows, self.cols)
            # Two batches must not write to one place.
            if not wild.batched:
                t.store(into, k, *where, tile=one.T if turned else one)
        self.pool.append(acc)

    def one(self) -> t.Tile:
        """A tile made so far."""
        return self.draw.choice(self.pool)

    def op(self, x: t.Tile) -> t.Tile:
        """One more op or two."""
        draw, wild = self.draw, self.wild
        axis = draw.choice("nm")
        choices = (
            lambda: x + draw.choice((1.0, -2.0, 0.5)),
            lambda: t.maximum(x, self.one()),
            lambda: t.where(x > 0.0, x, -x),
            lambda: x + fp32(self.load("n", draw.choice(KINDS[:6]), self.cols)),
            lambda: x + fp32(self.load("m", draw.choice(KINDS[:6]), self.rows)),
            lambda: x - t.max_along(x, axis),
            lambda: x + snap(t.sum_along(x, axis) * 0.125),
            lambda: fp32(x.cast(draw.choice(KINDS[1:6]))),
            lambda: t.gather(x, t.load(self.given["places"], t.span(0, wild.bn, "n")), "n"),
            lambda: t.cumsum(t.minimum(t.relu(x), 0.5), axis) * 0.25,
            lambda: x + t.argmax_along(x, axis).cast(t.FP32) * 0.5,
            lambda: (x.T + fp32(self.load("n", t.FP32, self.cols))).T,
            lambda: t.causal(*self.places, x, 0.0),
            lambda: t.where(self.places[1] < t.size("n"), x, 2.0),
            lambda: x + fp32(self.load("m n", draw.choice(KINDS[:6]), self.rows, self.cols)),
            lambda: x - fp32(self.load("n m", draw.choice(KINDS[:6]), self.cols, self.rows)).T,
            lambda: self.complex(x),
            lambda: self.parts(x),
            lambda: x - t.load(self.array("m n", t.FP32), self.rows, self.cols, edge=-np.inf),
            lambda: self.last_product(x),
            lambda: self.vector(x, axis),
        )
        return draw.choice(choices)()

    def complex(self, x: t.Tile) -> t.Tile:
        """A product of complex numbers."""
        z = t.Complex(x, snap(self.one() * 0.25)) * t.Complex(x - 1.0, x * 0.5)
        return z.re * 0.125 + z.conj().im * 0.125

    def vector(self, x: t.Tile, axis: str) -> t.Tile:
        """What a vector's running sums leave over its largest element, made along some axis."""
        own = self.draw.choice((axis, "w"))
        place = self.rows if axis == "m" else self.cols
        v = fp32(self.load(axis, t.FP32, t.span(place.start, place.size, own)))
        v = snap(t.cumsum(v, own) * 0.25) - t.max_along(v, own)
        return x + (v if own == axis else v.rename(own, axis))

    def parts(self, x: t.Tile) -> t.Tile:
        """A part of the tile joined with the whole by its sums."""
        axis = self.draw.choice("nm")
        length = x.type.size(axis)
        size = self.draw.choice((8, 16, length // 2 // 8 * 8 or 8))
        if axis == "m":
            size = 64
        start = self.draw.randrange(0, max(1, length - size + 1))
        if self.chance(0.7):
            start = start // 8 * 8
        part = x.sub(axis, start, size)
        return x + snap(t.max_along(part, axis))

    def last_product(self, x: t.Tile) -> t.Tile:
        """A matmul outside of the loops, of a tile made in registers."""
        wild = self.wild
        if wild.bn % 16 or wild.kind is t.E4M3:
            return x
        w = self.load("n n2", wild.kind, t.span(0, wild.bn), t.span(0, wild.bn, "n2"))
        y = snap(x).cast(wild.kind) @ w
        return x + t.max_along(y, "n2") * 0.125

    def stores(self) -> None:
        """What is left of the pool, in all types and ways."""
        draw, wild = self.draw, self.wild
        head = (self.h,) if wild.batched else ()
        dims = "h " if wild.batched else ""
        whole = self.one()
        t.store(self.given["out"], *head, self.rows, self.cols, tile=whole)
        for _ in range(draw.randrange(1, 4)):
            form, x = draw.randrange(8), self.one()
            kind = draw.choice(KINDS)
            if form < 3:
                into = self.array(f"{dims}m n", kind)
                t.store(into, *head, self.rows, self.cols, tile=self.as_kind(x, kind))
            elif form == 3:
                into = self.array(f"{dims}n m", kind)
                t.store(into, *head, self.cols, self.rows, tile=self.as_kind(x.T, kind))
            elif form == 4:
                into = self.array("m n", draw.choice((t.FP32, t.INT32, t.BF16)))
                t.store(into, self.rows, self.cols, tile=self.as_kind(x, into.dtype), add=True)
            elif form == 5 and not wild.grid_n:
                t.store(self.array(f"{dims}m", t.FP32), *head, self.rows, tile=t.sum_along(x, "n"))
            elif form == 6:
                t.store(self.array("n", t.FP32), self.cols, tile=t.sum_along(x, "m"), add=True)
            else:
                stop = self.i * wild.bm + draw.choice((0, 5, wild.bm // 2))
                rows = t.span(self.i * wild.bm, wild.bm, stop=stop)
                into = self.array(f"{dims}m n", kind)
                t.store(into, *head, rows, self.cols, tile=self.as_kind(x, kind))

    def as_kind(self, x: t.Tile, kind: t.DType) -> t.Tile:
        """The tile in an element type; as conditions: where it is positive."""
        if x.dtype is kind:
            return x
        return x > 0.0 if kind is t.BOOL else x.cast(kind)


def fill_arrays(wild: Wild, specs: dict[str, t.Array], body: Body) -> dict[str, Any]:
    """Small whole numbers for what is read, zeros for what is written."""
    draw = np.random.default_rng(wild.seed)
    sizes = {
        **wild.sizes,
        "m_blocks": -(-wild.sizes["m"] // wild.bm),
        "s": wild.length(32),
        "d": 64,
        "n2": wild.bn,
        "p": 5,
        "pages": PAGES,
    }
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        shape = [sizes[dim] for dim in spec.dims]
        values[name] = draw.integers(-2, 3, shape)
        if spec.dtype is t.BOOL:
            values[name] = values[name] > 0
    values["pages"] = np.random.default_rng(wild.seed + 1).integers(-1, 6, PAGES)
    values["places"] = draw.integers(0, wild.bn, [sizes["places"]])
    bounds = draw.integers(0, 5, values["bounds"].shape)
    bounds[..., 1] += bounds[..., 0] * draw.integers(0, 2)
    values["bounds"] = bounds
    return values


__all__ = ["Case", "InputError", "wild_case"]
