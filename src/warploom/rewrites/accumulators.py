"""Loops that do nothing but add up products of tiles, and what may be done with such sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.index import Index, as_index, minimum_index, symbol
from warploom.tile.ir import Loop, Op, Program, Span, TileType, Var
from warploom.tile.language import reduce_scatter

ELEMENTWISE = ("add", "copy")
PART = 8  # columns that blocks of a cluster exchange at a time


@dataclass(frozen=True)
class SumLoop:
    """A loop over the contracted axis: `sums` begin at zero and get products added, `products` are
    tiles of a product before it is added; `grid axes` of the loop's tiles are those of the sums."""

    loop: Loop
    sums: tuple[Var, ...]
    products: tuple[Var, ...]

    @property
    def tiles(self) -> frozenset[str]:
        """The names of all tiles that have the axes of a sum."""
        return frozenset(var.name for var in (*self.sums, *self.products))


def sum_loop(program: Program) -> SumLoop:
    """The one loop of a program, if it adds up products and does nothing else but load.

    Raises `NotApplicable` with the op that does more.
    """
    loops = program.loops()
    if len(loops) != 1:
        raise NotApplicable(
            f"{program.name}: {len(loops)} loops, expected one that adds up products"
        )
    (loop,) = loops
    inside = {op.dst.name: op.dst for op in _ops(loop) if op.kind != "load" and op.dst is not None}
    for op in _ops(loop):
        adds = op.kind in ELEMENTWISE and all(src.name in inside for src in op.srcs)
        if op.kind not in ("load", "mma") and not adds:
            raise NotApplicable(f"{op.where}: {op.kind} in a loop that should add up products only")
    starts = {
        op.dst.name: op
        for op in program.body
        if isinstance(op, Op) and op.kind == "fill" and op.dst is not None and op.dst.name in inside
    }
    for op in starts.values():
        if op.value != 0.0:
            raise NotApplicable(f"{op.where}: a sum that begins at {op.value}, expected 0")
    sums = tuple(var for name, var in inside.items() if name in starts)
    return SumLoop(loop, sums, tuple(var for name, var in inside.items() if name not in starts))


def _ops(loop: Loop) -> Sequence[Op]:
    found = [item for item in loop.body if isinstance(item, Op)]
    if len(found) != len(loop.body):
        raise NotApplicable(f"{loop.where}: a loop inside of the loop that should add up products")
    return found


def swap_operands(program: Program) -> Program:
    """Compute b^T a^T in place of a b: the rows of the result lie over the columns of registers.

    *requires*  a loop that only adds up products (`sum_loop`)
    *before -> after*  `c[m, n] += a @ b` -> `t[n, m] += b @ a`; after the loop `c = t.T`
    *keeps*  every bit: the same products are added in the same order
    *cost*  the axis over registers may be any multiple of 8, the other one is a multiple of 64:
            this fits sizes that fill no whole tile of the textbook's form
    """
    return _Swapped(program).run()


class _Swapped(Replay):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.found = sum_loop(program)
        self.sums = {var.name for var in self.found.sums}

    def op(self, op: Op) -> None:
        if op.dst is not None and op.dst.name in self.found.tiles:
            kind = op.dst.type
            if op.kind == "mma":
                op = replace(op, srcs=(op.srcs[1], op.srcs[0], *op.srcs[2:]))
            axes = tuple(reversed(kind.axes))
            self.copy(op, TileType(kind.dtype, axes))
        else:
            self.copy(op)

    def loop(self, item: Loop) -> None:
        self.copy_loop(item)
        read = {src.name for op in _after(self.program, item) for src in op.srcs}
        for var in self.found.sums:
            if var.name in read:
                self.tiles[var.name] = self.tile(var).T


def _after(program: Program, loop: Loop) -> list[Op]:
    place = program.body.index(loop)
    return [item for item in program.body[place + 1 :] if isinstance(item, Op)]


