"""Which GEMM variant a shape gets: a table of variants, a family of them, and a time model.

The model (`gemm_variant`) has constants of the machine and none of a shape: `bench/fit_gemm.py`
fits them to measured rows, and says what the choice for each measured shape would lose if that
shape's own rows had been left out. A measured shape may be a test of the chooser, never its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import (
    CONSTANTS,
    CONSTANTS_FILE,
    SHARED_REGISTERS,
    SMS,
    Constants,
    GemmChoice,
    read_constants,
    swap_ab,
)

__all__ = [
    "CONSTANTS",
    "CONSTANTS_FILE",
    "GEMM_CHOICES",
    "SHARED_REGISTERS",
    "SMS",
    "TIE",
    "TRANSPOSED",
    "Constants",
    "GemmChoice",
    "choose_gemm",
    "default_gemm",
    "gemm_choice",
    "preferred",
    "read_constants",
]

TIE = 1.01  # times that close are taken as equal: repeated measurements differ by more
FOLLOWS = 0.25  # share of its own power that a kernel's clock follows: 1 alone, 0 among others
LONG = 150.0  # microseconds from which on power is said to count
ALONE = ("", 1)  # no cluster


def _two_per_sm(
    name: str, tile: tuple[int, int], depth: int, dependent: bool = False
) -> GemmChoice:
    # Two blocks of one compute group on an SM: one's epilogue beside the other's matmuls.
    return GemmChoice(name, tile, ALONE, depth, 1, 1, 8, dependent, 2)


def _cluster_reduce(
    name: str, tile: tuple[int, int], slices: int, depth: int, groups: int = 2
) -> GemmChoice:
    # The slices of a tile are a cluster and add up among themselves.
    cluster = ("slices_tile", slices)
    return GemmChoice(
        name, tile, cluster, depth, groups, 1, dependent=True, slices=slices, in_cluster=True
    )


# In the order of preference where predictions tie: multiplies for a byte copied.
GEMM_CHOICES: tuple[GemmChoice, ...] = (
    GemmChoice("128x256", (128, 256)),
    GemmChoice("128x256-at-once", (128, 256), depth=3, panels=4),
    GemmChoice("256x128", (256, 128), panels=1),
    GemmChoice("256x128-along-n", (256, 128), ("n_tile", 2), panels=1),
    GemmChoice("128x192", (128, 192)),
    GemmChoice("128x192-at-once", (128, 192), panels=3),
    GemmChoice("256x128-along-n-at-once", (256, 128), ("n_tile", 2), depth=3, panels=2),
    GemmChoice("128x384", (128, 384), depth=3, panels=2),
    GemmChoice("128x320-direct", (128, 320), store="direct"),
    GemmChoice("256x192-along-n-direct", (256, 192), ("n_tile", 2), store="direct"),
    GemmChoice("128x320-by-4", (128, 320), ("m_tile", 4), 3, panels=3),
    GemmChoice("128x384-by-4", (128, 384), ("m_tile", 4), 3, panels=2),
    GemmChoice("128x256-at-once-by-4", (128, 256), ("m_tile", 4), 3, panels=4),
    GemmChoice("128x192-at-once-by-4", (128, 192), ("m_tile", 4), panels=3),
    GemmChoice("256x192-along-n", (256, 192), ("n_tile", 2), depth=3, panels=1),
    GemmChoice("128x128", (128, 128), depth=6),
    GemmChoice("192x256", (192, 256), depth=3, groups=3, supergroup=6),
    GemmChoice("192x256-along-n", (192, 256), ("n_tile", 2), 3, 3, supergroup=12),
    GemmChoice("192x176", (192, 176), groups=3, panels=1),
    GemmChoice("192x176-along-n", (192, 176), ("n_tile", 2), groups=3, panels=1),
    GemmChoice("192x200", (192, 200), depth=3, groups=3),
    GemmChoice("192x200-along-n", (192, 200), ("n_tile", 2), 3, 3),
    GemmChoice("128x128-ahead", (128, 128), depth=3, panels=1, products_in_flight=2),
    GemmChoice("192x128-along-n", (192, 128), ("n_tile", 2), 5, 3, 1),
    GemmChoice("128x256-by-4", (128, 256), ("m_tile", 4)),
    GemmChoice("128x192-by-4", (128, 192), ("m_tile", 4)),
    GemmChoice("128x64-by-4", (128, 64), ("n_tile", 4), depth=8, panels=1, dependent=True),
    GemmChoice("128x64", (128, 64), ("n_tile", 2), depth=8, panels=1),
    GemmChoice("64x128-by-4", (64, 128), ("m_tile", 4), 8, groups=1, panels=1),
    GemmChoice("64x128-by-8", (64, 128), ("m_tile", 8), 8, groups=1, panels=1),
    _two_per_sm("128x128-pair", (128, 128), 3),
    _two_per_sm("128x128-pair-dependent", (128, 128), 3, True),
    _two_per_sm("64x128-pair", (64, 128), 4, True),
    _two_per_sm("128x64-pair", (128, 64), 4, True),
    _two_per_sm("64x64-pair", (64, 64), 6, True),
    GemmChoice("128x64-alone", (128, 64), ALONE, 8, panels=1, dependent=True),
    GemmChoice("128x128-alone", (128, 128), ALONE, 6, dependent=True),
    GemmChoice("64x256-alone", (64, 256), ALONE, 4, 1, 1, dependent=True),
    GemmChoice("slices8-by-2-two-panels", (128, 128), depth=6, dependent=True, slices=8),
    GemmChoice("slices7-by-4", (128, 128), ("m_tile", 4), 6, 2, 1, dependent=True, slices=7),
    GemmChoice("slices8-by-4", (128, 128), ("m_tile", 4), 6, 2, 1, dependent=True, slices=8),
    GemmChoice("slices8-by-2", (128, 128), depth=6, panels=1, dependent=True, slices=8),
    GemmChoice("slices8", (128, 128), ALONE, 6, panels=1, dependent=True, slices=8),
    GemmChoice("slices4", (128, 64), ("n_tile", 2), 8, panels=1, dependent=True, slices=4),
    GemmChoice("slices16-by-4", (128, 256), ("m_tile", 4), dependent=True, slices=16),
    GemmChoice("slices16-by-2", (128, 256), dependent=True, slices=16),
    _cluster_reduce("meet8-64x128", (64, 128), 8, 7, 1),
    _cluster_reduce("meet4-64x128", (64, 128), 4, 7, 1),
    _cluster_reduce("meet4-128x64", (128, 64), 4, 7),
    _cluster_reduce("meet4-64x64", (64, 64), 4, 8, 1),
    _cluster_reduce("meet6-64x64", (64, 64), 6, 8, 1),
    _cluster_reduce("meet2-64x64", (64, 64), 2, 8, 1),
)


def _tiles() -> tuple[GemmChoice, ...]:
    found: list[GemmChoice] = []
    for n in (256, 192, 128):
        sides = range(LEAST_SIDE, MOST_SIDE + 1, 8)
        found += [swap_ab(m, n, axis) for m in sides for axis in ("n_tile", "m_tile")]
    return tuple(choice for choice in found if choice.fits(GemmConfig()))


LEAST_SIDE, MOST_SIDE = 64, 384  # m of the family's tiles
# Tiles of the transposed product, of any m that is a multiple of 8: some fill whole waves.
TRANSPOSED: tuple[GemmChoice, ...] = _tiles()
NAMED = {choice.name: choice for choice in (*GEMM_CHOICES, *TRANSPOSED)}


def gemm_choice(name: str) -> GemmChoice:
    """The variant of that name; raises `InputError` listing those there are."""
    if name in NAMED:
        return NAMED[name]
    names = ", ".join(choice.name for choice in GEMM_CHOICES)
    raise InputError(f"gemm variant {name!r}: expected one of {names}, or MxN-across[-by-m]")


@lru_cache(maxsize=1024)
def choose_gemm(
    m: int,
    n: int,
    k: int,
    base: GemmConfig | None = None,
    batch: int = 1,
    sliced: bool = False,
) -> GemmChoice:
    """Of the table's variants of least predicted cost, to a hundredth, that of least power.

    If no one is, that of the family of transposed products whose cost is. `sliced` admits
    variants of two kernels and a workspace (`program.combine`).
    """
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    config = base or GemmConfig()
    times = [
        (choice.microseconds(config, m, n, k, batch), choice)
        for choice in (*GEMM_CHOICES, *TRANSPOSED)
        if choice.fits(config) and (sliced or not choice.workspace)
    ]
    return preferred(times, config)


def preferred(times: Sequence[tuple[float, GemmChoice]], config: GemmConfig) -> GemmChoice:
    """Of variants with their times the one of least cost; the table's, where they tie with it, and
    of those the one that takes least power.

    Cost is time, and where that is long a share of the power: alone, a kernel at the power limit
    runs as much slower as it takes more power, and beside others at their clock.
    """
    costs = [
        (time * (1.0 + FOLLOWS * (choice.power(config) - 1.0) * (time > LONG)), choice)
        for time, choice in times
    ]
    least, best = min(costs, key=lambda pair: pair[0])
    ties = [choice for cost, choice in costs if cost <= TIE * least and not choice.swap_ab]
    return min(ties, key=lambda choice: choice.power(config), default=best)


def default_gemm(
    m: int, n: int, k: int, base: GemmConfig | None = None, batch: int = 1
) -> tuple[GemmConfig, KernelSchedule]:
    """(configuration, schedule) for a shape; `base` has the element types and the epilogue."""
    chosen = choose_gemm(m, n, k, base, batch)
    config = chosen.config(base or GemmConfig())
    return config, chosen.schedule(config)
