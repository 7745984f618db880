"""Matrix multiply with a fused epilogue: c = f(a b * scale + bias) * gate + residual.

Arrays are row-major in the order of their dimension names: `a: [batch, m, k]` or `[batch, k, m]`,
`b: [batch, k, n]` or `[batch, n, k]`, so the four transposes are four declarations of one program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from warploom import tile as t
from warploom.autosched.plans import ADDED
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.rewrites.accumulators import cluster_reduce, share_of, swap_operands
from warploom.rewrites.early_factors import load_factors_early
from warploom.rewrites.split_sums import Split, split_sums


def _identity(x: t.Tile) -> t.Tile:
    return x


ACTIVATIONS: dict[str, Callable[[t.Tile], t.Tile]] = {
    "none": _identity,
    "relu": t.relu,
    "leaky_relu": t.leaky_relu,
    "gelu": t.gelu,
    "gelu_tanh": t.gelu_tanh,
    "silu": t.silu,
}


@dataclass(frozen=True)
class GemmConfig:
    """What is static in a GEMM: element types, storage orders, epilogue and the task's tile.

    `a` and `b` are "mk" or "km", "kn" or "nk"; `tile` is (m, n, k) in elements.
    scales    factors of a and b as one fp32 each in device memory (fp8 per-tensor scaling)
    row_scales  factors of every row of a and of every column of b instead
    gate      multiply the activation by an array [m, n]
    dual      multiply it by a b2 instead: silu gives the SwiGLU of a gated feed-forward layer
    promote   every k step is summed outside of the tensor core, whose fp8 sums keep 14 bits
    products_in_flight  promoted products that are started together, so that the sums of one are
              added while the others run
    slices    the contracted axis is cut into so many tasks, whose fp32 sums `combine` adds up
    in_cluster  the slices of a tile form a cluster and add up their sums there: one kernel and no
              workspace
    swap_ab   multiply b^T a^T: then m lies over the columns of the tensor core's results, so the
              tile's m may be any multiple of 8 (and n a multiple of 64), not the other way round
    """

    dtype: t.DType = t.BF16
    out: t.DType = t.BF16
    a: str = "mk"
    b: str = "kn"
    batched: bool = False
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    scale: float = 1.0
    scales: bool = False
    row_scales: bool = False
    gate: bool = False
    dual: bool = False
    promote: bool = False
    products_in_flight: int = 1
    slices: int = 1
    in_cluster: bool = False
    swap_ab: bool = False
    tile: tuple[int, int, int] = (128, 256, 64)

    def __post_init__(self) -> None:
        """Refuse orders and activations that do not exist, and what slices cannot do."""
        if self.a not in ("mk", "km") or self.b not in ("kn", "nk"):
            raise InputError(f"gemm a={self.a!r} b={self.b!r}: expected mk|km and kn|nk")
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"gemm activation={self.activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )
        if self.products_in_flight < 1 or (
            self.products_in_flight > 1 and (not self.promote or self.dual)
        ):
            raise InputError(
                f"gemm products_in_flight={self.products_in_flight}: expected >= 1, and 1 unless "
                "promoted"
            )
        if self.slices < 1 or (self.slices > 1 and (self.batched or self.dual)):
            raise InputError(f"gemm slices={self.slices}: expected >= 1, and 1 if batched or dual")
        if self.row_scales and (self.scales or self.batched):
            raise InputError("gemm row_scales=True: expected neither scales nor batched")
        if self.in_cluster and self.slices < 2:
            raise InputError(f"gemm in_cluster=True with {self.slices} slice: expected at least 2")

    @property
    def share(self) -> int:
        """Columns (of m under swap_ab) of the sum that one of the slices of a cluster finishes."""
        return share_of(self.tile[0 if self.swap_ab else 1], self.slices)

    @property
    def workspace(self) -> bool:
        """Whether sums go through memory, from this kernel to `combine`."""
        return self.slices > 1 and not self.in_cluster

    @property
    def epilogue(self) -> dict[str, t.Array]:
        """The arrays that the epilogue reads."""
        lead = "batch " if self.batched else ""
        along = ("m", "n") if self.row_scales else ("one", "one")
        found = {f"scale_{x}": t.array(t.FP32, axis) for x, axis in zip("ab", along, strict=True)}
        specs = found if self.scales or self.row_scales else dict[str, t.Array]()
        if self.bias:
            specs["bias"] = t.array(t.FP32, "n")
        for name in ("gate", "residual"):
            if getattr(self, name):
                specs[name] = t.array(self.out, lead + "m n")
        return specs

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of the program."""
        lead = "batch " if self.batched else ""
        specs = {
            "a": t.array(self.dtype, lead + " ".join(self.a)),
            "b": t.array(self.dtype, lead + " ".join(self.b)),
        }
        if self.dual:
            specs["b2"] = specs["b"]
        if self.workspace:
            return {**specs, "parts": t.array(t.FP32, "slices m n")}
        return {**specs, **self.epilogue, "c": t.array(self.out, lead + "m n")}


