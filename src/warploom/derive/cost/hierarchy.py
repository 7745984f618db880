"""Several levels of memory: weighted cost, quantisation, caching, forwarding, energy, balance.

Equation and theorem numbers are the paper's (2412.03317v2). A level's weight
is seconds (or joules) per value; H*(M) = Σ_t α_t M^(-β_t) enters as (α, β) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.derive.cost.gpu import Gpu, element_bytes
from warploom.errors import InputError

Terms = Sequence[tuple[float, float]]
"""(α in values, β) of each term of a law."""


@dataclass(frozen=True)
class Level:
    """One memory level: capacity of one unit in bytes and what moving one byte into it costs."""

    name: str
    capacity: float
    cost_per_byte: float


def law_at(terms: Terms, capacity: float) -> float:
    """Σ α M^(-β)."""
    return sum(alpha * capacity**-beta for alpha, beta in terms)


def weighted(terms: Terms, levels: Sequence[Level], dtype: str) -> float:
    """Equations 2 and 3: Σ_t α_t Σ_ℓ cost_ℓ · M_ℓ^(-β_t) · e^(1+β_t), M_ℓ in bytes."""
    size = element_bytes(dtype)
    return sum(
        alpha * level.cost_per_byte * level.capacity**-beta * size ** (1 + beta)
        for alpha, beta in terms
        for level in levels
    )


def machine_number(levels: Sequence[Level], beta: float) -> float:
    """G_β = Σ_ℓ cost_ℓ M_ℓ^(-β): one number for a machine and an exponent; less is better."""
    return sum(level.cost_per_byte * level.capacity**-beta for level in levels)


def quantisation_gain(beta: float, before: str, after: str) -> float:
    """How many times cheaper a term gets: (e/e')^(1+β) (equation 3)."""
    return (element_bytes(before) / element_bytes(after)) ** (1 + beta)


def cached_capacity(child: float, children: int, groups_per_parent: int) -> float:
    """Theorem 2: outputs live in the children, so the parent acts as if it held all of them.

    Raises `InputError` when the parent cannot hold the children of one of its groups at once.
    """
    if groups_per_parent > children:
        raise InputError(
            f"intermediate caching needs all {groups_per_parent} child tiles live at once, the "
            f"level has {children} children: make the parent's group at most {children} tiles"
        )
    return child * children


def forwarded(terms: Terms, child: float, children: int, down: float, across: float) -> float:
    """Theorem 3 (clusters, NVLink): data enters `children` units once and is passed on.

    `down`, `across`: cost per value parent to child, child to child; `child` capacity in values.
    """
    return down * law_at(terms, children * child) + across * (
        law_at(terms, child) - law_at(terms, children * child)
    )


def forwarding_gain(beta: float, children: int, down_rate: float, rate: float) -> float:
    """Share of the β-term saved by a cluster: (1 - down/across)(1 - N^-β), rates in bytes/s."""
    return (1 - down_rate / rate) * (1 - children**-beta)


def best_cluster(beta: float, down_rate: float, rates: Sequence[tuple[int, float]]) -> int:
    """The cluster size with the largest saving; rates are (children, effective rate)."""
    return max(rates, key=lambda item: forwarding_gain(beta, item[0], down_rate, item[1]))[0]


def time_levels(gpu: Gpu) -> tuple[Level, ...]:
    """DRAM filling all SMs' memory (Theorem 2) and L2 filling one: seconds per byte."""
    return (
        Level("dram", gpu.sms * gpu.block_bytes, 1 / gpu.dram_rate),
        Level("l2", gpu.block_bytes, 1 / gpu.l2_rate),
    )


def energy_levels(gpu: Gpu) -> tuple[Level, ...]:
    """The same levels in joules per byte."""
    return (
        Level("dram", gpu.sms * gpu.block_bytes, gpu.joules["dram"]),
        Level("l2", gpu.block_bytes, gpu.joules["l2"]),
    )


# --- balance: how much memory or reuse a machine asks for -----------------------------------------


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


def break_even_rows(gpu: Gpu, dtype: str, rate: float | None = None) -> float:
    """Query rows a group needs so that streaming keys hides behind compute, without caching.

    A row spends 4·d FLOP on each key whose K and V bring 2·d values.
    """
    return gpu.flops(dtype) * element_bytes(dtype) / 2 / (rate or gpu.dram_rate)
