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

from warploom.autosched.named import multistage
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    FP32,
    INT32,
    Array,
    DType,
    Index,
    Program,
    Tile,
    array,
    cdiv,
    coordinate,
    cumsum,
    full,
    grid,
    load,
    loop,
    maximum_index,
    min_along,
    minimum,
    minimum_index,
    read,
    silu,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)

SCALED = 128  # elements that a block scale is for, along each axis
STEP_BYTES = 128  # of k in a step
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
    """

    dtype: DType = BF16
    out: DType = BF16
    groups: str = "none"
    scales: str = "none"
    b: str = "nk"
    swiglu: bool = False
    tile: tuple[int, int] = (128, 128)
    promote: bool = False
    products_in_flight: int = 1

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
        if self.scales == "blocks" and SCALED % self.tile[1]:
            raise InputError(
                f"grouped gemm tile of {self.tile[1]} columns with block scales: expected a "
                f"divisor of {SCALED}"
            )
        together = self.products_in_flight
        if together < 1 or (together > 1 and (not self.promoted or self.swiglu)):
            raise InputError(
                f"grouped gemm products_in_flight={together}: expected >= 1, and 1 unless promoted "
                "or with swiglu"
            )

    @property
    def promoted(self) -> bool:
        """Whether products are summed outside of the tensor core."""
        return self.promote or self.scales == "blocks"

    @property
    def step(self) -> int:
        """Elements of k in a step."""
        return STEP_BYTES // self.dtype.bytes

    @property
    def arrays(self) -> dict[str, Array]:
        """The parameters of the program."""
        experts = "" if self.groups == "none" else "experts "
        masked = "experts " if self.groups == "masked" else ""
        columns = "columns" if self.swiglu else "n"
        order = " ".join(columns if axis == "n" else axis for axis in self.b)
        found = {
            "a": array(self.dtype, f"{masked}m k"),
            "b": array(self.dtype, experts + order),
        }
        if self.groups == "rows":
            found["tasks"] = array(INT32, "tiles three")
        if self.groups == "masked":
            found["lengths"] = array(INT32, "experts")
        if self.scales == "rows":
            found["scale_a"] = array(FP32, f"{masked}m")
            found["scale_b"] = array(FP32, experts + columns)
        if self.scales == "blocks":
            found["scale_a"] = array(FP32, f"{masked}depth m")
            found["scale_b"] = array(FP32, f"{experts}wide depth")
        return {**found, "c": array(self.out, f"{masked}m n")}


def grouped(config: GroupedConfig) -> Program:
    """The product of every expert's rows with its weights."""
    return trace(_grouped, config.arrays, name="grouped_gemm", config=config)


@dataclass(frozen=True)
class _Task:
    """Where a task's tile is: leading indices of a and of b, its rows and its columns, and how many
    steps it takes."""

    of_a: tuple[Index, ...]
    of_b: tuple[Index, ...]
    first: Index
    stop: Index | None
    column: Index
    steps: Index


def _task(config: GroupedConfig, rest: dict[str, Array]) -> _Task:
    bm, bn = config.tile
    steps = cdiv(size("k"), config.step)
    rows, columns = cdiv(size("m"), bm), cdiv(size("n"), bn)
    if config.groups == "none":
        m, n = grid(m=rows, n=columns)
        return _Task((), (), m * bm, None, n * bn, steps)
    if config.groups == "masked":
        expert, m, n = grid(experts=size("experts"), m=rows, n=columns)
        stop = minimum_index(read(rest["lengths"], expert), size("m"))
        live = minimum_index(maximum_index(stop - m * bm, 0), 1)
        return _Task((expert,), (expert,), m * bm, stop, n * bn, steps * live)
    tile, n = grid(tiles=size("tiles"), n=columns)
    expert, first, stop = (read(rest["tasks"], tile, part) for part in range(3))
    live = minimum_index(maximum_index(stop - first, 0), 1)
    return _Task((), (expert,), first, stop, n * bn, steps * live)


