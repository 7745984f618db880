"""How a program without a matmul is laid over the threads of a block, as data.

A tile `[rows, cols]` is cut into chunks of `lanes * vector` columns and groups of
`threads / lanes` rows: thread t has row t / lanes of every group and, of every chunk, the `vector`
neighbouring columns from (t % lanes) * vector on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warploom.codegen.ir.plan import VERSION, LaunchPlan, check_version
from warploom.errors import InputError
from warploom.machine import largest
from warploom.tile import Program, TileType

SCHEMA = "warploom.simt-schedule"
WARP = 32
MOST_THREADS = largest("limits.threads_per_block")  # `ir.targets` knows each target's
WIDEST_BYTES = 16  # of one access
ELEMENTS_A_THREAD = 32  # aimed at: enough loads in flight, no pressure on registers
GRID = LaunchPlan(persistent=False)  # one block a task


@dataclass(frozen=True)
class SimtSchedule:
    """`threads` a block, `lanes` of them along the columns, `vector` columns each; all powers of 2.

    Of the launch plan only the walk over the tasks counts (persistent, super-group, reverse), and
    whether the kernel begins before the previous one has ended (dependent).
    """

    name: str
    threads: int
    lanes: int
    vector: int
    launch: LaunchPlan = GRID

    def __post_init__(self) -> None:
        """Refuse what no block can be."""
        for what, value in (("threads", self.threads), ("lanes", self.lanes),
                            ("vector", self.vector)):  # fmt: skip
            if value < 1 or value & (value - 1):
                raise InputError(f"schedule {self.name}: {what}={value}, expected a power of two")
        if not WARP <= self.threads <= MOST_THREADS or self.lanes > self.threads:
            raise InputError(
                f"schedule {self.name}: {self.threads} threads with {self.lanes} along the columns,"
                f" expected {WARP} to {MOST_THREADS} threads and no more lanes than threads"
            )
        if self.launch.cluster[1] > 1 or self.launch.tile_scheduler == "dynamic":
            raise InputError(
                f"schedule {self.name}: clusters and the dynamic walk need a producer warp"
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
            return cls(str(data["name"]), threads, lanes, vector, launch)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{origin}: incomplete or malformed: {error}") from None


def simt(program: Program, threads: int | None = None, lanes: int | None = None) -> SimtSchedule:
    """A schedule from the program's sizes: 16-byte accesses, rows over as few threads as hold them.

    `threads` and `lanes` override the sizes' choice.
    """
    types = [op.dst.type for op in program.ops() if op.dst is not None and op.dst.type.axes]
    if not types:
        return SimtSchedule("simt", threads or WARP, lanes or 1, 1)
    widest = max(_elements(kind) for kind in types)
    # A vector counts as columns only when nothing larger says where they are.
    cols = max(kind.shape[-1] for kind in types if len(kind.axes) > 1 or widest == kind.shape[0])
    size = min(array.dtype.bytes for array in program.arrays)
    vector = min(WIDEST_BYTES // size, _power(cols))
    wanted = _power(max(1, widest // ELEMENTS_A_THREAD))
    chosen = threads or min(max(wanted, 4 * WARP), 512)
    along = lanes or min(chosen, _power(-(-cols // vector)))
    return SimtSchedule("simt", chosen, along, vector)


def _elements(kind: TileType) -> int:
    count = 1
    for extent in kind.shape:
        count *= extent
    return count


def _power(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
