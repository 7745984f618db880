"""GEMM in float64 with numpy: what `gemm.program` is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.gemm.program import GemmConfig

Wide = NDArray[np.float64]


def reference(config: GemmConfig, values: dict[str, NDArray[Any]]) -> Wide:
    """c in float64; `values` has the arrays of `config`, already in their element types."""
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    a = wide["a"] if config.a == "mk" else np.swapaxes(wide["a"], -1, -2)

    def product(name: str) -> Wide:
        return np.matmul(a, wide[name] if config.b == "kn" else np.swapaxes(wide[name], -1, -2))

    result = product("b") * config.scale
    if config.scales:
        result = result * (wide["scale_a"][0] * wide["scale_b"][0])
    if config.row_scales:
        result = result * wide["scale_a"][:, None] * wide["scale_b"]
    if config.bias:
        result = result + wide["bias"]
    result = REFERENCE[config.activation](result)
    if config.dual:
        result = result * product("b2")
    if config.gate:
        result = result * wide["gate"]
    return result + wide["residual"] if config.residual else result


def _erf(x: Wide) -> Wide:
    return np.array([math.erf(value) for value in x.ravel()]).reshape(x.shape)


REFERENCE: dict[str, Callable[[Wide], Wide]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1.0 + _erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: (
        x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}
