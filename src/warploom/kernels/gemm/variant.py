"""A variant of the GEMM kernel, and the time it will take: a model with few constants.

    time  = waves * (k steps * step + epilogue) + start
    step  = the longer of the matmul's and the copies' time, with a smooth maximum
    waves = tasks (clusters) over the clusters that run at a time, rounded up

The constants describe the machine, not shapes: `bench/fit_gemm.py` fits them to the measured rows
of `bench/results/gemm.json`. `Constants` says what each means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from warploom.autosched.named import multistage
from warploom.codegen.analysis.matmuls import MOST_COLUMNS
from warploom.codegen.ir.layout import padded
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.machine import load

H200 = load("h200")  # where the constants were measured
SMS = H200.integer("sm.count")
FASTEST = 1024 / H200.value("clock.boost")  # microseconds: tensor-core cycles of a UNIT's step
BASE_BYTES = 1024  # of shared memory lost to aligning its base, where a block is alone on an SM
BARRIER_BYTES = 512  # of shared memory, at most
PANEL_BYTES = 128  # a panel's share of a row of the result
STEP_BYTES = 128  # a ring step's share of the contracted axis: one swizzle width
MOST_SLOTS = 6  # of a ring; with steps as long as here more slots gain nothing
LEAST_PANEL, HIGHEST_PANEL = 24, 96  # rows of a panel of a transposed tile
PACKED_BYTES = 2  # of an element of a result that leaves through transposed panels
SUM_BYTES = 4  # of an element of the result before it is rounded
SECTOR = 32  # bytes: copies are slow when their rows do not begin at a sector
UNIT = 128 * 256  # elements of the result: rates and epilogues are counted for a tile of that size
READS = 2 * (64 + 256) / UNIT  # rows of operands that wgmmas read for one element of that tile
REQUESTS = (128 + 256 / 2) / UNIT  # rows of operands that a block of a pair asks L2 for, the same
# Size of a cluster -> clusters that run at a time when a block fills an SM.
CLUSTERS = {1: SMS} | {size: H200.integer(f"cluster.resident_{size}") for size in range(2, 9)}
SHARPNESS = 6.0  # exponent of the power mean that smooths the maximum of two times
# Registers a thread as (producer, consumer).
WIDE_REGISTERS = (40, 232)  # a producer of many panels needs more than 24
THREE_REGISTERS = (40, 152)  # such a producer beside three compute groups
SHARED_REGISTERS = (40, 216)  # a block of one compute group that shares its SM
# Most registers a thread may take for sums; the epilogue needs the others.
MOST_SUMS = 192  # with one or two compute groups
SUMS_OF_THREE = 128  # with three, whose threads have 160 registers
SUMS_BESIDE = 100  # with three, when the producer takes 40 registers and theirs have 152
MOST_SHARED_SUMS = 128  # in a block that shares its SM
READ_BACK = 32  # registers for a gate or residual that the epilogue reads
CONSTANTS_FILE = Path(__file__).with_name("model.json")


def cdiv(a: int, b: int) -> int:
    """Division rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Constants:
    """What the model knows of the machine; times in microseconds.

    step        the matmuls of a step of 128 bytes on a tile of 128 x 256, when all SMs are busy and
                the GPU is at its power limit
    operands    the share of power that goes into reading operands from shared memory
    requested   the share that goes into bringing them through L2 and from DRAM. Both shares decide
                between equal times (`power`); kernels that ran alone gave them
                (`bench/gemm_shares.py`)
    relief      the share of the idle SMs' power that the busy SMs get as clock
    aligned     rows of 128 bytes that an SM copies a microsecond, from pitches of whole sectors
    ragged      the same from other pitches
    epilogue    the end of a tile of 128 x 256, as far as the next tile's loop does not hide it
    direct      the same when results are stored straight from registers
    at_once     the same when every panel of the tile has a slot of its own on its way out
    start       launch, barriers, first copies, last stores
    dependent_start  the same when the previous grid hides the launch
    narrow      the factor on the matmuls of tiles 64 columns wide, which read more shared memory
    two_per_sm  the factor on the matmuls of two blocks that share an SM, each with its own copies
    latency     the time from the request of a copy to its arrival; a ring's free slots cover it
    late        the same when a pitch is not one of whole sectors
    cluster_reduce  adding up the slices of a cluster, for a tile of 128 x 256
    drain       the time from the end of a promoted product to the start of the group's next one: a
                wait and additions, beside the products of other groups
    combine     the second kernel of a sliced GEMM
    summed      bytes of partial sums that the GPU writes and reads back a microsecond
    """

    step: float
    operands: float
    requested: float
    relief: float
    aligned: float
    ragged: float
    epilogue: float
    at_once: float
    direct: float
    start: float
    dependent_start: float
    narrow: float
    two_per_sm: float
    latency: float
    late: float
    cluster_reduce: float
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
    """A variant: tile (m, n), cluster (grid axis, blocks), ring depth, compute groups, launch plan.

    `slices`, `in_cluster`, `swap_ab` and `products_in_flight` are as in `GemmConfig`; the others
    that `plan.LaunchPlan` has mean the same there. `products_in_flight` needs a promoted product.
    """

    name: str
    tile: tuple[int, int]
    cluster: tuple[str, int] = ("m_tile", 2)
    depth: int = 4
    groups: int = 2
    store_panels: int = 2
    supergroup: int = 8
    dependent: bool = False
    resident: int = 1
    slices: int = 1
    in_cluster: bool = False
    store: str = "tma"
    swap_ab: bool = False
    store_rows: int = 0
    products_in_flight: int = 1
    allow: tuple[str, ...] = ()

    @property
    def workspace(self) -> bool:
        """Whether it is two kernels and needs memory for the sums of slices."""
        return self.slices > 1 and not self.in_cluster

    def config(self, base: GemmConfig) -> GemmConfig:
        """`base` with this tile; a step of k is 128 bytes."""
        tile = (*self.tile, STEP_BYTES // base.dtype.bytes)
        return replace(
            base,
            tile=tile,
            slices=self.slices,
            in_cluster=self.in_cluster,
            swap_ab=self.swap_ab,
            products_in_flight=self.products_in_flight,
        )

    def schedule(self, config: GemmConfig) -> KernelSchedule:
        """Load-compute-finish with one matmul in flight, under this launch plan."""
        launch = LaunchPlan(
            split="n" if self.swap_ab else "m",
            cluster=self.cluster if self.cluster[1] > 1 else ("", 1),
            supergroup=self.supergroup,
            store_panels=self.store_panels,
            dependent=self.dependent,
            resident=self.resident,
            store=self.store,
            store_rows=self.store_rows,
        )
        registers = SHARED_REGISTERS if self.resident > 1 else None
        if self._wide(config):
            registers = registers or (WIDE_REGISTERS if self.groups < 3 else THREE_REGISTERS)
        flying = 0 if config.promote else 1
        depth = min(self.depth, self.most_slots(config))
        return multistage(
            gemm(config),
            depth,
            launch,
            self.groups,
            flying,
            registers,
            early_release=config.promote,
        )

    def _wide(self, config: GemmConfig) -> bool:
        """Whether the producer needs more registers: many panels, or coordinates."""
        many = self.swap_ab or self.products_in_flight > 1 or self.tile[1] > MOST_COLUMNS
        return many or config.dual or config.batched or self.slices > 1

    def power(self, config: GemmConfig, of: Constants | None = None) -> float:
        """Power of a multiply relative to that of the tile of 128 x 256, pairs sharing b."""
        of = of or CONSTANTS
        (bm, bn), (a_rows, b_rows) = self.tile, self.copied(config)
        high, wide = (bn, bm) if self.swap_ab else (bm, bn)
        pieces = cdiv(wide, MOST_COLUMNS)
        reads = cdiv(high, ROWS_PER_GROUP) * (pieces * ROWS_PER_GROUP + wide)
        along, blocks = self.cluster
        rows = a_rows / (blocks if along == "n_tile" else 1)
        rows += b_rows / (blocks if along == "m_tile" else 1)
        return (
            1.0
            + of.operands * (reads / (bm * bn) / READS - 1.0)
            + of.requested * (rows / (bm * bn) / REQUESTS - 1.0)
        )

    def most_slots(self, config: GemmConfig) -> int:
        """Slots that shared memory has room for beside the panels on their way out."""
        bm, bn = self.copied(config)
        high = self.tile[0]
        if self.swap_ab:
            high = self.groups * (self.store_rows or high)
        width = PANEL_BYTES
        if self.in_cluster:  # each block stores its part of the columns
            width = min(width, self.config(config).share * config.out.bytes)
        panels = high * width * self.store_panels if self.store == "tma" else 0
        aligned = BASE_BYTES if self.resident == 1 else 0
        free = shared_limit(self.resident) - BARRIER_BYTES - aligned - panels
        if self.in_cluster:
            high = self.tile[1] if self.swap_ab else self.tile[0]
            free -= SUM_BYTES * high * self.config(config).share * self.slices
        return free // ((bm + bn * (1 + config.dual)) * STEP_BYTES * self.products_in_flight)

    def store_count(self, element: int) -> int:
        """Panels in which a group stores its part of the tile."""
        bm, bn = self.tile
        if self.swap_ab:
            return bn // self.groups // ROWS_PER_GROUP * cdiv(bm, self.store_rows or bm)
        return cdiv(bn * element, PANEL_BYTES)

    def copied(self, config: GemmConfig) -> tuple[int, int]:
        """Rows of 128 bytes of a and b that a step brings, panels that are not full included."""
        (bm, bn), size = self.tile, config.dtype.bytes
        return (
            bm if config.a == "mk" else padded(bm, size),
            padded(bn, size) if config.b == "kn" else bn,
        )

    def ragged(self, config: GemmConfig, m: int, n: int, k: int) -> tuple[bool, bool]:
        """Whether copied rows of a and b begin inside of a sector, or inside of a line."""
        (bm, bn), size = self.tile, config.dtype.bytes
        a_line, a_step = (k, STEP_BYTES // size) if config.a == "mk" else (m, bm)
        b_line, b_step = (n, bn) if config.b == "kn" else (k, STEP_BYTES // size)
        return (
            a_line * size % SECTOR > 0 or a_step * size % PANEL_BYTES > 0,
            b_line * size % SECTOR > 0 or b_step * size % PANEL_BYTES > 0,
        )

    def fits(self, config: GemmConfig) -> bool:
        """Whether the registers of a thread hold every sum, and shared memory two slots."""
        bm, bn = self.tile
        if self.products_in_flight > 1 and (not config.promote or config.dual):
            return False
        if self.slices > 1 and (config.batched or config.dual):
            return False
        tiles = 1 + config.dual + (self.products_in_flight if config.promote else 0)
        sums = tiles * bm * bn // (self.groups * 128)
        most = MOST_SUMS if self.resident == 1 else MOST_SHARED_SUMS
        if self.groups > 2:
            most = min(most, SUMS_BESIDE if self._wide(config) else SUMS_OF_THREE)
        most -= READ_BACK if config.gate or config.residual else 0
        if self.swap_ab and (config.gate or config.residual or config.out.bytes != PACKED_BYTES):
            return False  # a thread would read or write one element at a time
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
        places = CLUSTERS[blocks]
        tasks = rows * cols * batch * (1 if self.in_cluster else self.slices)
        steps = cdiv(cdiv(k * size, STEP_BYTES), self.slices)
        a_rows, b_rows = self.copied(config)
        a_ragged, b_ragged = self.ragged(config, m, n, k)
        copies = a_rows / along["n_tile"] / (c.ragged if a_ragged else c.aligned)
        copies += b_rows / along["m_tile"] / (c.ragged if b_ragged else c.aligned)
        waves, beside = cdiv(tasks, places), 1
        if self.resident > 1:
            # Blocks of an SM share its rates, and one's stores are hidden by the other's matmuls.
            waves = cdiv(tasks, SMS)
            beside = min(self.resident, waves)
        busy = tasks * blocks / (waves * SMS)
        matmul = max(FASTEST, c.step * (1.0 - c.relief * (1.0 - busy))) * bm * bn / UNIT
        matmul *= (c.narrow if bn == 64 else 1.0) * (c.two_per_sm if self.resident > 1 else 1.0)
        # One slot is being read, the others are on the way.
        slots = min(self.depth, self.most_slots(config)) * self.products_in_flight * beside
        arrival = (c.late if a_ragged or b_ragged else c.latency) / (slots - 1)
        parts = [matmul, copies, arrival]
        if config.promote:
            parts.append(matmul / (self.groups * beside) + c.drain / self.products_in_flight)
        step = sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)
        out = SUM_BYTES if self.slices > 1 and not self.in_cluster else config.out.bytes
        end = c.at_once if self.store_count(out) <= self.store_panels else c.epilogue
        end = end if self.store == "tma" else c.direct
        time = waves * (steps * step + end * bm * bn / UNIT / beside)
        time += c.dependent_start if self.dependent else c.start
        if self.in_cluster:
            time += waves * c.cluster_reduce * bm * bn / UNIT
        elif self.slices > 1:
            time += c.combine + 8.0 * m * n * self.slices / c.summed
        return time


def swap_ab(m: int, n: int, axis: str) -> GemmChoice:
    """The variant of the transposed product with that tile and pairs of blocks along `axis`.

    Its ring is as deep as two panels of at least `LEAST_PANEL` rows for each group allow; `n` is
    128 or 256 (two compute groups) or 192 (three).
    """
    groups = 3 if n % 128 else 2
    free = shared_limit(1) - BARRIER_BYTES - BASE_BYTES
    slot, row = (m + n) * STEP_BYTES, 2 * groups * PANEL_BYTES
    depth = min(MOST_SLOTS, (free - LEAST_PANEL * row) // slot)
    rows = min(m, HIGHEST_PANEL, (free - depth * slot) // row // 8 * 8)
    name = f"{m}x{n}-swap-ab" + ("-by-m" if axis == "m_tile" else "")
    return GemmChoice(name, (m, n), (axis, 2), depth, groups, swap_ab=True, store_rows=rows)
