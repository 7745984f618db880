"""What a kernel is made from besides its program: the schedules of its loops and a launch plan.

Every decision the emitter needs is a field here, so that the same program can be emitted from a
named schedule, a solved one or one read from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from warploom.errors import InputError
from warploom.machine import architecture
from warploom.schedule.model.schedule import Schedule

SCHEMA = "warploom.kernel-schedule"
VERSION = 2  # of the JSON form of kernel schedules, here and in `simt.schedule`
MOST_BLOCKS = architecture("sm_90a").integer("cluster.size_portable")  # of a cluster
MOST_ABREAST = 4  # tasks of a block at a time
LOWER_ROWS = 8  # of every 16 of a matmul: those of which a thread holds the first elements
LOST = "gone: it was measured and lost (docs/codegen.md)"
# Options that schedules had before version 2, and what became of them.
FORMER: Mapping[str, str] = {
    "turns": "called pingpong",
    "walk": "called tile_scheduler, and its 'snake' 'serpentine'",
    "chain": "called overlap_next_task",
    "skip_settled": "called skip_voted",
    "give_back": "called early_release",
    **dict.fromkeys(("fma_exp2", "hold_waits", "stagger", "passing", "alternate"), LOST),
}


def check_version(data: Mapping[str, Any], schema: str, origin: str) -> None:
    """Raise `InputError` unless the data is of this schema and version and has present options.

    The message says what an option of an older version is called now.
    """
    launch: Mapping[str, Any] = data.get("launch") or {}
    former = "; ".join(f"{n} is {FORMER[n]}" for n in (*data, *launch) if n in FORMER)
    found = (data.get("schema"), data.get("version"))
    if former or found != (schema, VERSION):
        raise InputError(
            f"{origin}: schema {found[0]!r} version {found[1]!r}, expected {schema!r} version "
            f"{VERSION}" + (f", in which {former}" if former else "")
        )


@dataclass(frozen=True)
class LaunchPlan:
    """How the grid is laid over the GPU and how the block's tiles are cut.

    split           tile axis cut evenly over the compute groups ("m"); "" with one group
    cluster         (grid axis, blocks): neighbours along that axis form a cluster; loads that do
                    not depend on the axis are multicast. ("", 1) for none
    persistent      one block per SM takes task after task; otherwise one block a task
    supergroup      L2-aware order of the last two grid axes: that many rows at a time; 0: row-major
    grouped         what a row of a super-group is: the axis before the last ("row"), or all axes
                    before the last, flattened ("all")
    reverse         grid axes taken from the far end (longest task first under a causal mask)
    tile_scheduler  how persistent blocks share the tasks: "static" (block b takes b, b + blocks,
                    ...), "serpentine" (every second round backwards) or "dynamic" (each block takes
                    the next free task)
    store           "tma" through shared memory or "direct" from registers
    store_panels    panels of 128 bytes by rows that a group may have in flight to global memory
    store_rows      rows of a panel of a tile that is stored across (columns of the array over the
                    rows of the registers); 0: all. Other panels have the rows of their group
    store_over      a tile loaded once a task as first operand of matmuls, by variable: each group
                    stores through its own rows of it and gives the slot back afterwards, so that
                    no shared memory is set aside for stores. "": panels of their own
    store_warps     warps of the loading group copy what loops add to global memory (`add=True`):
                    one for each compute group, which writes its panels and goes on
    task_rings      slots of buffers loaded once a task, by tile variable; default 1
    one_cursor      rings that take a slot in every iteration of a loop, as many slots each, have
                    one cursor in the groups: fewer instructions between its matmuls
    held_steps      of first operands of matmuls that are loaded once a task, by tile variable: of
                    the columns that matmuls contract, 16 a step, those of these steps stay in
                    registers, and shared memory is read for the others alone
    staged_slots    slots of an operand that all groups leave a part of in shared memory; with two,
                    taken in turn, the groups meet once before they read it, and not also before
                    they write it
    kept_places     with two slots, the places of a lane's parts of such an operand are worked out
                    once, and stay in registers
    fence_at_meeting  with two slots, groups fence what they wrote as they meet, not behind the
                    writes, where the fence holds up matmuls that come between
    divided         what has no part of the split rows and depends on a matmul is made by one group
                    for all: groups divide it, and hand on operands and vectors along rows
    in_turn         groups make the whole of what contracts the split axis of an operand of all, and
                    store it, in turn: one in an iteration, while the others go on. Else each makes
                    a part of it
    dependent       programmatic dependent launch: wait for the previous grid before the first read
    fetch_early     iterations of the loops of a block's first task whose operands L2 is asked for
                    before the previous grid has ended (dependent); numbers that say where they are
                    are read then and once more, so that they have to be in bounds at any time
    skip_unit       a warp leaves out multiplying a tile by row factors that are all 1
    skip_voted    a warp leaves out corrections whose condition says that none of its rows needs
                    them (`cuda.voted_skip`)
    overlap_next_task  the first matmul of the next task is started before the stores of the present
                    one (`passes.overlap`)
    hold_arithmetic  what is computed before a wait for matmuls stays before it, where the compiler
                    would move it behind the wait
    start_behind_wait  a matmul that would start between what makes its operand and a wait for those
                    before it starts behind the wait: its place in their queue may hold the warp up
    early_release   a slot filled once a task goes before the matmuls that end the task's last loop,
                    where they do not read it, and not after them
    resident        blocks that fit on one SM at a time; one's epilogue runs beside another's loop
    abreast         tasks that a block of one group does beside each other: so many groups, each
                    with rings, panels and barriers of its own, which a warp of the loading group
                    feeds. What lies at one place in memory for all tasks is loaded once a block
    reads_ahead     the producer reads the numbers that an iteration takes from memory an iteration
                    earlier, and asks L2 for later ones: beside loads that fill the memory's queue
                    such a read takes as long as several blocks
    late_stores     the panels of a store are copied behind the next fence of the group, be it for
                    a matmul, and not behind one of their own
    keep_masks      tiles of 16 bits that are 0 where a condition on places alone does not hold are
                    cut by words that are made once a task, one register for two elements, and not
                    by comparisons in every iteration
    l2_promotion    bytes, 128 or 256, that L2 fetches around what a copy of rows of 128 bytes wants
    read_once       what loops load is read once: L2 gives it up before everything else
    lower_rows      arrays have at most `LOWER_ROWS` of the rows that matmuls have: what threads
                    hold of the other rows of 16 is not computed (a launch with more rows traps)
    share_vectors   vectors along columns that are loaded outside of loops go through shared memory,
                    an element a thread: else every quad of lanes loads what it needs itself
    block_dim_warps is derived from the groups
    """

    split: str = ""
    cluster: tuple[str, int] = ("", 1)
    persistent: bool = True
    supergroup: int = 0
    grouped: str = "row"
    reverse: tuple[str, ...] = ()
    tile_scheduler: str = "static"
    store: str = "tma"
    store_panels: int = 2
    store_rows: int = 0
    store_over: str = ""
    store_warps: bool = False
    task_rings: Mapping[str, int] = field(default_factory=dict[str, int])
    one_cursor: bool = False
    held_steps: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    staged_slots: int = 1
    kept_places: bool = False
    fence_at_meeting: bool = False
    divided: bool = False
    in_turn: bool = False
    dependent: bool = False
    fetch_early: int = 0
    skip_unit: bool = False
    skip_voted: bool = False
    overlap_next_task: bool = False
    early_release: bool = False
    hold_arithmetic: bool = False
    start_behind_wait: bool = False
    resident: int = 1
    abreast: int = 1
    reads_ahead: bool = False
    late_stores: bool = False
    keep_masks: bool = False
    l2_promotion: int = 256
    share_vectors: bool = False
    read_once: bool = False
    lower_rows: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.cluster[1] <= MOST_BLOCKS:
            raise InputError(
                f"launch plan: cluster of {self.cluster[1]}, expected 1 to {MOST_BLOCKS}"
            )
        if self.store not in ("tma", "direct"):
            raise InputError(f"launch plan: store={self.store!r}, expected 'tma' or 'direct'")
        if self.grouped not in ("row", "all"):
            raise InputError(f"launch plan: grouped={self.grouped!r}, expected 'row' or 'all'")
        if self.tile_scheduler not in ("static", "serpentine", "dynamic"):
            raise InputError(
                f"launch plan: tile_scheduler={self.tile_scheduler!r}, expected 'static', "
                "'serpentine' or 'dynamic'"
            )
        if self.tile_scheduler != "static" and not self.persistent:
            raise InputError(
                f"launch plan: tile_scheduler={self.tile_scheduler!r} needs persistent=True"
            )
        if self.tile_scheduler == "dynamic" and self.cluster[1] > 1:
            raise InputError(
                f"launch plan: tile_scheduler='dynamic' with a cluster of {self.cluster[1]}: the "
                "blocks of a cluster would take different tasks; use 'serpentine'"
            )
        alone = self.cluster[1] == 1 and self.persistent
        if self.overlap_next_task and not alone:
            raise InputError(
                f"launch plan: overlap_next_task with a cluster of {self.cluster[1]} and "
                f"persistent={self.persistent}, expected blocks that do several tasks, each by "
                "itself"
            )
        if self.fetch_early and (not self.dependent or self.overlap_next_task):
            raise InputError(
                f"launch plan: fetch_early={self.fetch_early} with dependent={self.dependent} "
                f"overlap_next_task={self.overlap_next_task}: expected a dependent launch, tasks "
                "one after the other"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        two = self.fence_at_meeting or self.in_turn
        if self.staged_slots not in ((2,) if two else (1, 2)) or self.in_turn > self.store_warps:
            raise InputError(
                f"launch plan: staged_slots={self.staged_slots}, expected 1 or 2, and 2 with "
                "fence_at_meeting or in_turn, which needs store_warps"
            )
        others = (
            self.cluster[1] > 1 or self.store_warps or self.overlap_next_task or self.fetch_early
        )
        if self.abreast > 1 and (others or not self.persistent or self.tile_scheduler != "static"):
            raise InputError(
                f"launch plan: abreast={self.abreast}: expected persistent blocks that take tasks "
                "in a fixed order, with no cluster, store_warps, overlap_next_task or fetch_early"
            )
        if self.store_rows < 0 or self.store_rows % 8:
            raise InputError(
                f"launch plan: store_rows={self.store_rows}, expected a multiple of 8 or 0 for all"
            )
        if self.store_over and self.store != "tma":
            raise InputError(f"launch plan: store_over={self.store_over!r} needs store='tma'")
        if self.l2_promotion not in (128, 256):
            raise InputError(
                f"launch plan: l2_promotion={self.l2_promotion}, expected 128 or 256 bytes"
            )
        if self.lower_rows and (self.store != "direct" or self.skip_unit or self.skip_voted):
            raise InputError(
                f"launch plan: lower_rows with store={self.store!r}, skip_unit={self.skip_unit}, "
                f"skip_voted={self.skip_voted}: expected stores from registers, and no votes"
            )
        if self.store_panels < 1 or self.supergroup < 0 or not 1 <= self.resident <= 16:
            raise InputError(
                "launch plan: store_panels must be >= 1, supergroup >= 0 and resident 1 to 16"
            )
        if not 1 <= self.abreast <= MOST_ABREAST:
            raise InputError(
                f"launch plan: abreast={self.abreast}, expected 1 to {MOST_ABREAST}: each has a "
                "warp of the loading group"
            )

    def with_options(self, **changes: Any) -> LaunchPlan:
        """The plan with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchPlan:
        """A launch plan back from a schedule's JSON data; raises what a malformed one raises."""
        launch = dict(data)
        axis, blocks = launch["cluster"]
        launch["cluster"] = (str(axis), int(blocks))
        launch["reverse"] = tuple(launch["reverse"])
        held: Mapping[str, list[int]] = launch.get("held_steps") or {}
        launch["held_steps"] = {name: tuple(steps) for name, steps in held.items()}
        return cls(**launch)


