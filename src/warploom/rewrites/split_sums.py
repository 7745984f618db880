"""Split-K through memory: tasks add up parts of each sum, and a second kernel adds up the parts.

Nakatani, "split-K", as CUTLASS has it (`GemmSplitKParallel`): where results have fewer tiles than a
GPU has SMs, and a cluster is too small to share a sum (`accumulators.cluster_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.rewrites.accumulators import SumLoop, sum_loop
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.index import Index, as_index, cdiv, minimum_index, symbol
from warploom.tile.ir import Array, Loop, Op, Program, Span, Var
from warploom.tile.language import load, span, store
from warploom.tile.trace import loop

PARTS, SLICES = "parts", "slices"  # the array of sums, and its first dimension


@dataclass(frozen=True)
class Split:
    """`first` stores sums over parts of the contracted axis, `second` adds them up and goes on."""

    first: Program
    second: Program


def split_sums(program: Program, parts: int, tile: tuple[int, int]) -> Split:
    """Cut the contracted axis into tasks of a first kernel; a second one, in tiles of its own, adds
    up what they give and runs the epilogue.

    *requires*  a loop that only adds up products (`sum_loop`), of one sum with two axes; an
                epilogue that works element by element; tiles at multiples of their sizes
    *before -> after*  `for k in [0, n): c += ..; epilogue(c)` ->
                       `for k in [p n/parts, ..): c += ..; parts[p] = c`, then
                       `c = parts[0] + parts[1] + ..; epilogue(c)`
    *keeps*  every result to rounding: partial sums are fp32, added in the order of the parts
    *cost*  `parts` times as many tasks; each sum is written and read once more a part, and a launch
    """
    found = sum_loop(program)
    if len(found.sums) != 1 or len(found.sums[0].type.axes) != 2 or parts < 2:
        raise NotApplicable(
            f"{program.name}: {len(found.sums)} sums in {parts} parts: expected one sum with two "
            "axes and at least 2 parts"
        )
    places = _places(program, found.sums[0])
    if other := {name for name, _ in program.grid} - {one.number for one in places}:
        raise NotApplicable(f"{program.name}: its grid has {min(other)} beside the axes of its sum")
    dims = (SLICES, *(place.dim for place in places))
    sums = Array(PARTS, found.sums[0].type.dtype, dims)
    return Split(_first(program, found, parts, sums), _second(program, found, parts, sums, tile))


@dataclass(frozen=True)
class _Place:
    """Where an axis of the sum lies: at `number * size` of the grid's index `number`, along an
    array's dimension `dim`."""

    axis: str
    size: int
    number: str
    dim: str

    @property
    def start(self) -> Index:
        """Where the sum's tile begins."""
        return symbol(self.number) * self.size


def leaves_sums(program: Program) -> bool:
    """Whether a program is the first of such a pair."""
    return any(one.name == PARTS and one.dims[0] == SLICES for one in program.arrays) and any(
        op.kind == "store" and op.array is not None and op.array.name == PARTS
        for op in program.ops()
    )


def _places(program: Program, total: Var) -> list[_Place]:
    """The places of both axes of a sum, from the store that its elements end up in."""
    found: dict[str, _Place] = {}
    sizes = dict(total.type.axes)
    for op in program.ops():
        if op.kind != "store" or op.array is None:
            continue
        for one, dim in zip(op.spans, op.array.dims, strict=True):
            numbers = sorted(one.start.symbols())
            if one.axis not in sizes or one.size != sizes[one.axis] or len(numbers) != 1:
                continue
            place = _Place(one.axis, sizes[one.axis], numbers[0], dim)
            if one.start == place.start:
                found[one.axis] = place
    if missing := [axis for axis in total.type.names if axis not in found]:
        raise NotApplicable(f"{program.name}: its sum is stored in no tiles along {missing[0]}")
    return [found[axis] for axis in total.type.names]


