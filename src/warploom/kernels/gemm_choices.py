"""Which GEMM variant a shape gets: a table of variants and a time model with few constants.

    time  = waves * (k steps * step + epilogue) + start
    step  = longer of the matmul's time and the copies' time, rounded off where they are close
    waves = tasks (clusters) over the places there are, in whole ones

The constants are of the machine, not of shapes: `bench/fit_gemm.py` fits them to the measured rows
of `bench/results/gemm.json`, and says what the choice for each measured shape would lose if that
shape's own rows had been left out. A measured shape may be a test of the chooser, never its table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from warploom.codegen.emit import shared_limit
from warploom.codegen.emit_mma import MOST_COLUMNS
from warploom.codegen.layout import padded
from warploom.codegen.named import multistage
from warploom.codegen.place import ROWS_PER_GROUP
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.kernels.gemm import GemmConfig, gemm

SMS = 132  # streaming multiprocessors of H100 SXM and H200
FASTEST = 1024 / 1980  # microseconds: the tensor cores' cycles for a UNIT's step at 1980 MHz
TIE = 1.01  # times that close are taken as equal: repeated measurements differ by more
BASE_BYTES = 1024  # of shared memory lost to aligning its base, where a block is alone on an SM
BARRIER_BYTES = 512  # of shared memory, at most
PANEL_BYTES = 128  # of a row of the result that are stored together
STEP_BYTES = 128  # of the contracted axis a step of the ring: one swizzle width
SUM_BYTES = 4  # of an element of the result before it is rounded
SECTOR = 32  # bytes: copies of rows that do not begin at one are slow
UNIT = 128 * 256  # elements of the result in the tile that rates and epilogues are counted in
CLUSTERS_OF_FOUR = 32  # that fit the GPU: its processing clusters are not whole fours
SHARPNESS = 6.0  # exponent of the mean that stands for the longer of two times
WIDE_REGISTERS = (40, 232)  # a thread: a producer of so many panels needs more than 24
THREE_REGISTERS = (40, 152)  # the same beside three compute groups
MOST_SUMS = 192  # registers of a thread for sums; the epilogue needs the others
SUMS_OF_THREE = 100  # the same of a thread of three compute groups: ptxas keeps 128 registers
MOST_SHARED_SUMS = 128  # the same of a thread of a block that shares its SM
READ_BACK = 32  # registers for a gate or residual that the epilogue reads
SHARED_REGISTERS = (40, 216)  # a thread: producer, the one compute group of a block that shares
ALONE = ("", 1)  # no cluster
CONSTANTS_FILE = Path(__file__).with_name("data") / "gemm_model.json"


def cdiv(a: int, b: int) -> int:
    """Division rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Constants:
    """What the model knows of the machine; times in microseconds.

    step        matmuls of a step of 128 bytes for a tile of 128 x 256, at the power limit of a GPU
                all of whose SMs are busy
    relief      share of the idle SMs' power that the busy ones get as clock
    aligned     copied rows of 128 bytes a microsecond and SM, from pitches of whole sectors
    ragged      the same from other pitches
    epilogue    of a tile of 128 x 256 that the next tile's loop does not hide
    direct      the same where registers are stored without a way through shared memory
    at_once     the same where every panel of the tile has a slot of its own on the way out
    start       launch, barriers, first copies, last stores
    early       the same where the launch is hidden behind the previous grid
    cluster     more start of a cluster of four
    narrow      matmul time of tiles 64 columns wide, relative: they read more shared memory
    pair        the same of two blocks that share an SM, each with copies of its own
    latency     from the request of a copy to its arrival; a ring has that many slots on the way
    drain       more of every step whose product is waited for and added up in registers
    combine     the second kernel of a sliced GEMM
    summed      bytes of partial sums written and read back a microsecond, whole GPU
    """

    step: float
    relief: float
    aligned: float
    ragged: float
    epilogue: float
    at_once: float
    direct: float
    start: float
    early: float
    cluster: float
    narrow: float
    pair: float
    latency: float
    drain: float
    combine: float
    summed: float