def gemm(config: GemmConfig | None = None) -> t.Program:
    """The tile program of a GEMM: the textbook, and what the configuration makes of it by the rules
    of `warploom.rewrites`; with slices in memory, of the sums that `combine` adds up."""
    chosen = config or GemmConfig()
    program = _split(chosen).first if chosen.workspace else _textbook(chosen)
    if chosen.swap_ab:
        program = swap_operands(program)
    if chosen.in_cluster:
        program = cluster_reduce(program, chosen.slices, chosen.share)
    return program if chosen.workspace else load_factors_early(program)


def combine(config: GemmConfig) -> t.Program:
    """The second half of a GEMM in slices: add up the sums in order, then the epilogue."""
    return _split(config).second


def _split(config: GemmConfig) -> Split:
    return split_sums(_textbook(config), config.slices, ADDED)


def _textbook(config: GemmConfig) -> t.Program:
    whole = replace(config, slices=1, in_cluster=False)
    return t.trace(_gemm, whole.arrays, name="gemm", config=whole)


def _gemm(
    a: t.Array, b: t.Array, config: GemmConfig, b2: t.Array | None = None, **rest: t.Array
) -> None:
    bm, bn, bk = config.tile
    tiles = {"m": t.cdiv(t.size("m"), bm), "n": t.cdiv(t.size("n"), bn)}
    lead = {"batch": t.size("batch")} if config.batched else {}
    *outer, m, n = t.grid(**lead, **tiles)
    rows, cols = t.span(m * bm, bm), t.span(n * bn, bn)
    acc, acc2 = t.zeros(m=bm, n=bn), t.zeros(m=bm, n=bn)
    for i in t.loop(t.cdiv(t.size("k"), bk * config.products_in_flight)):
        products: list[t.Tile] = []
        for part in range(config.products_in_flight):
            depth = t.span((i * config.products_in_flight + part) * bk, bk)
            at = t.load(a, *outer, *((rows, depth) if config.a == "mk" else (depth, rows)))
            sides = (*outer, *((depth, cols) if config.b == "kn" else (cols, depth)))
            products.append(at @ t.load(b, *sides))
            if not config.promote:
                acc += products[-1]
            if b2 is not None:
                acc2 += at @ t.load(b2, *sides)
        if config.promote:
            for product in products:
                acc[:] = product + acc
    _finish(config, acc, (*outer, rows, cols), rest, None if b2 is None else acc2)


def _finish(
    config: GemmConfig,
    acc: t.Tile,
    at: tuple[Any, ...],
    rest: dict[str, t.Array],
    acc2: t.Tile | None = None,
) -> None:
    """The epilogue on fp32 sums, and the store."""
    result = acc * config.scale if config.scale != 1.0 else acc
    if config.scales:
        result = result * (t.load(rest["scale_a"], 0) * t.load(rest["scale_b"], 0))
    if config.row_scales:
        result = result * t.load(rest["scale_a"], at[-2]) * t.load(rest["scale_b"], at[-1])
    if config.bias:
        result = result + t.load(rest["bias"], at[-1])
    result = ACTIVATIONS[config.activation](result)
    if acc2 is not None:
        result = result * acc2
    if config.gate:
        result = result * t.load(rest["gate"], *at).cast(t.FP32)
    if config.residual:
        result = result + t.load(rest["residual"], *at).cast(t.FP32)
    t.store(rest["c"], *at, tile=result.cast(config.out))


def default_policy(config: GemmConfig) -> Policy:
    """Load-compute-finish with one matmul in flight; pairs of blocks share b, 8 rows a super-group.

    cuBLAS picks the same shape on this GPU (nvjet 128x256_64x4, 1x2 cluster, cooperative). Slices
    that are added up in a cluster form the cluster instead, and store from registers.
    """
    launch = LaunchPlan(split="n" if config.swap_ab else "m", cluster=("m_tile", 2), supergroup=8)
    if config.swap_ab:
        launch = launch.with_options(store_panels=1, store_rows=40)
    if config.in_cluster:
        cluster = ("slices_tile", config.slices)
        launch = launch.with_options(cluster=cluster, store="direct")
    registers = (40, 232) if config.swap_ab or config.slices > 1 else None
    depth = 3 if config.in_cluster else 4
    return Policy("inflight", launch, groups=2, depth=depth, registers=registers)
