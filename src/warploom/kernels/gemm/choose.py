"""Which GEMM variant a shape gets: a table of variants, a family of them, and a time model.

The model (`variant.py`) has constants of the machine and none of a shape: `bench/fit_gemm.py`
fits them to measured rows, and says what the choice for each measured shape would lose without the
rows of that shape. A measured shape may test the chooser; it is never looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import GemmChoice, swap_ab
from warploom.tables import read_variants

TIE = 1.01  # times that close are taken as equal: repeated measurements differ by more
FOLLOWS = 0.25  # share of its own power that a kernel's clock follows: 1 alone, 0 among others
LONG = 150.0  # microseconds from which on power is said to count
GEMM_CHOICES = read_variants(Path(__file__).with_name("variants.toml"), GemmChoice)


def _tiles() -> tuple[GemmChoice, ...]:
    found: list[GemmChoice] = []
    for n in (256, 192, 128):
        sides = range(LEAST_SIDE, MOST_SIDE + 1, 8)
        found += [swap_ab(m, n, axis) for m in sides for axis in ("n_tile", "m_tile")]
    return tuple(choice for choice in found if choice.fits(GemmConfig()))


LEAST_SIDE, MOST_SIDE = 64, 384  # m of the family's tiles
# Tiles of the transposed product, of any m that is a multiple of 8: some fill whole waves.
TRANSPOSED: tuple[GemmChoice, ...] = _tiles()
NAMED = {**GEMM_CHOICES, **{choice.name: choice for choice in TRANSPOSED}}


def gemm_choice(name: str) -> GemmChoice:
    """The variant of that name; raises `InputError` listing those there are."""
    if name in NAMED:
        return NAMED[name]
    names = ", ".join(GEMM_CHOICES)
    raise InputError(f"gemm variant {name!r}: expected one of {names}, or MxN-swap-ab[-by-m]")


@lru_cache(maxsize=1024)
def choose_gemm(
    m: int,
    n: int,
    k: int,
    base: GemmConfig | None = None,
    batch: int = 1,
    sliced: bool = False,
) -> GemmChoice:
    """The variant for a shape: of those in the table whose predicted cost ties with the least, the
    one that takes the least power.

    Where only variants with `swap_ab` have the least cost, it is one of those. `sliced` admits
    variants of two kernels and a workspace (`program.combine`).
    """
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    config = base or GemmConfig()
    times = [
        (choice.microseconds(config, m, n, k, batch), choice)
        for choice in NAMED.values()
        if choice.fits(config) and (sliced or not choice.workspace)
    ]
    return preferred(times, config)


def preferred(times: Sequence[tuple[float, GemmChoice]], config: GemmConfig) -> GemmChoice:
    """The variant of least cost; where some of the table tie with it, the one that takes the least
    power.

    Cost is time; for a long kernel a share of its power counts too. A kernel that runs alone at the
    power limit slows down as it takes more power; one among others runs at their clock.
    """
    costs = [
        (time * (1.0 + FOLLOWS * (choice.power(config) - 1.0) * (time > LONG)), choice)
        for time, choice in times
    ]
    least, best = min(costs, key=lambda pair: pair[0])
    ties = [choice for cost, choice in costs if cost <= TIE * least and not choice.swap_ab]
    return min(ties, key=lambda choice: choice.power(config), default=best)