def read_constants(where: Path) -> Constants:
    """The fitted constants; raises `InputError` when the file has other ones."""
    data = json.loads(where.read_text())
    try:
        return Constants(**{name: float(value) for name, value in data["constants"].items()})
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: not the constants of the GEMM time model: {error}") from None


CONSTANTS = read_constants(CONSTANTS_FILE)


@dataclass(frozen=True)
class GemmChoice:
    """A variant: tile (m, n), the grid axis and size of its cluster, ring depth, launch.

    `ahead` is for promoted products only: so many are started together (`GemmConfig.ahead`), from
    rings of their own.
    """

    name: str
    tile: tuple[int, int]
    cluster: tuple[str, int] = ("m_tile", 2)
    depth: int = 4
    groups: int = 2
    panels: int = 2
    supergroup: int = 8
    dependent: bool = False
    resident: int = 1
    slices: int = 1
    together: bool = False
    store: str = "tma"
    across: bool = False
    store_rows: int = 0
    ahead: int = 1

    def config(self, base: GemmConfig) -> GemmConfig:
        """`base` with this tile; a step of k is 128 bytes."""
        tile = (*self.tile, STEP_BYTES // base.dtype.bytes)
        return replace(
            base,
            tile=tile,
            slices=self.slices,
            together=self.together,
            across=self.across,
            ahead=self.ahead,
        )

    def schedule(self, config: GemmConfig) -> KernelSchedule:
        """Load-compute-finish with one matmul in flight, under this launch plan."""
        launch = LaunchPlan(
            split="n" if self.across else "m",
            cluster=self.cluster if self.cluster[1] > 1 else ("", 1),
            supergroup=self.supergroup,
            store_panels=self.panels,
            dependent=self.dependent,
            resident=self.resident,
            store=self.store,
            store_rows=self.store_rows,
        )
        registers = SHARED_REGISTERS if self.resident > 1 else None
        many = self.across or self.ahead > 1 or self.tile[1] > MOST_COLUMNS
        if many or config.dual or config.batched or self.slices > 1:
            registers = registers or (WIDE_REGISTERS if self.groups < 3 else THREE_REGISTERS)
        flying = 0 if config.promote else 1
        depth = min(self.depth, self.most_slots(config))
        return multistage(gemm(config), depth, launch, self.groups, flying, registers)

    def most_slots(self, config: GemmConfig) -> int:
        """Slots that shared memory has room for beside the panels on their way out."""
        bm, bn = self.copied(config)
        high = self.tile[0]
        if self.across:
            high = self.groups * (self.store_rows or high)
        width = PANEL_BYTES
        if self.together:  # each block stores its part of the columns
            width = min(width, self.tile[1] // self.slices * config.out.bytes)
        panels = high * width * self.panels if self.store == "tma" else 0
        aligned = BASE_BYTES if self.resident == 1 else 0
        free = shared_limit(self.resident) - BARRIER_BYTES - aligned - panels
        free -= SUM_BYTES * self.tile[0] * self.tile[1] if self.together else 0
        return free // ((bm + bn * (1 + config.dual)) * STEP_BYTES * self.ahead)

    def store_count(self, element: int) -> int:
        """Panels in which a group stores its part of the tile."""
        bm, bn = self.tile
        if self.across:
            return bn // self.groups // ROWS_PER_GROUP * cdiv(bm, self.store_rows or bm)
        return cdiv(bn * element, PANEL_BYTES)

    def copied(self, config: GemmConfig) -> tuple[int, int]:
        """Rows of 128 bytes of a and b that a step brings, panels that are not full included."""
        (bm, bn), size = self.tile, config.dtype.bytes
        return (
            bm if config.a == "mk" else padded(bm, size),
            padded(bn, size) if config.b == "kn" else bn,
        )

    def fits(self, config: GemmConfig) -> bool:
        """Whether the registers of a thread hold every sum, and shared memory two slots."""
        bm, bn = self.tile
        if self.ahead > 1 and (not config.promote or config.dual):
            return False
        tiles = 1 + config.dual + (self.ahead if config.promote else 0)
        sums = tiles * bm * bn // (self.groups * 128)
        most = MOST_SUMS if self.resident == 1 else MOST_SHARED_SUMS
        most = min(most, SUMS_OF_THREE) if self.groups > 2 else most
        most -= READ_BACK if config.gate or config.residual else 0
        return sums <= most and self.most_slots(config) >= 2

    def microseconds(
        self,
        config: GemmConfig,
        m: int,
        n: int,
        k: int,
        batch: int = 1,
        of: Constants | None = None,
    ) -> float:
        """Predicted time of a launch (of both, for a sliced one)."""
        c = of or CONSTANTS
        (bm, bn), size, blocks = self.tile, config.dtype.bytes, self.cluster[1]
        along = {"m_tile": 1, "n_tile": 1, "": 1} | {self.cluster[0]: blocks}
        rows = cdiv(m, bm * along["m_tile"])
        cols = cdiv(n, bn * along["n_tile"])
        places = CLUSTERS_OF_FOUR * 4 // blocks if blocks > 2 else SMS // blocks
        tasks = rows * cols * batch * self.slices
        steps = cdiv(cdiv(k * size, STEP_BYTES), self.slices)
        a_line = (k if config.a == "mk" else m) * size
        b_line = (n if config.b == "kn" else k) * size
        a_rows, b_rows = self.copied(config)
        copies = a_rows / along["n_tile"] / (c.ragged if a_line % SECTOR else c.aligned)
        copies += b_rows / along["m_tile"] / (c.ragged if b_line % SECTOR else c.aligned)
        waves, together = cdiv(tasks, places), 1
        if self.resident > 1:
            # Blocks of an SM share its rates, and one's stores are hidden by the other's matmuls.
            waves = cdiv(tasks, SMS)
            together = min(self.resident, waves)
        busy = tasks * blocks / (waves * SMS)
        matmul = max(FASTEST, c.step * (1.0 - c.relief * (1.0 - busy))) * bm * bn / UNIT
        matmul *= (c.narrow if bn == 64 else 1.0) * (c.pair if self.resident > 1 else 1.0)
        # One slot is being read, the others are on the way.
        arrival = c.latency / (self.depth * self.ahead * together - 1)
        parts = (matmul, copies, arrival)
        step = sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)
        step += c.drain / self.ahead if config.promote else 0.0
        out = 4 if self.slices > 1 else config.out.bytes
        end = c.at_once if self.store_count(out) <= self.panels else c.epilogue
        end = end if self.store == "tma" else c.direct
        time = waves * (steps * step + end * bm * bn / UNIT / together)
        time += c.early if self.dependent else c.start
        time += c.cluster if blocks > 2 else 0.0
        if self.slices > 1:
            time += c.combine + 8.0 * m * n * self.slices / c.summed
        return time


def _pair(name: str, tile: tuple[int, int], depth: int, dependent: bool = False) -> GemmChoice:
    # Two blocks of one compute group on an SM: one's epilogue beside the other's matmuls.
    return GemmChoice(name, tile, ALONE, depth, 1, 1, 8, dependent, 2)


def _across(
    name: str, tile: tuple[int, int], axis: str, depth: int, rows: int, panels: int = 2
) -> GemmChoice:
    # The transposed product, stored in panels of so many rows.
    return GemmChoice(name, tile, (axis, 2), depth, panels=panels, across=True, store_rows=rows)


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
    _across("152x256-across", (152, 256), "n_tile", 4, 40),
    _across("160x256-across", (160, 256), "m_tile", 4, 32),
    _across("184x256-across", (184, 256), "m_tile", 3, 96),
    _across("288x128-across", (288, 128), "m_tile", 4, 32),
    _across("288x128-across-n", (288, 128), "n_tile", 4, 32),
    _across("200x128-across", (200, 128), "n_tile", 5, 40),
    _across("368x128-across", (368, 128), "n_tile", 3, 64),
    GemmChoice("128x312", (128, 312), depth=3),
    GemmChoice("128x312-direct", (128, 312), store="direct"),
    GemmChoice("192x160", (192, 160), groups=3, panels=1),
    GemmChoice("192x176", (192, 176), groups=3, panels=1),
    GemmChoice("192x192-along-n", (192, 192), ("n_tile", 2), groups=3, panels=1),
    GemmChoice("192x200", (192, 200), depth=3, groups=3),
    GemmChoice("128x128", (128, 128), depth=6),
    GemmChoice("128x128-ahead", (128, 128), depth=3, panels=1, ahead=2),
    GemmChoice("128x256-by-4", (128, 256), ("m_tile", 4)),
    GemmChoice("128x192-by-4", (128, 192), ("m_tile", 4)),
    GemmChoice("128x64-by-4", (128, 64), ("n_tile", 4), depth=8, panels=1, dependent=True),
    GemmChoice("128x64", (128, 64), ("n_tile", 2), depth=8, panels=1),
    GemmChoice("64x128-by-4", (64, 128), ("m_tile", 4), 8, groups=1, panels=1),
    GemmChoice("64x128-by-8", (64, 128), ("m_tile", 8), 8, groups=1, panels=1),
    _pair("128x128-pair", (128, 128), 3),
    _pair("128x128-pair-dependent", (128, 128), 3, True),
    _pair("64x128-pair", (64, 128), 4, True),
    _pair("128x64-pair", (128, 64), 4, True),
    _pair("64x64-pair", (64, 64), 6, True),
    GemmChoice("128x64-alone", (128, 64), ALONE, 8, panels=1, dependent=True),
    GemmChoice("128x128-alone", (128, 128), ALONE, 6, dependent=True),
    GemmChoice("64x256-alone", (64, 256), ALONE, 4, 1, 1, dependent=True),
    GemmChoice("slices4", (128, 64), ("n_tile", 2), 8, panels=1, dependent=True, slices=4),
    GemmChoice("slices8", (128, 128), ALONE, 6, panels=1, dependent=True, slices=8),
    GemmChoice("slices8-by-2", (128, 128), depth=6, panels=1, dependent=True, slices=8),
    GemmChoice("slices8-by-4", (128, 128), ("m_tile", 4), 6, 2, 1, dependent=True, slices=8),
    GemmChoice("slices16-by-2", (128, 256), dependent=True, slices=16),
    GemmChoice("slices16-by-4", (128, 256), ("m_tile", 4), dependent=True, slices=16),
)


