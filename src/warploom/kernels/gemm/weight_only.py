"""GEMM of few rows with 8-bit weights: y = x (w * scale)^T, at the rate at which w is read.

`x: [m, k]` is bf16 or fp16, `w: [n, k]` fp8, `scale: [n]` fp32, `y: [m, n]` like x. The weights are
the first operand: a tile of them is copied to shared memory as it is, made 16 bits wide on the way
into registers, and multiplied by the rows of x, which lie over the tensor core's columns (8 at
least). The scales of a matrix' rows leave the sum: they are factors of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    E4M3,
    FP32,
    Array,
    DType,
    Index,
    Program,
    array,
    cdiv,
    grid,
    load,
    loop,
    minimum_index,
    reduce_scatter,
    size,
    span,
    store,
    trace,
    zeros,
)

PART = 8  # columns of a sum that go to another block of a cluster together
MOST_ROWS = 128  # of x, for which a tile has room
STEP = 128  # elements of k: bytes of a row of weights in a step
SLOTS_BYTES = 176 << 10  # of shared memory for the rings
MOST_SLOTS = 16
SUM_BYTES = 4
SMS = 132


@dataclass(frozen=True)
class WeightOnlyConfig:
    """What is static: `tile` is (rows of w, rows of x) of a task; `slices` of k form a cluster and
    add up their sums."""

    dtype: DType = BF16
    weights: DType = E4M3
    tile: tuple[int, int] = (64, 16)
    slices: int = 1

    def __post_init__(self) -> None:
        """Refuse element types and tiles that no kernel here is for."""
        if self.dtype.bits != 16 or self.weights.bits != 8:
            raise InputError(
                f"weight-only gemm of {self.dtype} by {self.weights}: expected 16 and 8 bits"
            )
        least = PART * max(1, self.slices)
        if self.tile[0] % ROWS_PER_GROUP or self.tile[1] % least or self.slices < 1:
            raise InputError(
                f"weight-only gemm tile={self.tile} slices={self.slices}: expected multiples of "
                f"{ROWS_PER_GROUP} and {least}, and at least one slice"
            )


def weight_only(config: WeightOnlyConfig) -> Program:
    """The product, in slices where the configuration has some."""
    arrays = {
        "x": array(config.dtype, "m k"),
        "w": array(config.weights, "n k"),
        "scale": array(FP32, "n"),
        "y": array(config.dtype, "m n"),
    }
    return trace(_weight_only, arrays, name="weight_only_gemm", config=config)


def _weight_only(x: Array, w: Array, scale: Array, y: Array, config: WeightOnlyConfig) -> None:
    bn, bm = config.tile
    steps = cdiv(size("k"), STEP)
    lead = {"slices": config.slices} if config.slices > 1 else {}
    *part, n, m = grid(**lead, n=cdiv(size("n"), bn), m=cdiv(size("m"), bm))
    each = cdiv(steps, config.slices)
    first: Index | int = part[0] * each if part else 0
    rows, cols = span(n * bn, bn), span(m * bm, bm)
    acc = zeros(n=bn, m=bm)
    for i in loop(first, minimum_index(first + each, steps)):
        depth = span(i * STEP, STEP)
        acc += load(w, rows, depth).cast(config.dtype) @ load(x, cols, depth)
    if part:
        width = bm // config.slices
        acc = reduce_scatter(acc, part[0], config.slices, "m")
        cols = span(m * bm + part[0] * width, width)
    out = acc * load(scale, rows)
    store(y, cols, rows, tile=out.T.cast(config.dtype))


def weight_only_policy(config: WeightOnlyConfig) -> Policy:
    """Rings as deep as fit: what counts is how much of w is on its way."""
    bn, bm = config.tile
    groups = bn // ROWS_PER_GROUP
    slot = STEP * (bn + bm * config.dtype.bytes)
    launch = LaunchPlan(
        split="n" if groups > 1 else "",
        cluster=("slices_tile", config.slices) if config.slices > 1 else ("", 1),
        store="direct",
        dependent=True,
    )
    sums = SUM_BYTES * bn * bm if config.slices > 1 else 0
    depth = min(MOST_SLOTS, (SLOTS_BYTES - sums) // slot)
    return Policy("lcsf-early", launch, groups, depth)


def plan_weight_only(config: WeightOnlyConfig, m: int, n: int) -> WeightOnlyConfig:
    """The configuration for so many rows and columns: a tile with room for the rows, and slices
    where tiles do not fill the GPU."""
    room = next(rows for rows in (16, 32, 64, MOST_ROWS) if m <= rows or rows == MOST_ROWS)
    tiles = -(-n // ROWS_PER_GROUP) * -(-m // room)
    slices = 2 if tiles <= SMS // 2 else 1
    return WeightOnlyConfig(config.dtype, config.weights, (ROWS_PER_GROUP, room), slices)
