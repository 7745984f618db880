"""Which tile and schedule a scaled or grouped product gets, by its sizes.

The model of a launch does not know tasks that are read from an array, so the choice is a rule over
what was timed on an H200 (docs/gemm.md, "Grouped").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.gemm.grouped import PACKED_BITS, GroupedConfig, grouped_policy

SMS = 132
# (loading, computing) registers a thread by rows of a tile: the loading thread holds what its task
# reads, and the addresses of up to four arrays.
REGISTERS = {64: (64, 232), 128: (40, 232)}
TURNED_REGISTERS = {64: (64, 232), 128: (40, 232), 256: (40, 232)}
TURNED_PANEL = 32  # rows of a turned result that leave together
HIGH_PANEL = 64  # the same of tiles so wide that their rings leave room for it: up to 1.6 % less
FEW_ROWS = 64  # of an expert, for which a tile has one compute group
MANY_ROWS = 768  # of an expert, for which a tile has three
PAIRS = ("n_tile", 2)
RASTER = 8  # rows of tasks that run at a time
SCALED_RASTER = 16  # of promoted products that stand alone
RAGGED_RASTER = 4  # where experts have a few tiles of rows each: 256 of 128 rows took 6 % less
ONE_TILE = 192  # rows of an expert that mostly has one of these
LONG = 4096  # of k, from which on the ends of tasks count little
# Columns of a tile and the widths that rows get: of elements of 16 bits where an expert mostly has
# one tile, which leaves room for one panel of results, and elsewhere; of 8 bits where an expert
# mostly has one tile of 256 rows and k is long, and elsewhere.
WIDE = (192, tuple(range(24, 217, 24)))
SOME_WIDE = (192, (40, 72, 96, 120, 136, 152, 168, 184, 208))
ONE_OF_EIGHT = (128, tuple(range(32, 257, 32)))
SOME_OF_EIGHT = (192, tuple(range(32, 193, 32)))
SHARES = (256, (48, 80, 112, 128, 144, 160, 176))  # of experts with many rows, shared out evenly
HALVES = (128, tuple(range(32, 161, 32)))  # of gates and as many other columns
TURNED_RASTER = 2
# Microseconds of a step of 128 of k and of the end of a task, all SMs at work: a fit to products
# with block scales, 4096 rows, timed on an H200.
TWO_IN_FLIGHT, THREE_GROUPS = (0.418, 0.84), (0.619, 1.39)

ALONE = {(64, 64): 8, (128, 64): 8, (128, 192): 5}  # tiles of which an SM has one, and their rings


@dataclass(frozen=True)
class GroupedPlan:
    """A configuration with its tile, and the schedule in short.

    depth    slots of the rings
    cluster  (grid axis, blocks)
    dynamic  each block takes the next free task: experts have tiles with fewer rows and none
    raster   rows of tasks that run at a time
    panels   of the result that a group has on their way
    """

    config: GroupedConfig
    depth: int
    cluster: tuple[str, int] = ("", 1)
    dynamic: bool = False
    raster: int = RASTER
    panels: int = 1

    @property
    def even(self) -> bool:
        """Whether the list of tasks shares the rows of an expert out evenly: a task takes as long
        as it has rows."""
        return bool(self.config.widths)

    def policy(self) -> Policy:
        """The policy of its schedule."""
        turned = bool(self.config.widths)
        high = self.config.tile[1] > WIDE[0]
        launch = LaunchPlan(
            supergroup=self.raster,
            store_panels=self.panels,
            store_rows=(HIGH_PANEL if high else TURNED_PANEL) if turned else 0,
            cluster=self.cluster,
            tile_scheduler="dynamic" if self.dynamic else "static",
            dependent=True,
        )
        registers = REGISTERS.get(self.config.tile[0])
        if turned:
            registers = TURNED_REGISTERS.get(self.config.tile[1])
        return grouped_policy(self.config, self.depth, launch, registers)


def plan_grouped(
    config: GroupedConfig, rows: int, n: int, k: int, aligned: bool = False
) -> GroupedPlan:
    """The plan for about `rows` rows of every expert, n columns and k; `aligned`: the scales of a's
    rows have a pitch of 16 bytes."""
    by_blocks = config.scales == "blocks"
    config = replace(config, brought=by_blocks and aligned and config.groups != "rows")
    few, ragged = rows <= FEW_ROWS, config.groups != "none"
    if not few and _turns(config):
        return _turned(config, rows, k)
    if config.swiglu:
        tile = (64 if few else 128, 64 if few or config.promoted else 128)
        config = replace(config, tile=tile)
        return GroupedPlan(config, 8 if few else 4, dynamic=True, raster=RAGGED_RASTER)
    if few:
        return GroupedPlan(replace(config, tile=(64, 128)), 8, dynamic=ragged)
    if not config.promoted:
        config = replace(config, tile=(128, 256))
        return GroupedPlan(config, 4, dynamic=True, raster=RAGGED_RASTER)
    if not ragged:
        return _scaled(config, rows, n, k)
    two = replace(config, tile=(128, 128), products_in_flight=2)
    raster = SCALED_RASTER if rows >= MANY_ROWS else RASTER
    return GroupedPlan(two, 3, dynamic=True, raster=raster, panels=2)


def _turns(config: GroupedConfig) -> bool:
    return not config.promoted and config.out.bits == PACKED_BITS


def _turned(config: GroupedConfig, rows: int, k: int) -> GroupedPlan:
    """The plan for rows of experts over columns."""
    many, narrow, one = rows >= MANY_ROWS, config.dtype.bits == 8, rows < ONE_TILE
    columns, widths = WIDE if one else SOME_WIDE
    if config.swiglu:
        columns, widths = HALVES
    elif many:
        columns, widths = SHARES
    elif narrow:
        columns, widths = ONE_OF_EIGHT if one and k >= LONG else SOME_OF_EIGHT
    turned = replace(config, tile=(widths[-1], columns), widths=widths)
    depth = 3 if columns > WIDE[0] else 4
    raster = RASTER if many else TURNED_RASTER
    panels = 2 if narrow or many or (columns, widths) == SOME_WIDE else 1
    return GroupedPlan(turned, depth, dynamic=True, raster=raster, panels=panels)


def _scaled(config: GroupedConfig, m: int, n: int, k: int) -> GroupedPlan:
    """The plan for one promoted product: the tile that takes the least time, or where no SM has two
    tiles the smallest one for which that is so."""
    for tile, depth in ALONE.items():
        if _tiles(m, n, tile) <= SMS:
            return GroupedPlan(replace(config, tile=tile), depth)
    steps = -(-k // config.step)

    def cost(rows: int, task: tuple[float, float]) -> float:
        return -(-_tiles(m, n, (rows, 128)) // SMS) * (steps * task[0] + task[1])

    if cost(192, THREE_GROUPS) < cost(128, TWO_IN_FLIGHT):
        return GroupedPlan(replace(config, tile=(192, 128)), 4, PAIRS)
    two = replace(config, tile=(128, 128), products_in_flight=2)
    return GroupedPlan(two, 3, raster=SCALED_RASTER, panels=2)


def _tiles(m: int, n: int, tile: tuple[int, int]) -> int:
    return -(-m // tile[0]) * -(-n // tile[1])
