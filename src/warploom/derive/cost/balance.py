"""Balance: how much memory or reuse a machine asks for."""

from __future__ import annotations

from warploom.derive.cost.gpu import element_bytes
from warploom.errors import InputError


def balance(rate_bytes: float, flops: float, dtype: str) -> float:
    """r = values per FLOP that the rate sustains at peak compute."""
    return rate_bytes / element_bytes(dtype) / flops


def least_memory(r: float) -> float:
    """Least on-chip values for a large matmul to be compute-bound: r^-2."""
    return r**-2


def least_depth(r: float, capacity: float = float("inf")) -> float:
    """Least contraction length b: 1/(2(r - M^(-1/2))). Raises `InputError` when M is too small."""
    spare = r - (capacity**-0.5 if capacity != float("inf") else 0.0)
    if spare <= 0:
        raise InputError(
            f"no contraction is long enough at M = {capacity:.0f} values: "
            f"at least {least_memory(r):.0f} are needed"
        )
    return 1 / (2 * spare)