def _first(program: Program, found: SumLoop, parts: int, sums: Array) -> Program:
    grid = (("slices_tile", as_index(parts)), *program.grid)
    widened = replace(program, arrays=(*program.arrays, sums), grid=grid)
    return _with_used_arrays(_First(widened, found, parts, sums).run())


class _First(Replay):
    """The loop over a part of its range, and what it needs; then a store of the sum."""

    def __init__(self, program: Program, found: SumLoop, parts: int, sums: Array) -> None:
        super().__init__(program)
        self.found, self.parts, self.sums = found, parts, sums
        self.places = _places(program, found.sums[0])
        self.done = False

    def loop(self, item: Loop) -> None:
        each = (item.stop - item.start + (self.parts - 1)) // self.parts
        part = symbol("slices_tile")
        first = item.start + part * each
        self.copy_loop(replace(item, start=first, stop=minimum_index(first + each, item.stop)))
        spans = (span(one.start, one.size, one.axis) for one in self.places)
        store(self.sums, part, *spans, tile=self.tile(self.found.sums[0]))
        self.done = True

    def op(self, op: Op) -> None:
        if not self.done:
            self.copy(op)


def _second(
    program: Program, found: SumLoop, parts: int, sums: Array, tile: tuple[int, int]
) -> Program:
    places = {
        one.number: (one, size)
        for one, size in zip(_places(program, found.sums[0]), tile, strict=True)
    }
    grid = tuple(
        (name, cdiv(symbol(places[name][0].dim), places[name][1]) if name in places else extent)
        for name, extent in program.grid
    )
    arrays = (sums, *program.arrays)
    widened = replace(program, name="combine", arrays=arrays, grid=grid)
    return _with_used_arrays(_Second(widened, found, parts, sums, tile).run())


class _Second(Replay):
    """Everything but the loop, in other tiles; in its place the parts are added up."""

    def __init__(
        self, program: Program, found: SumLoop, parts: int, sums: Array, tile: tuple[int, int]
    ) -> None:
        super().__init__(program)
        self.found, self.parts, self.sums = found, parts, sums
        self.places = {
            one.axis: (one, size)
            for one, size in zip(_places(program, found.sums[0]), tile, strict=True)
        }

    def loop(self, item: Loop) -> None:
        total = self.tile(self.found.sums[0])
        at = [span(symbol(p.number) * size, size, p.axis) for p, size in self.places.values()]
        # One iteration: the number of parts is static, so that all loads are under way at once.
        for i in loop(cdiv(symbol(SLICES), self.parts)):
            every = [load(self.sums, i * self.parts + n, *at) for n in range(self.parts)]
            for one in every:
                total[:] = total + one

    def op(self, op: Op) -> None:
        if op.axis in self.places and op.kind != "coordinate":
            raise NotApplicable(
                f"{op.where}: {op.kind} along {op.axis}, of which a tile has a part"
            )
        kind = None if op.dst is None else op.dst.type
        for place, size in self.places.values():
            if (
                kind is not None
                and place.axis in kind.names
                and kind.size(place.axis) == place.size
            ):
                kind = kind.resized(place.axis, size)
        if op.kind == "coordinate" and op.axis in self.places:
            op = replace(op, start=self._moved(op.start, op.axis, op.where))
        self.copy(op, kind, tuple(self._narrow(one, op.where) for one in op.spans))

    def _narrow(self, one: Span, where: str) -> Span:
        if one.axis not in self.places or one.size != self.places[one.axis][0].size:
            return one
        size = self.places[one.axis][1]
        return replace(one, start=self._moved(one.start, one.axis, where), size=size)

    def _moved(self, start: Index | None, axis: str, where: str) -> Index:
        place, size = self.places[axis]
        if start != place.start:
            raise NotApplicable(f"{where}: {axis} from {start}, expected {place.start}")
        return symbol(place.number) * size


def _with_used_arrays(program: Program) -> Program:
    used = {op.array.name for op in program.ops() if op.array is not None}
    return replace(program, arrays=tuple(one for one in program.arrays if one.name in used))