def cluster_reduce(program: Program, parts: int, width: int | None = None) -> Program:
    """Cut the contracted axis into parts, one for each block of a cluster, and add up their sums.

    Each block finishes `width` columns of the result (an equal part unless given): the epilogue
    runs on that part, and blocks beyond the last part store nothing.

    *requires*  a loop that only adds up products (`sum_loop`), of one sum; an epilogue that works
                element by element; no `parts` axis in the grid yet
    *before -> after*  `for k in [0, n): c += ..; epilogue(c)` ->
                       `for k in [p n/parts, ..): c += ..; c = reduce_scatter(c); epilogue(c)`
    *keeps*  every result to rounding: partial sums are fp32, added in the order of the parts
    *cost*  `parts` times as many tasks, for results with fewer tiles than the GPU has SMs
    """
    return _Reduced(program, parts, width).run()


def share_of(columns: int, parts: int) -> int:
    """Columns of a sum that each block of a cluster finishes: the fewest, in whole exchanges that
    divide them, with which all are finished."""
    found = (w for w in range(PART, columns + 1, PART) if columns % w == 0)
    return next((w for w in found if w * parts >= columns), columns // parts)


class _Reduced(Replay):
    def __init__(self, program: Program, parts: int, width: int | None) -> None:
        found = sum_loop(program)
        if len(found.sums) != 1 or parts < 2:
            raise NotApplicable(
                f"{program.name}: {len(found.sums)} sums in {parts} parts: expected one sum and at "
                "least 2 parts"
            )
        name = "slices_tile"
        if any(axis == name for axis, _ in program.grid):
            raise NotApplicable(f"{program.name}: its sums are already cut into parts")
        super().__init__(replace(program, grid=((name, as_index(parts)), *program.grid)))
        self.found, self.parts, self.part = found, parts, symbol(name)
        (self.sum,) = found.sums
        self.axis, whole = self.sum.type.axes[-1]
        self.width = width or whole // parts
        self.whole = whole
        self.narrowed = False
        inside = {src.name for op in _ops(found.loop) for src in op.srcs}
        self.early = {  # what is loaded before the loop for the epilogue
            op.id
            for op in program.body
            if isinstance(op, Op) and op.kind == "load" and op.dst and op.dst.name not in inside
        }

    def loop(self, item: Loop) -> None:
        each = (item.stop - item.start + (self.parts - 1)) // self.parts
        first = item.start + self.part * each
        self.copy_loop(replace(item, start=first, stop=minimum_index(first + each, item.stop)))
        sums = self.tile(self.sum)
        self.tiles[self.sum.name] = reduce_scatter(
            sums, self.part, self.parts, self.axis, self.width
        )
        self.narrowed = True

    def op(self, op: Op) -> None:
        if not self.narrowed and op.id not in self.early:
            return self.copy(op)
        kind = None if op.dst is None else op.dst.type
        if kind is not None and self.axis in kind.names and kind.size(self.axis) == self.whole:
            kind = kind.resized(self.axis, self.width)
        if op.kind == "coordinate" and op.axis == self.axis and op.start is not None:
            op = replace(op, start=self._from(op.start, None))
        if op.kind in ("reduce_sum", "reduce_max", "cumsum", "argmax") and op.axis == self.axis:
            raise NotApplicable(
                f"{op.where}: {op.kind} along {op.axis}, which blocks have in parts"
            )
        spans = tuple(self._narrow(op, number) for number in range(len(op.spans)))
        return self.copy(op, kind, spans)

    def _narrow(self, op: Op, number: int) -> Span:
        span = op.spans[number]
        if span.size != self.whole or span.axis != self.axis:
            return span
        assert op.array is not None
        start = self._from(span.start, symbol(op.array.dims[number]))
        return replace(span, start=start, size=self.width)

    def _from(self, start: Index, beyond: Index | None) -> Index:
        """Where a block's part begins; of blocks beyond the last part, outside of the array."""
        start = start + self.part * self.width
        if self.width * self.parts > self.whole and beyond is not None:
            start = start + self.part // (self.whole // self.width) * beyond
        return start
