"""GEMM of few rows with 8-bit or 4-bit weights: y = x (w * scale)^T, at the rate of reading w.

`x: [m, k]` is bf16 or fp16, `y: [m, n]` like x. `w: [n, k]` is fp8 or int8; with 4 bits `w: [n, k /
2]` is int8, two signed numbers a byte (`pack_nibbles`). The weights are the first operand: a tile
of them is copied to shared memory as it is, made 16 bits wide on the way into registers, and
multiplied by the rows of x, which lie over the tensor core's columns (8 at least).

`scale: [n]` (fp32) leaves the sum: it is a factor of the result. `scale: [k / 128, n]` has a number
for each group of 128 weights of a row: every 128 of k are summed by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.rewrites.accumulators import share_of

PART = 8  # columns of a sum that go to another block of a cluster together
MOST_ROWS = 128  # of x, for which a tile has room
GROUP = (
    128  # weights of a row that have a scale of their own, and that stand in half of the nibbles
)
SLOTS_BYTES = 176 << 10  # of shared memory for the rings
MOST_SLOTS = 16
SUM_BYTES = 4
SMS = 132
FEW = 16  # rows of x, of which a product may run while the next weights are widened
ROOMS = (8, 16, 32, 64, MOST_ROWS)  # of a tile, for rows of x
# Heights of a tile in rows of w, where tiles of 64 are many, and the rows of x that registers of so
# many compute groups have room for.
HEIGHTS = {256: 16, 128: MOST_ROWS}
BUSY = 0.8  # share of the SMs that tiles are to leave busy


@dataclass(frozen=True)
class WeightOnlyConfig:
    """What is static.

    bits     of a weight: 8, or 4 of int8 `weights`
    grouped  there is a scale for each group of 128 weights of a row, not one for all
    tile     (rows of w, rows of x) of a task
    slices   of k form a cluster and add up their sums
    """

    dtype: t.DType = t.BF16
    weights: t.DType = t.E4M3
    bits: int = 8
    grouped: bool = False
    tile: tuple[int, int] = (64, 16)
    slices: int = 1

    def __post_init__(self) -> None:
        """Refuse element types and tiles that no kernel here is for."""
        if self.dtype.bits != 16 or self.weights.bits != 8:
            raise InputError(
                f"weight-only gemm of {self.dtype} by {self.weights}: expected 16 and 8 bits"
            )
        if self.bits != 8 and (self.bits, self.weights) != (4, t.INT8):
            raise InputError(
                f"weight-only gemm of {self.weights} of {self.bits} bits: expected 8, or int8 with "
                "two numbers of 4 bits"
            )
        if self.tile[0] % ROWS_PER_GROUP or self.tile[1] % PART or self.slices < 1:
            raise InputError(
                f"weight-only gemm tile={self.tile} slices={self.slices}: expected multiples of "
                f"{ROWS_PER_GROUP} and {PART}, and at least one slice"
            )

    @property
    def halves(self) -> int:
        """Weights in a byte."""
        return 8 // self.bits

    @property
    def step(self) -> int:
        """Bytes of a row of weights in a step: those of two groups where registers hold them wide,
        as every step waits for its copies, else of one."""
        alone = self.bits == 8 and not self.grouped and self.tile[0] == ROWS_PER_GROUP
        return GROUP << alone

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of the program."""
        return {
            "x": t.array(self.dtype, "m k"),
            "w": t.array(self.weights, "n k" if self.bits == 8 else "n bytes"),
            "scale": t.array(t.FP32, "groups n" if self.grouped else "n"),
            "y": t.array(self.dtype, "m n"),
        }


