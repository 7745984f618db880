"""Variants of the GEMM kernel; `tuned.toml` has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from warploom.autosched.named import multistage
from warploom.codegen.analysis.matmuls import MOST_COLUMNS
from warploom.codegen.ir.layout import padded
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.tuned.table import Sizes, Table
from warploom.perf.launch_time import Launch

BASE_BYTES = 1024  # of shared memory lost to aligning its base, where a block is alone on an SM
BARRIER_BYTES = 512  # of shared memory, at most
PANEL_BYTES = 128  # a panel's share of a row of the result
STEP_BYTES = 128  # a ring step's share of the contracted axis: one swizzle width
PACKED_BYTES = 2  # of an element of a result that leaves through transposed panels
SUM_BYTES = 4  # of an element of the result before it is rounded
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

    def plan(self) -> LaunchPlan:
        """How the grid is laid over the GPU."""
        return LaunchPlan(
            split="n" if self.swap_ab else "m",
            cluster=self.cluster if self.cluster[1] > 1 else ("", 1),
            supergroup=self.supergroup,
            store_panels=self.store_panels,
            dependent=self.dependent,
            resident=self.resident,
            store=self.store,
            store_rows=self.store_rows,
        )

    def schedule(self, config: GemmConfig) -> KernelSchedule:
        """Load-compute-finish with one matmul in flight, under this launch plan."""
        registers = SHARED_REGISTERS if self.resident > 1 else None
        if self._wide(config):
            registers = registers or (WIDE_REGISTERS if self.groups < 3 else THREE_REGISTERS)
        flying = 0 if config.promote else 1
        depth = min(self.depth, self.most_slots(config))
        return multistage(
            gemm(config),
            depth,
            self.plan(),
            self.groups,
            flying,
            registers,
            early_release=config.promote,
        )

    def _wide(self, config: GemmConfig) -> bool:
        """Whether the producer needs more registers: many panels, or coordinates."""
        many = self.swap_ab or self.products_in_flight > 1 or self.tile[1] > MOST_COLUMNS
        return many or config.dual or config.batched or self.slices > 1

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

    def copied(self, config: GemmConfig) -> tuple[int, int]:
        """Rows of 128 bytes of a and b that a step brings, panels that are not full included."""
        (bm, bn), size = self.tile, config.dtype.bytes
        return (
            bm if config.a == "mk" else padded(bm, size),
            padded(bn, size) if config.b == "kn" else bn,
        )

    def takes(self, base: GemmConfig) -> bool:
        """Whether the registers of a thread hold every sum, and shared memory two slots."""
        bm, bn = self.tile
        if self.products_in_flight > 1 and (not base.promote or base.dual):
            return False
        if self.slices > 1 and (base.batched or base.dual):
            return False
        tiles = 1 + base.dual + (self.products_in_flight if base.promote else 0)
        sums = tiles * bm * bn // (self.groups * 128)
        most = MOST_SUMS if self.resident == 1 else MOST_SHARED_SUMS
        if self.groups > 2:
            most = min(most, SUMS_BESIDE if self._wide(base) else SUMS_OF_THREE)
        most -= READ_BACK if base.gate or base.residual else 0
        if self.swap_ab and (base.gate or base.residual or base.out.bytes != PACKED_BYTES):
            return False  # a thread would read or write one element at a time
        return sums <= most and self.most_slots(base) >= 2

    def launch(self, config: GemmConfig, sizes: Sizes, gpu: str) -> Launch:
        """Of `m`, `n`, `k` and `batch`."""
        return Launch(_program(config), self.plan(), {"one": 1, **sizes}, gpu)


_program = lru_cache(maxsize=512)(gemm)


def kinds(config: GemmConfig) -> Sequence[str]:
    """By the width of the elements, and what is summed: two products, or outside of the tensor
    core. Wider elements take as long for as many bytes."""
    narrow = config.dtype.bits == 8
    leads = [*["dual"] * config.dual, *["8-bit promoted"] * config.promote, *["8-bit"] * narrow]
    return [*leads, "16-bit"]


GEMM = Table(Path(__file__).with_name("tuned.toml"), GemmChoice, kinds, "128x128")


@lru_cache(maxsize=1024)
def choose_gemm(
    m: int,
    n: int,
    k: int,
    base: GemmConfig | None = None,
    batch: int = 1,
    sliced: bool = False,
) -> GemmChoice:
    """The variant for a shape. `sliced` admits those of two kernels and a workspace
    (`program.combine`)."""
    if min(m, n, batch) < 1 or k < 0:
        raise InputError(f"gemm of m={m} n={n} k={k} batch={batch}: expected positive sizes")
    sizes = {"m": m, "n": n, "k": k, "batch": batch}
    return GEMM.choose(base or GemmConfig(), sizes, lambda one: sliced or not one.workspace)