def _grouped(a: Array, b: Array, c: Array, config: GroupedConfig, **rest: Array) -> None:
    bm, bn = config.tile
    task = _task(config, rest)
    rows, cols = span(task.first, bm, "m"), span(task.column, bn, "n")
    sums = [zeros(m=bm, n=bn) for _ in range(1 + config.swiglu)]
    together = config.products_in_flight
    of_b = _scales_of_b(config, task, 0, rest)
    for i in loop((task.steps + (together - 1)) // together):
        # Read an iteration ahead, so that they have arrived when they are wanted.
        ahead = _scales_of_b(config, task, i + 1, rest)
        products: list[Tile] = []
        factors: list[Tile] = []
        for part in range(together):
            depth = span((i * together + part) * config.step, config.step)
            at = load(a, *task.of_a, rows, depth)
            for half in range(len(sums)):
                own = span(task.column + half * size("n"), bn, "n")
                sides = (own, depth) if config.b == "nk" else (depth, own)
                product = at @ load(b, *task.of_b, *sides)
                if not config.promoted:
                    sums[half] += product
                    continue
                products.append(product)
                if of_b and not factors:  # made while the first product runs
                    factors = _factors(config, task, i, of_b, rest)
        for number, product in enumerate(products):
            acc = sums[number % len(sums)]
            acc[:] = acc + (product * factors[number] if factors else product)
        for scale, following in zip(of_b, ahead, strict=True):
            scale[:] = following
    results = [_by_rows(config, acc, half, task, rest) for half, acc in enumerate(sums)]
    out = silu(results[0]) * results[1] if config.swiglu else results[0]
    kept = span(task.first, bm, "m", stop=task.stop)
    store(c, *task.of_a, kept, cols, tile=out.cast(config.out))


def _scales_of_b(
    config: GroupedConfig, task: _Task, i: Index | int, rest: dict[str, Array]
) -> list[Tile]:
    """The block scales of b for the products of an iteration."""
    if config.scales != "blocks":
        return []
    together = config.products_in_flight
    return [
        load(
            rest["scale_b"],
            *task.of_b,
            (task.column + half * size("n")) // SCALED,
            i * together + part,
        )
        for part in range(together)
        for half in range(1 + config.swiglu)
    ]


def _factors(
    config: GroupedConfig, task: _Task, i: Index, of_b: list[Tile], rest: dict[str, Array]
) -> list[Tile]:
    """The factors of the products of an iteration, one a row."""
    rows = span(task.first, config.tile[0], "m")
    found: list[Tile] = []
    for part in range(config.products_in_flight):
        of_a = load(rest["scale_a"], *task.of_a, i * config.products_in_flight + part, rows)
        found += [of_a * of_b[len(found) + half] for half in range(1 + config.swiglu)]
    return found


def _by_rows(
    config: GroupedConfig, acc: Tile, half: int, task: _Task, rest: dict[str, Array]
) -> Tile:
    """Sums times the scales of their rows and columns."""
    if config.scales != "rows":
        return acc
    bm, bn = config.tile
    own = span(task.column + half * size("n"), bn, "n")
    scaled = acc * load(rest["scale_a"], *task.of_a, span(task.first, bm, "m"))
    return scaled * load(rest["scale_b"], *task.of_b, own)


def work_list(experts: int, rows: int) -> Program:
    """The task of every tile of `rows` rows, from `ends: [experts]`, the row after each expert's
    last: `tasks: [tiles, 3]`. No tile has rows of two experts; tasks beyond the last have no rows.

    There is room for all with ceil(m / rows) + experts tiles.
    """
    arrays = {"ends": array(INT32, "experts"), "tasks": array(INT32, "tiles three")}
    return trace(_work_list, arrays, name="work_list", experts=experts, rows=rows)


def _work_list(ends: Array, tasks: Array, experts: int, rows: int) -> None:
    (block,) = grid(tiles=cdiv(size("tiles"), LISTED))
    every = span(0, experts)
    end = load(ends, every)
    count = end - load(ends, span(-1, experts))
    # Half a row keeps the quotient away from whole numbers, where fp32 would have to be exact: up
    # to 2^22 rows it is cut off to the right one.
    tiles = (((count + (rows - 1)).cast(FP32) + 0.5) * (1.0 / rows)).cast(INT32)
    upto = cumsum(tiles, "experts")
    own = coordinate("tiles", LISTED, block * LISTED)
    before = own >= upto
    expert = sum_along(where(before, full(1, INT32, experts=experts), 0), "experts")
    begin = sum_along(where(before, count, 0), "experts")
    tile = own - sum_along(where(before, tiles, 0), "experts")
    last = min_along(where(before, 1 << 30, end), "experts")
    at = span(block * LISTED, LISTED, "tiles")
    none = expert >= experts
    first = begin + tile * rows
    for place, found in enumerate((minimum(expert, experts - 1), first, last)):
        store(tasks, at, place, tile=where(none, 0, found))


def work_schedule(experts: int) -> SimtSchedule:
    """A warp a task, all of a block's experts over its lanes."""
    lanes = min(32, 1 << max(0, experts - 1).bit_length())
    return SimtSchedule("tasks", 128, lanes, 1, LaunchPlan(persistent=False, dependent=True))


def grouped_schedule(
    config: GroupedConfig,
    depth: int = 4,
    plan: LaunchPlan | None = None,
    vectors: bool = True,
    registers: tuple[int, int] | None = None,
) -> KernelSchedule:
    """Load-compute-finish; with `vectors` the producer brings the scales of a's rows beside its
    blocks, which takes a pitch of 16 bytes."""
    plan = plan or LaunchPlan(supergroup=8, store_panels=1, dependent=True)
    groups = config.tile[0] // ROWS_PER_GROUP
    plan = plan.with_options(split="m" if groups > 1 else "")
    return multistage(
        grouped(config), depth, plan, groups, int(not config.promoted), registers, config.promoted,
        vectors=config.scales == "blocks" and vectors,
    )  # fmt: skip
