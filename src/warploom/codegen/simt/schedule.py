"""How a program without a matmul is laid over the threads of a block, as data.

A tile `[rows, cols]` is cut into chunks of `cluster * lanes * vector` columns and groups of
`threads / lanes` rows: thread t of block b of a cluster has row t / lanes of every group and, of
every chunk, the `vector` neighbouring columns from (b * lanes + t % lanes) * vector on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warploom.codegen.ir.plan import MOST_BLOCKS, VERSION, LaunchPlan, check_version
from warploom.errors import InputError
from warploom.machine import largest

SCHEMA = "warploom.simt-schedule"
WARP = 32
MOST_THREADS = largest("limits.threads_per_block")  # `ir.targets` knows each target's
MOST_STAGES = 8
WIDEST_BYTES = 16  # of one access
GRID = LaunchPlan(persistent=False)  # one block a task


@dataclass(frozen=True)
class SimtSchedule:
    """`threads` a block, `lanes` of them along the columns, `vector` columns each; all powers of 2.

    `cluster` blocks share the columns of a task. The loads of a loop run `stages` - 1 iterations
    ahead; with one stage they are made in their own iteration. `aligned` promises that pointers,
    pitches and lengths are multiples of a line, which the launch checks: other lines have no code.
    `staged` keeps the tiles that a block's one task loads in shared memory: every use reads them
    there, and registers hold what is computed alone.
    `evict_last` asks L2 to give up what is loaded by whole accesses after what is written.
    Of the launch plan only the walk over the tasks counts (persistent, super-group, reverse),
    whether the kernel begins before the previous one has ended (dependent) and how many blocks of
    an SM registers must do for (resident).
    """

    name: str
    threads: int
    lanes: int
    vector: int
    launch: LaunchPlan = GRID
    cluster: int = 1
    stages: int = 1
    aligned: bool = False
    staged: bool = False
    evict_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what no block can be."""
        for what, value in (("threads", self.threads), ("lanes", self.lanes),
                            ("vector", self.vector), ("cluster", self.cluster)):  # fmt: skip
            if value < 1 or value & (value - 1):
                raise InputError(f"schedule {self.name}: {what}={value}, expected a power of two")
        if not WARP <= self.threads <= MOST_THREADS or self.lanes > self.threads:
            raise InputError(
                f"schedule {self.name}: {self.threads} threads with {self.lanes} along the columns,"
                f" expected {WARP} to {MOST_THREADS} threads and no more lanes than threads"
            )
        if self.cluster > MOST_BLOCKS or not 1 <= self.stages <= MOST_STAGES:
            raise InputError(
                f"schedule {self.name}: clusters of {self.cluster} and {self.stages} stages, "
                f"expected at most {MOST_BLOCKS} blocks and 1 to {MOST_STAGES} stages"
            )
        if self.cluster > 1 and self.lanes < max(WARP, self.cluster):
            raise InputError(
                f"schedule {self.name}: {self.lanes} lanes of {self.cluster} blocks, expected at "
                f"least {WARP} where blocks share the columns"
            )
        if self.staged and (self.launch.persistent or self.stages > 1):
            raise InputError(
                f"schedule {self.name}: staged tiles are of one task a block; persistent blocks "
                "and loops have rings"
            )
        if self.launch.cluster[1] > 1 or self.launch.tile_scheduler == "dynamic":
            raise InputError(
                f"schedule {self.name}: clusters of tasks and the dynamic walk need a producer"
            )

    @property
    def rows(self) -> int:
        """Threads along the rows."""
        return self.threads // self.lanes

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON data."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], origin: str = "schedule") -> SimtSchedule:
        """A schedule back from JSON data; raises `InputError` naming what is wrong."""
        check_version(data, SCHEMA, origin)
        try:
            launch = LaunchPlan.from_json(data["launch"])
            threads, lanes, vector = (int(data[key]) for key in ("threads", "lanes", "vector"))
            cluster, stages = int(data["cluster"]), int(data["stages"])
            name, aligned = str(data["name"]), bool(data["aligned"])
            staged, last = bool(data.get("staged")), bool(data.get("evict_last"))
            return cls(name, threads, lanes, vector, launch, cluster, stages, aligned, staged, last)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{origin}: incomplete or malformed: {error}") from None