def gemm_choice(name: str) -> GemmChoice:
    """The variant of that name; raises `InputError` listing those there are."""
    for choice in GEMM_CHOICES:
        if choice.name == name:
            return choice
    names = ", ".join(choice.name for choice in GEMM_CHOICES)
    raise InputError(f"gemm variant {name!r}: expected one of {names}")


def choose_gemm(
    m: int,
    n: int,
    k: int,
    base: GemmConfig | None = None,
    batch: int = 1,
    sliced: bool = False,
) -> GemmChoice:
    """The first variant of the table whose predicted time is the least, to a hundredth.

    `sliced` admits variants of two kernels and a workspace (`kernels.gemm.combine`).
    """
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    config = base or GemmConfig()
    whole = not sliced or config.batched or config.dual
    allowed = [
        choice
        for choice in GEMM_CHOICES
        if choice.fits(config) and (choice.slices == 1 or not whole)
    ]
    times = [choice.microseconds(config, m, n, k, batch) for choice in allowed]
    return next(c for c, time in zip(allowed, times, strict=True) if time <= TIE * min(times))


def default_gemm(
    m: int, n: int, k: int, base: GemmConfig | None = None, batch: int = 1
) -> tuple[GemmConfig, KernelSchedule]:
    """(configuration, schedule) for a shape; `base` has the element types and the epilogue."""
    chosen = choose_gemm(m, n, k, base, batch)
    config = chosen.config(base or GemmConfig())
    return config, chosen.schedule(config)
