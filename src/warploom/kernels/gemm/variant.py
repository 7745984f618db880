"""Variants of the GEMM kernel; `tuned.toml` has the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from warploom.autosched.points import Point
from warploom.codegen.ir.layout import padded
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.tuned.table import Table
from warploom.kernels.tuned.variant import Template, Variant
from warploom.tile import Program

SWAP = "swap_operands"
WIDE = 40  # registers a thread that loads panels of more arrays, or of more dimensions
BASE_BYTES = 1024  # of shared memory lost to aligning its base, where a block is alone on an SM
BARRIER_BYTES = 512  # of shared memory, at most
PANEL_BYTES = 128  # a panel's share of a row of the result
STEP_BYTES = 128  # a ring step's share of the contracted axis: one swizzle width
PACKED_BYTES = 2  # of an element of a result that leaves through transposed panels
SUM_BYTES = 4  # of an element of the result before it is rounded
# Most registers a thread may take for sums; the epilogue needs the others.
MOST_SUMS = 208  # with one or two compute groups
SUMS_OF_THREE = 128  # with three, whose threads have 160 registers
SUMS_BESIDE = 100  # with three, when the producer takes 40 registers and theirs have 152
MOST_SHARED_SUMS = 128  # in a block that shares its SM
LEAST_ROW = 32  # bytes of a row that the copy engine brings into a matmul's tile
READ_BACK = 32  # registers for a gate or residual that the epilogue reads
GELUS = ("gelu", "gelu_tanh")  # activations that take as long as some steps of k


_program = lru_cache(maxsize=512)(gemm)


def textbook(config: GemmConfig) -> Program:
    """The program before rules and slices."""
    return _program(replace(config, swap_ab=False, slices=1, in_cluster=False))


def configured(base: GemmConfig, point: Point) -> GemmConfig:
    """`base` with the tile, slices and rules of a point; a step of k is 128 bytes, unless the tile
    says so too."""
    known = dict(point.settings)
    m, n, k = (*point.sizes("tile"), STEP_BYTES // base.dtype.bytes)[:3]
    return replace(
        base,
        tile=(m, n, k),
        slices=point.number("slices", point.number("parts", 1)),
        in_cluster="slices" in point.options,
        swap_ab=SWAP in point.rules,
        products_in_flight=int(known.get("products_in_flight", 1)),
    )


def fitted(config: GemmConfig, point: Point) -> Point:
    """A point for a configuration: sums outside of the tensor core end each step, and a thread that
    loads for more arrays, or more dimensions of them, needs more registers."""
    if config.promote and point.order == "inflight":
        point = replace(point, order="lcsf-early")
    told = "registers" in point.options or point.number("resident", 1) > 1
    if (config.dual or config.batched) and not told and _groups(point) > 1:
        point = point.having(f"registers={WIDE}")
    return point


def takes(base: GemmConfig, point: Point) -> bool:
    """Whether the registers of a thread hold every sum, and shared memory two slots."""
    known = {**point.options, **dict(point.settings)}
    if "products_in_flight" in known and (not base.promote or base.dual):
        return False
    if ("slices" in known or "parts" in known) and (base.batched or base.dual):
        return False
    config = configured(base, point)
    bm, bn, _ = config.tile
    if config.a == "km" and bm * config.dtype.bytes < LEAST_ROW:
        return False
    tiles = 1 + base.dual + (config.products_in_flight if base.promote else 0)
    groups = _groups(point)
    sums = tiles * bm * bn // (groups * 128)
    most = MOST_SUMS if point.number("resident", 1) == 1 else MOST_SHARED_SUMS
    if groups > 2:
        most = min(most, SUMS_BESIDE if "registers" in point.options else SUMS_OF_THREE)
    most -= READ_BACK if base.gate or base.residual else 0
    if config.swap_ab and (base.gate or base.residual or base.out.bytes != PACKED_BYTES):
        return False  # a thread would read or write one element at a time
    return sums <= most and most_slots(config, point) >= 2


def most_slots(config: GemmConfig, point: Point) -> int:
    """Slots that shared memory has room for beside the panels on their way out."""
    resident = point.number("resident", 1)
    high, wide, _ = config.tile
    copied = copied_rows(config)
    if config.swap_ab:
        high, wide = wide, high
    width = PANEL_BYTES
    if config.in_cluster:  # each block stores its part of the columns
        width = min(width, config.share * config.out.bytes)
    stored = _groups(point) * point.number("rows", wide) if config.swap_ab else high
    panels = stored * width * point.number("panels", 2) * (point.options.get("store") != "direct")
    aligned = BASE_BYTES if resident == 1 else 0
    free = shared_limit(resident) - BARRIER_BYTES - aligned - panels
    if config.in_cluster:
        free -= SUM_BYTES * high * config.share * config.slices
    slot = (copied[0] + copied[1] * (1 + config.dual)) * STEP_BYTES
    return free // (slot * config.products_in_flight)


def copied_rows(config: GemmConfig) -> tuple[int, int]:
    """Rows of 128 bytes of a and b that a step brings, panels that are not full included."""
    (bm, bn, _), size = config.tile, config.dtype.bytes
    return (
        bm if config.a == "mk" else padded(bm, size),
        padded(bn, size) if config.b == "kn" else bn,
    )


def _groups(point: Point) -> int:
    """Compute groups: one for every 64 rows unless the point says how many."""
    m, n, *_ = point.sizes("tile")
    return point.number("groups", (n if SWAP in point.rules else m) // ROWS_PER_GROUP)


def plan(config: GemmConfig, point: Point) -> LaunchPlan:
    """How the grid is laid over the GPU before the point's options.

    Of a step of 256 bytes two copies ask for the halves at the same time: L2 is not to fetch both
    for each (one row of 28672 x 4096 on an H200: 58.8 and 55.5 us; steps of 128 bytes lose 3 %).
    """
    del point
    halves = config.tile[2] * config.dtype.bytes > STEP_BYTES
    promotion = STEP_BYTES if halves else LaunchPlan.l2_promotion
    return LaunchPlan(split="n" if config.swap_ab else "m", l2_promotion=promotion)


def free(config: GemmConfig) -> Mapping[str, Sequence[str]]:
    """The tiles of the table; where each step's product is added up outside of the tensor core, how
    many of them are started together."""
    found = (dict(one.point.settings)["tile"] for one in GEMM.variants.values())
    known: dict[str, Sequence[str]] = {"tile": tuple(dict.fromkeys(found))}
    if config.promote and not config.dual:
        known["products_in_flight"] = ("1", "2")
    return known


def kinds(config: GemmConfig) -> Sequence[str]:
    """By the width of the elements, and what is summed: two products, or outside of the tensor
    core; 16-bit ones also with gelu behind them. Wider elements take as long for as many bytes."""
    narrow = config.dtype.bits == 8
    leads = [*["dual"] * config.dual, *["8-bit promoted"] * config.promote, *["8-bit"] * narrow]
    gelu = config.activation in GELUS and not leads
    return [*leads, *["16-bit gelu"] * gelu, "16-bit"]


TEMPLATE = Template(
    textbook,
    free,
    configured,
    lambda config, point: _program(config),
    plan,
    fitted,
    takes,
    lambda config, sizes: ({"one": 1, **sizes}, {}),
)
GEMM = Table(Path(__file__).with_name("tuned.toml"), TEMPLATE, kinds, "128x128")


@lru_cache(maxsize=1024)
def choose_gemm(
    m: int, n: int, k: int, base: GemmConfig | None = None, batch: int = 1, sliced: bool = False
) -> Variant:
    """The variant for a shape. `sliced` admits those of two kernels and a workspace
    (`program.combine`)."""
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    sizes = {"m": m, "n": n, "k": k, "batch": batch}
    return GEMM.choose(base or GemmConfig(), sizes, lambda one: sliced or one.whole)
