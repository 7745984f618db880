"""Matrix multiply with a fused epilogue: c = f(a b + bias) * scale + residual.

Arrays are row-major in the order of their dimension names: `a: [batch, m, k]` or `[batch, k, m]`,
`b: [batch, k, n]` or `[batch, n, k]`, so the four transposes are four declarations of one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.named import multistage
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    FP32,
    Array,
    DType,
    Program,
    Tile,
    array,
    cdiv,
    gelu,
    grid,
    leaky_relu,
    load,
    loop,
    relu,
    silu,
    size,
    span,
    store,
    trace,
    zeros,
)


def _identity(x: Tile) -> Tile:
    return x


ACTIVATIONS: dict[str, Callable[[Tile], Tile]] = {
    "none": _identity,
    "relu": relu,
    "leaky_relu": leaky_relu,
    "gelu": gelu,
    "silu": silu,
}


@dataclass(frozen=True)
class GemmConfig:
    """What is static in a GEMM: element types, storage orders, epilogue and the task's tile.

    `a` and `b` are "mk" or "km", "kn" or "nk". `tile` is (m, n, k) in elements.
    """

    dtype: DType = BF16
    out: DType = BF16
    a: str = "mk"
    b: str = "kn"
    batched: bool = False
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    scale: float = 1.0
    tile: tuple[int, int, int] = (128, 256, 64)

    def __post_init__(self) -> None:
        """Refuse orders and activations that do not exist."""
        if self.a not in ("mk", "km") or self.b not in ("kn", "nk"):
            raise InputError(f"gemm a={self.a!r} b={self.b!r}: expected mk|km and kn|nk")
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"gemm activation={self.activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def arrays(self) -> dict[str, Array]:
        """The parameters of the program."""
        lead = "batch " if self.batched else ""
        specs = {
            "a": array(self.dtype, lead + " ".join(self.a)),
            "b": array(self.dtype, lead + " ".join(self.b)),
        }
        if self.bias:
            specs["bias"] = array(FP32, "n")
        if self.residual:
            specs["residual"] = array(self.out, lead + "m n")
        return {**specs, "c": array(self.out, lead + "m n")}


def gemm(config: GemmConfig | None = None) -> Program:
    """The tile program of a GEMM."""
    chosen = config or GemmConfig()
    return trace(_gemm, chosen.arrays, name="gemm", config=chosen)


def _gemm(
    a: Array,
    b: Array,
    c: Array,
    config: GemmConfig,
    bias: Array | None = None,
    residual: Array | None = None,
) -> None:
    bm, bn, bk = config.tile
    tiles = {"m": cdiv(size("m"), bm), "n": cdiv(size("n"), bn)}
    if config.batched:
        batch, m, n = grid(batch=size("batch"), **tiles)
        lead = (batch,)
    else:
        m, n = grid(**tiles)
        lead = ()
    rows, cols = span(m * bm, bm), span(n * bn, bn)
    acc = zeros(m=bm, n=bn)
    for i in loop(cdiv(size("k"), bk)):
        depth = span(i * bk, bk)
        at = load(a, *lead, *((rows, depth) if config.a == "mk" else (depth, rows)))
        bt = load(b, *lead, *((depth, cols) if config.b == "kn" else (cols, depth)))
        acc += at @ bt
    result = acc * config.scale if config.scale != 1.0 else acc
    if bias is not None:
        result = result + load(bias, cols)
    result = ACTIVATIONS[config.activation](result)
    if residual is not None:
        result = result + load(residual, *lead, rows, cols).cast(FP32)
    store(c, *lead, rows, cols, tile=result.cast(config.out))


def default_schedule(config: GemmConfig) -> KernelSchedule:
    """Load-compute-finish with one matmul in flight, pairs of blocks sharing b, 8 rows a band.

    cuBLAS picks the same shape on this GPU (nvjet 128x256_64x4, 1x2 cluster, cooperative).
    """
    launch = LaunchPlan(split="m", cluster=("m_tile", 2), supergroup=8)
    return multistage(gemm(config), 4, launch)


def reference(config: GemmConfig, values: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """c in float64; `values` has the arrays of `config`, already in their element types."""
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    a = wide["a"] if config.a == "mk" else np.swapaxes(wide["a"], -1, -2)
    b = wide["b"] if config.b == "kn" else np.swapaxes(wide["b"], -1, -2)
    result = np.matmul(a, b) * config.scale
    if config.bias:
        result = result + wide["bias"]
    result = REFERENCE[config.activation](result)
    return result + wide["residual"] if config.residual else result


Wide = NDArray[np.float64]


def _erf(x: Wide) -> Wide:
    return np.array([math.erf(value) for value in x.ravel()]).reshape(x.shape)


def _silu(x: Wide) -> Wide:
    return x / (1.0 + np.exp(-x))


def _wide_relu(x: Wide) -> Wide:
    return np.maximum(x, 0.0)


def _wide_leaky(x: Wide) -> Wide:
    return np.where(x > 0, x, 0.01 * x)


def _wide_gelu(x: Wide) -> Wide:
    return x * 0.5 * (1.0 + _erf(x * math.sqrt(0.5)))


def _wide_identity(x: Wide) -> Wide:
    return x


REFERENCE: dict[str, Callable[[Wide], Wide]] = {
    "none": _wide_identity,
    "relu": _wide_relu,
    "leaky_relu": _wide_leaky,
    "gelu": _wide_gelu,
    "silu": _silu,
}