@dataclass(frozen=True)
class KernelSchedule:
    """The schedules of a program's loops, by loop index, and its launch plan.

    All loops name the same warp groups: one group of producers ("load") and the compute groups.
    `pingpong` orders the tensor-core work of the compute groups in turns, as the times say.
    """

    name: str
    loops: Mapping[str, Schedule]
    launch: LaunchPlan = LaunchPlan()
    pingpong: bool = False

    def __post_init__(self) -> None:
        shapes = {
            tuple((g.name, g.warps, g.registers) for g in s.groups) for s in self.loops.values()
        }
        if not shapes:
            raise InputError(
                f"kernel schedule {self.name}: the program has no loop; a matmul stands in one, "
                "if only of a single step: for i in loop(1)"
            )
        if len(shapes) != 1:
            raise InputError(
                f"kernel schedule {self.name}: its loops have {len(shapes)} different sets of warp "
                "groups, expected one set for the whole kernel"
            )

    @property
    def any_loop(self) -> Schedule:
        """One of the schedules, for what all share."""
        return next(iter(self.loops.values()))

    @property
    def loader(self) -> str:
        """The name of the group that issues the loads: the first one."""
        return self.any_loop.groups[0].name

    @property
    def compute(self) -> tuple[str, ...]:
        """The names of the compute groups, in order of sub-tile."""
        return tuple(group.name for group in self.any_loop.groups[1:])

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "name": self.name,
            "loops": {index: loop.to_json() for index, loop in self.loops.items()},
            "launch": asdict(self.launch),
            "pingpong": self.pingpong,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], origin: str = "kernel schedule") -> KernelSchedule:
        """A kernel schedule back from JSON data; raises `InputError` naming what is wrong."""
        check_version(data, SCHEMA, origin)
        try:
            launch = LaunchPlan.from_json(data["launch"])
            loops = {i: Schedule.from_json(s, f"{origin}: {i}") for i, s in data["loops"].items()}
            return cls(data["name"], loops, launch, bool(data["pingpong"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{origin}: incomplete or malformed: {error}") from None