def pack_nibbles(weights: Any) -> Any:
    """int8 `[n, k]` of -8 to 7, an array of numpy or torch, as `[n, k / 2]`.

    Of every 256 weights of a row, byte j holds number j in its low bits and number 128 + j in its
    high ones. Raises `InputError` for other sizes or values.
    """
    n, k = weights.shape
    least, most = int(weights.min()), int(weights.max())
    if k % (2 * GROUP) or least < -8 or most > 7:
        raise InputError(
            f"packing of weights [{n}, {k}] from {least} to {most}: expected a multiple of "
            f"{2 * GROUP} columns, and numbers from -8 to 7"
        )
    halves = weights.reshape(n, -1, 2, GROUP)
    return ((halves[:, :, 1] << 4) | (halves[:, :, 0] & 15)).reshape(n, k // 2)


def weight_only(config: WeightOnlyConfig) -> t.Program:
    """The product, in slices where the configuration has some."""
    return t.trace(_weight_only, config.arrays, name="weight_only_gemm", config=config)


def _weight_only(
    x: t.Array, w: t.Array, scale: t.Array, y: t.Array, config: WeightOnlyConfig
) -> None:
    bn, bm = config.tile
    steps = t.cdiv(t.size(w.dims[1]), config.step)
    lead = {"slices": config.slices} if config.slices > 1 else {}
    *part, n, m = t.grid(**lead, n=t.cdiv(t.size("n"), bn), m=t.cdiv(t.size("m"), bm))
    each = t.cdiv(steps, config.slices)
    first: t.Index | int = part[0] * each if part else 0
    rows, cols = t.span(n * bn, bn), t.span(m * bm, bm)
    acc = t.zeros(n=bn, m=bm)
    for i in t.loop(first, t.minimum_index(first + each, steps)):
        stored = t.load(w, rows, t.span(i * config.step, config.step, "k"))
        for half, weights in enumerate(_widened(stored, config)):
            group = i * config.halves + half
            inputs = t.load(x, cols, t.span(group * config.step, config.step))
            if config.grouped:
                acc[:] = acc + (weights @ inputs) * t.load(scale, group, rows)
            else:
                acc += weights @ inputs
    if part:
        width = share_of(bm, config.slices)
        acc = t.reduce_scatter(acc, part[0], config.slices, "m", width)
        beyond = part[0] // (bm // width) * t.size("m")  # of blocks that get no part of the sum
        cols = t.span(m * bm + part[0] * width + beyond, width)
    out = acc if config.grouped else acc * t.load(scale, rows)
    t.store(y, cols, rows, tile=out.T.cast(config.dtype))


def _widened(stored: t.Tile, config: WeightOnlyConfig) -> list[t.Tile]:
    """The weights of a step in the type of x, group by group."""
    parts = [stored] if config.bits == 8 else [t.low_nibble(stored), t.high_nibble(stored)]
    return [part.cast(config.dtype) for part in parts]


def weight_only_policy(config: WeightOnlyConfig) -> Policy:
    """Rings as deep as fit: what counts is how much of w is on its way."""
    bn, bm = config.tile
    groups = bn // ROWS_PER_GROUP
    slot = config.step * (bn + bm * config.dtype.bytes * config.halves)
    slot += SUM_BYTES * bn * config.halves * config.grouped  # of scales
    launch = LaunchPlan(
        split="n" if groups > 1 else "",
        cluster=("slices_tile", config.slices) if config.slices > 1 else ("", 1),
        store="direct",
        dependent=True,
        l2_promotion=128,  # x has steps of 256 bytes; up to 3 % less time on an H200
    )
    sums = SUM_BYTES * bn * bm if config.slices > 1 else 0
    depth = min(MOST_SLOTS, (SLOTS_BYTES - sums) // slot)
    order = "inflight" if bm <= FEW else "lcsf"
    return Policy(order, launch, groups, depth, vectors=config.grouped)


def plan_weight_only(config: WeightOnlyConfig, m: int, n: int, k: int) -> WeightOnlyConfig:
    """The configuration for so many rows and columns: a tile with room for the rows, as high as
    leaves most SMs one, and slices where the lowest ones do not fill the GPU.

    What bounds it is widening, so that tiles with more compute groups are faster (28672 columns of
    k 4096 on an H200: 64 rows 51 us, 256 rows 37 us), as long as all SMs have one.
    """
    most = ROOMS[-2] if config.grouped and config.bits == 4 else MOST_ROWS  # registers of products
    low = -(-n // ROWS_PER_GROUP) * -(-m // most)
    slices = 2 if low <= SMS // 2 and k > config.step * config.halves else 1
    room = next((rows for rows in ROOMS if m <= rows <= most), most)
    heights = [rows for rows, widest in HEIGHTS.items() if room <= widest]
    high = next((rows for rows in heights if -(-n // rows) * -(-m // room) >= BUSY * SMS), 0)
    return replace(config, tile=(high or ROWS_PER_GROUP, room), slices=slices)
