"""Which tile and schedule a scaled or grouped product gets, by its sizes.

The model of a launch does not know tasks that are read from an array, so the choice is a rule over
what was timed on an H200 (docs/gemm.md, "Grouped"): as many rows a tile as an expert usually has,
at most 128, and clusters of two tiles along n, which load their rows once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.gemm.grouped import GroupedConfig, grouped_schedule

# (loading, computing) registers a thread by rows of a tile: the loading thread holds what its task
# reads, and the addresses of up to four arrays.
REGISTERS = {64: (64, 232), 128: (40, 232)}
FEW_ROWS = 64  # of an expert, for which a tile has one compute group


@dataclass(frozen=True)
class GroupedPlan:
    """A configuration with its tile, and the schedule in short.

    depth      slots of the rings
    cluster    (grid axis, blocks)
    panels     of the result that a group may have in flight
    raster     rows of tasks that run at a time
    resident   blocks on an SM
    vectors    the producer brings the scales of a's rows
    """

    config: GroupedConfig
    depth: int
    cluster: tuple[str, int] = ("", 1)
    panels: int = 1
    raster: int = 8
    resident: int = 1
    vectors: bool = False

    def schedule(self) -> KernelSchedule:
        """The kernel schedule."""
        launch = LaunchPlan(
            supergroup=self.raster,
            store_panels=self.panels,
            cluster=self.cluster,
            resident=self.resident,
            dependent=True,
        )
        registers = REGISTERS.get(self.config.tile[0])
        return grouped_schedule(self.config, self.depth, launch, self.vectors, registers)


def plan_grouped(
    config: GroupedConfig, rows: int, n: int, k: int, experts: int = 1, vectors: bool = False
) -> GroupedPlan:
    """The plan for about `rows` rows of every expert, n columns and k; `vectors`: the scales of a's
    rows have a pitch of 16 bytes."""
    few = rows <= FEW_ROWS
    pairs = ("n_tile", 2)
    if config.swiglu:
        tile = (64 if few else 128, 64 if few or config.promoted else 128)
        chosen = replace(config, tile=tile)
        return GroupedPlan(chosen, 4, vectors=vectors)
    if not config.promoted:
        if config.dtype.bits == 8 or few:
            return GroupedPlan(replace(config, tile=(64 if few else 128, 256)), 4, pairs)
        return GroupedPlan(replace(config, tile=(128, 256)), 4, pairs)
    if few:
        return GroupedPlan(replace(config, tile=(64, 128)), 8, pairs, vectors=vectors)
    chosen = replace(config, tile=(128, 128), products_in_flight=2)
    return GroupedPlan(chosen, 3, pairs, vectors=vectors)
