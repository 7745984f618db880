"""GEMM with block or row scales, and grouped GEMM: c = (a b) of every expert on its own rows.

`a: [m, k]` has the rows of all experts one after another ("rows"), and `tasks: [tiles, 3]` says of
every tile of rows its expert, its first row and the row after its expert's last; `work_list` makes
it of the experts' ends on the GPU. Or `a: [experts, m, k]` has room for m rows of each ("masked"),
of which `lengths: [experts]` count. `b: [experts, n, k]` or `[experts, k, n]`; `c` is like `a` with
n columns. Without experts ("none") it is one product, `b: [n, k]`.

Scales of 8-bit operands: one a row of a and one a column of b ("rows": `scale_a: [m]`, `scale_b:
[experts, n]`), or one for 128 elements of a row of a and one for a block of 128 x 128 of b
("blocks": `scale_a: [k / 128, m]`, `scale_b: [experts, n / 128, k / 128]`, DeepSeek-V3, arXiv
2412.19437, section 3.3.2). Then the tensor core sums 128 products at a time, and every such sum is
scaled and added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import mul
from typing import Any

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile.index import IndexLike

SCALED = 128  # elements that a block scale is for, along each axis
STEP_BYTES = 128  # of k in a step
EVEN = 8  # rows that tiles of one expert differ by at most, and begin at multiples of
PACKED_BITS = 16  # of elements of a result that is turned on its way through shared memory
LISTED = 16  # tasks that a block of `work_list` writes
GROUPS = ("none", "rows", "masked")
SCALES = ("none", "rows", "blocks")


@dataclass(frozen=True)
class GroupedConfig:
    """What is static.

    groups   whose rows a has: "none" (one product), "rows" or "masked" (the module's head)
    scales   of 8-bit operands: "none", "rows" or "blocks"
    b        "nk" or "kn" (16-bit elements only)
    swiglu   b has 2 n columns, and c = silu(a b[:n]) * (a b[n:])
    tile     rows and columns of a task
    promote  every step of k is summed outside of the tensor core, whose fp8 sums keep 14 bits; with
             block scales it always is
    products_in_flight  promoted products that are started together, so that the sums of one are
             added while the others run
    widths   with some, the product is turned: rows of a lie over columns of the instructions, of
             which a task does the fewest of these that hold its rows; the widest is `tile`'s rows
    brought  the producer brings the block scales of a's rows, which takes a pitch of 16 bytes and
             tiles that begin at multiples of 4 rows; else threads read them an iteration ahead
    """

    dtype: t.DType = t.BF16
    out: t.DType = t.BF16
    groups: str = "none"
    scales: str = "none"
    b: str = "nk"
    swiglu: bool = False
    tile: tuple[int, int] = (128, 128)
    promote: bool = False
    products_in_flight: int = 1
    brought: bool = False
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no kernel here is for."""
        if self.groups not in GROUPS or self.scales not in SCALES or self.b not in ("nk", "kn"):
            raise InputError(
                f"grouped gemm groups={self.groups!r} scales={self.scales!r} b={self.b!r}: "
                f"expected {'|'.join(GROUPS)}, {'|'.join(SCALES)} and nk|kn"
            )
        if self.dtype.bits == 8 and self.b != "nk":
            raise InputError(f"grouped gemm of {self.dtype} with b={self.b!r}: expected b='nk'")
        if self.scales != "none" and self.dtype.bits != 8:
            raise InputError(
                f"grouped gemm of {self.dtype} with scales={self.scales!r}: expected 8-bit elements"
            )
        if self.scales == "blocks" and SCALED % self.tile[1] and self.tile[1] % (SCALED // 2):
            raise InputError(
                f"grouped gemm tile of {self.tile[1]} columns with block scales: expected a "
                f"divisor of {SCALED} or a multiple of {SCALED // 2}"
            )
        if self.brought and (self.scales != "blocks" or self.groups == "rows"):
            raise InputError(
                f"grouped gemm brought=True with scales={self.scales!r} groups={self.groups!r}: "
                "expected block scales, and tiles that begin at multiples of 4 rows"
            )
        if self.widths:
            self._check_widths()
        together = self.products_in_flight
        if together < 1 or (together > 1 and (not self.promoted or self.swiglu)):
            raise InputError(
                f"grouped gemm products_in_flight={together}: expected >= 1, and 1 unless promoted "
                "or with swiglu"
            )

    def _check_widths(self) -> None:
        rising = [*self.widths] == sorted(set(self.widths)) and self.widths[-1] == self.tile[0]
        eights = all(width > 0 and width % EVEN == 0 for width in self.widths)
        if not (rising and eights) or self.tile[1] % ROWS_PER_GROUP:
            raise InputError(
                f"grouped gemm widths={self.widths} of a tile {self.tile}: expected rising "
                f"multiples of {EVEN}, the last one the rows of the tile, and a multiple of "
                f"{ROWS_PER_GROUP} columns"
            )
        if self.groups == "none" or self.promoted or self.out.bits != PACKED_BITS:
            raise InputError(
                f"grouped gemm widths={self.widths} with groups={self.groups!r}, "
                f"promoted={self.promoted} and results of {self.out}: expected rows of experts, "
                f"sums inside of the tensor core and {PACKED_BITS}-bit results"
            )

    @property
    def parts(self) -> tuple[int, int]:
        """A tile's columns lie in so many parts of so many: blocks of b have a scale each."""
        wide = gcd(self.tile[1], SCALED) if self.scales == "blocks" else self.tile[1]
        return self.tile[1] // wide, wide

    @property
    def promoted(self) -> bool:
        """Whether products are summed outside of the tensor core."""
        return self.promote or self.scales == "blocks"

    @property
    def step(self) -> int:
        """Elements of k in a step."""
        return STEP_BYTES // self.dtype.bytes

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of the program."""
        experts = "" if self.groups == "none" else "experts "
        masked = "experts " if self.groups == "masked" else ""
        columns = "columns" if self.swiglu else "n"
        order = " ".join(columns if axis == "n" else axis for axis in self.b)
        found = {
            "a": t.array(self.dtype, f"{masked}m k"),
            "b": t.array(self.dtype, experts + order),
        }
        if self.groups == "rows":
            found["tasks"] = t.array(t.INT32, "tiles three")
        if self.groups == "masked":
            found["lengths"] = t.array(t.INT32, "experts")
        if self.scales == "rows":
            found["scale_a"] = t.array(t.FP32, f"{masked}m")
            found["scale_b"] = t.array(t.FP32, experts + columns)
        if self.scales == "blocks":
            found["scale_a"] = t.array(t.FP32, f"{masked}depth m")
            found["scale_b"] = t.array(t.FP32, f"{experts}wide depth")
        return {**found, "c": t.array(self.out, f"{masked}m n")}


def grouped(config: GroupedConfig) -> t.Program:
    """The product of every expert's rows with its weights."""
    return t.trace(_grouped, config.arrays, name="grouped_gemm", config=config)


@dataclass(frozen=True)
class _Task:
    """Where a task's tile is: leading indices of a and of b, its rows and its columns, how many
    steps it takes, and how many those of a part of the rows take."""

    of_a: tuple[t.Index, ...]
    of_b: tuple[t.Index, ...]
    first: t.Index
    stop: t.Index | None
    column: t.Index
    steps: t.Index
    until: t.Index | None


def _task(config: GroupedConfig, rest: dict[str, t.Array]) -> _Task:
    bm, bn = config.tile
    steps = t.cdiv(t.size("k"), config.step)
    rows, columns = t.cdiv(t.size("m"), bm), t.cdiv(t.size("n"), bn)
    if config.groups == "none":
        m, n = t.grid(m=rows, n=columns)
        return _Task((), (), m * bm, None, n * bn, steps, None)
    if config.groups == "masked":
        expert, m, n = t.grid(experts=t.size("experts"), m=rows, n=columns)
        first, stop = m * bm, t.minimum_index(t.read(rest["lengths"], expert), t.size("m"))
        of_a = (expert,)
    else:
        tile, n = t.grid(tiles=t.size("tiles"), n=columns)
        expert, first, stop = (t.read(rest["tasks"], tile, part) for part in range(3))
        of_a = ()

    def of_rows(begin: IndexLike) -> t.Index:
        """The steps of rows from `begin` on: none where there are no such rows."""
        return steps * t.minimum_index(t.maximum_index(stop - first - begin, 0), 1)

    until = of_rows(t.part_begin("m"))
    return _Task(of_a, (expert,), first, stop, n * bn, of_rows(0), until)


def _turned(
    a: t.Array, b: t.Array, c: t.Array, config: GroupedConfig, task: _Task, rest: Any
) -> None:
    """c^T = b a^T, in a loop for each width."""
    _, bn = config.tile
    assert task.stop is not None
    rows = t.maximum_index(task.stop - task.first, 0)
    columns = [task.column + half * t.size("n") for half in range(1 + config.swiglu)]
    own_columns = [t.span(column, bn, "n") for column in columns]
    # 1 for a group of which some columns exist: the tensor core is left to the others elsewhere.
    left = t.size("n") - task.column - t.part_begin("n")
    inside = t.minimum_index(t.maximum_index(left, 0), 1)
    least = 0
    for width in config.widths:
        # 1 where the rows of a task are more than `least`, and at most `width` or the widest.
        here = t.minimum_index(t.maximum_index(rows - least, 0), 1)
        if width < config.widths[-1]:
            here = here - t.minimum_index(t.maximum_index(rows - width, 0), 1)
        least, own = width, f"m{width}"
        inputs = t.span(task.first, width, own)
        factors: list[list[t.Tile]] = [[] for _ in columns]
        if config.scales == "rows":  # on their way while the loop runs
            of_a = t.load(rest["scale_a"], *task.of_a, inputs)
            factors = [[t.load(rest["scale_b"], *task.of_b, one), of_a] for one in own_columns]
        sums = [t.zeros(t.FP32, n=bn, **{own: width}) for _ in columns]
        steps = t.cdiv(t.size("k"), config.step) * here
        for i in t.loop(0, steps, until=steps * inside):
            depth = t.span(i * config.step, config.step)
            at = t.load(a, *task.of_a, inputs, depth)
            for number, one in enumerate(own_columns):
                sides = (one, depth) if config.b == "nk" else (depth, one)
                sums[number] += t.load(b, *task.of_b, *sides) @ at
        results = [reduce(mul, some, acc) for acc, some in zip(sums, factors, strict=True)]
        out = t.silu(results[0]) * results[1] if config.swiglu else results[0]
        kept = t.span(task.first, width, own, stop=task.first + rows * here)
        t.store(c, *task.of_a, kept, t.span(task.column, bn, "n"), tile=out.T.cast(config.out))


def _grouped(a: t.Array, b: t.Array, c: t.Array, config: GroupedConfig, **rest: t.Array) -> None:
    bm, _ = config.tile
    task = _task(config, rest)
    if config.widths:
        _turned(a, b, c, config, task, rest)
        return
    rows = t.span(task.first, bm, "m")
    count, wide = config.parts
    columns = [
        task.column + part * wide + half * t.size("n")
        for part in range(count)
        for half in range(1 + config.swiglu)
    ]
    sums = [t.zeros(m=bm, n=wide) for _ in columns]
    scales = _Scales(config, task, columns, rest)
    together = config.products_in_flight
    of_b, of_a = scales.of_b(0), scales.of_a(0)
    until = None if task.until is None else (task.until + (together - 1)) // together
    for i in t.loop(0, (task.steps + (together - 1)) // together, until=until):
        # Read an iteration ahead, so that they have arrived when they are wanted.
        next_b, next_a = scales.of_b(i + 1), scales.of_a(i + 1)
        products: list[t.Tile] = []
        factors: list[t.Tile] = []
        for part in range(together):
            depth = t.span((i * together + part) * config.step, config.step)
            at = t.load(a, *task.of_a, rows, depth)
            for number, column in enumerate(columns):
                own = t.span(column, wide, "n")
                sides = (own, depth) if config.b == "nk" else (depth, own)
                product = at @ t.load(b, *task.of_b, *sides)
                if not config.promoted:
                    sums[number] += product
                    continue
                if of_b and not factors:  # made while the first product runs
                    factors = scales.factors(i, of_a, of_b)
                products.append(product)
                if together == 1:  # one at a time: several need more registers than there are
                    _add(sums[number], product, factors[number : number + 1])
        for number, product in enumerate(products if together > 1 else []):
            _add(sums[number % len(sums)], product, factors[number : number + 1])
        for scale, following in zip((*of_b, *of_a), (*next_b, *next_a), strict=True):
            scale[:] = following
    results = [scales.by_rows(*one) for one in zip(sums, columns, strict=True)]
    halves = 1 + config.swiglu
    for part in range(count):
        first, *others = results[part * halves : (part + 1) * halves]
        out = t.silu(first) * others[0] if others else first
        kept = t.span(task.first, bm, "m", stop=task.stop)
        cols = t.span(task.column + part * wide, wide, "n")
        t.store(c, *task.of_a, kept, cols, tile=out.cast(config.out))


def _add(acc: t.Tile, product: t.Tile, factor: list[t.Tile]) -> None:
    acc[:] = acc + (product * factor[0] if factor else product)


@dataclass(frozen=True)
class _Scales:
    """The scales of a task's operands, for products with columns of b from `columns` on."""

    config: GroupedConfig
    task: _Task
    columns: list[t.Index]
    arrays: dict[str, t.Array]

    def of_b(self, i: t.Index | int) -> list[t.Tile]:
        """The block scales of b for the products of iteration i."""
        if self.config.scales != "blocks":
            return []
        together, array = self.config.products_in_flight, self.arrays["scale_b"]
        return [
            t.load(array, *self.task.of_b, column // SCALED, i * together + part)
            for part in range(together)
            for column in self.columns
        ]

    def of_a(self, i: t.Index | int) -> list[t.Tile]:
        """Those of a's rows, where threads read them."""
        read_by_threads = self.config.scales == "blocks" and not self.config.brought
        return self._rows_of_a(i) if read_by_threads else []

    def factors(self, i: t.Index, of_a: list[t.Tile], of_b: list[t.Tile]) -> list[t.Tile]:
        """The factors of the products of iteration i, one a row."""
        rows, each = of_a or self._rows_of_a(i), len(self.columns)
        return [rows[number // each] * one for number, one in enumerate(of_b)]

    def _rows_of_a(self, i: t.Index | int) -> list[t.Tile]:
        rows = t.span(self.task.first, self.config.tile[0], "m")
        together, array = self.config.products_in_flight, self.arrays["scale_a"]
        return [
            t.load(array, *self.task.of_a, i * together + part, rows) for part in range(together)
        ]

    def by_rows(self, acc: t.Tile, column: t.Index) -> t.Tile:
        """Sums times the scales of their rows and columns."""
        if self.config.scales != "rows":
            return acc
        rows = t.span(self.task.first, self.config.tile[0], "m")
        scaled = acc * t.load(self.arrays["scale_a"], *self.task.of_a, rows)
        own = t.span(column, self.config.parts[1], "n")
        return scaled * t.load(self.arrays["scale_b"], *self.task.of_b, own)


def work_list(experts: int, rows: int, even: bool = False) -> t.Program:
    """The task of every tile of `rows` rows, from `ends: [experts]`, the row after each expert's
    last: `tasks: [tiles, 3]`. No tile has rows of two experts; tasks beyond the last have no rows.
    `even`: the rows of an expert are shared out to as few tiles, in multiples of 8.

    There is room for all with ceil(m / rows) + experts tiles.
    """
    arrays = {"ends": t.array(t.INT32, "experts"), "tasks": t.array(t.INT32, "tiles three")}
    return t.trace(_work_list, arrays, name="work_list", experts=experts, rows=rows, even=even)


def _work_list(ends: t.Array, tasks: t.Array, experts: int, rows: int, even: bool) -> None:
    (block,) = t.grid(tiles=t.cdiv(t.size("tiles"), LISTED))
    every = t.span(0, experts)
    end = t.load(ends, every)
    count = end - t.load(ends, t.span(-1, experts))
    # Half a row keeps the quotient away from whole numbers, where fp32 would have to be exact: up
    # to 2^22 rows it is cut off to the right one.
    tiles = (((count + (rows - 1)).cast(t.FP32) + 0.5) * (1.0 / rows)).cast(t.INT32)
    upto = t.cumsum(tiles, "experts")
    own = t.coordinate("tiles", LISTED, block * LISTED)
    before = own >= upto
    expert = t.sum_along(t.where(before, t.full(1, t.INT32, experts=experts), 0), "experts")
    begin = t.sum_along(t.where(before, count, 0), "experts")
    tile = own - t.sum_along(t.where(before, tiles, 0), "experts")
    last = t.min_along(t.where(before, 1 << 30, end), "experts")
    at = t.span(block * LISTED, LISTED, "tiles")
    none = expert >= experts
    each: t.Tile | int = rows
    if even:
        parts = t.maximum(tiles, 1)
        share = (((count + parts).cast(t.FP32) - 0.5) / parts.cast(t.FP32)).cast(t.INT32)
        share = ((share + (EVEN - 1)).cast(t.FP32) * (1.0 / EVEN)).cast(t.INT32) * EVEN
        mine = t.coordinate("experts", experts).equals(expert)
        each = t.sum_along(t.where(mine, share, 0), "experts")
        last = t.minimum(last, begin + (tile + 1) * each)
    first = begin + tile * each
    for place, found in enumerate((t.minimum(expert, experts - 1), first, last)):
        t.store(tasks, at, place, tile=t.where(none, 0, found))


def work_schedule(experts: int) -> SimtSchedule:
    """A warp a task, all of a block's experts over its lanes."""
    lanes = min(32, 1 << max(0, experts - 1).bit_length())
    return SimtSchedule("tasks", 128, lanes, 1, LaunchPlan(persistent=False, dependent=True))


def grouped_policy(
    config: GroupedConfig,
    depth: int = 4,
    plan: LaunchPlan | None = None,
    registers: tuple[int, int] | None = None,
) -> Policy:
    """Load-compute-finish."""
    plan = plan or LaunchPlan(supergroup=8, store_panels=1, dependent=True)
    side = "n" if config.widths else "m"
    groups = config.tile[side == "n"] // ROWS_PER_GROUP
    groups = groups if groups < 4 else 2
    plan = plan.with_options(split=side if groups > 1 else "")
    order = "lcsf-early" if config.promoted else "inflight"
    order = "lcsf-behind" if config.products_in_flight > 1 else order
    return Policy(order, plan, groups, depth, registers=registers, vectors=config.brought)
