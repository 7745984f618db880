"""Everything about a kernel without matmuls that is decided before its code is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from warploom.codegen.analysis.entry import entry_registers
from warploom.codegen.analysis.parameters import array_parameters, scalar_parameters
from warploom.codegen.analysis.stores import STORES
from warploom.codegen.ir.targets import check_threads, check_types, shared_limit
from warploom.codegen.simt.ahead import Ahead, ahead, line_bytes
from warploom.codegen.simt.exchanges import cluster_room, needs_one_block, shared_bytes
from warploom.codegen.simt.forms import COL, TILE, Layout, check_registers, forms_of
from warploom.codegen.simt.interleaved import Pair, interleaved
from warploom.codegen.simt.picks import Pick, picks
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.codegen.simt.weighted import WeightedSums, weighted_sums
from warploom.errors import DoesNotFit, InputError
from warploom.tile import BOOL, Loop, Program
from warploom.tile.index import multiple_of
from warploom.tile.ir import joint_axis
from warploom.tile.ops import OPS

EARLY_SHARE = 3  # of a thread's registers, one part is for values loaded early
STAGED_WORK = 32  # registers of a thread that works on staged tiles line by line
LEAST_EARLY = 8  # for numbers of rows
WORDS = 4  # of a block of random bits
LINE = 128
BARRIERS = 16  # bytes of a cluster's


@dataclass(frozen=True)
class SimtFacts:
    """What a printer needs to know of a program under a schedule.

    forms           of every variable (`simt.forms`)
    parameters      of the kernel, in order
    shared_bytes    of the ops' exchanges, which they use in turn, what a cluster's blocks exchange
                    and the rings of loops
    cluster_at      where the blocks of a cluster exchange: two barriers, then their values;
                    None where they exchange nothing
    rings           where the ring of a loop begins, by its index
    ahead           loads that begin early
    picks, idle     sums that are one element each, and ops that have no code for that
    weighted        sums of exponentials that take one exchange
    blocks_of_words random bits whose blocks a thread has whole
    early           loads that begin with a block's one task, and stay where they are written
    once            loads of what no other task has, which pass by L1
    interleaved     loads and stores of neighbours, by op (`simt.interleaved`)
    stored_only     variables that only stores read, which round them
    stored, loaded  arrays that are written and read: what other threads of the block stored is read
                    only after all of them did
    """

    layout: Layout
    forms: Mapping[str, str]
    parameters: tuple[dict[str, Any], ...]
    shared_bytes: int
    cluster_at: int | None
    rings: Mapping[str, int]
    ahead: Ahead
    picks: Mapping[int, Pick]
    idle: frozenset[int]
    weighted: WeightedSums
    blocks_of_words: frozenset[int]
    early: frozenset[int]
    once: frozenset[int]
    interleaved: Mapping[int, Pair]
    stored_only: frozenset[str]
    stored: frozenset[str]
    loaded: frozenset[str]


def simt_facts(program: Program, schedule: SimtSchedule, arch: str) -> SimtFacts:
    """The facts of a program under a schedule for an architecture.

    Raises `InputError` at the user's line for what has no code, and `DoesNotFit` for tiles that are
    too large.
    """
    layout, forms = Layout(schedule), forms_of(program)
    _check(program, layout, forms, arch)
    early = ahead(program, layout, forms, _early_registers(schedule, arch))
    weighted = weighted_sums(program, layout, forms)
    cluster_at = -(-shared_bytes(program, layout, forms, weighted.sums) // 16) * 16
    room = cluster_room(program, layout, forms, weighted.sums)
    shared = cluster_at + (BARRIERS + room if room else 0)
    rings: dict[str, int] = {}
    for index, stage in early.stages.items():
        # Lines of memory stay lines there.
        rings[index] = shared = -(-shared // LINE) * LINE
        shared += schedule.stages * stage
    if shared > (limit := shared_limit(arch=arch)):
        raise DoesNotFit(
            f"kernel {program.name} needs {shared:,} B of shared memory for its largest "
            f"exchange and its rings, {arch} has {limit:,}; make the tile smaller"
        )
    stored = frozenset(op.array.name for op in program.ops() if op.array and op.kind in STORES)
    loaded = frozenset(op.array.name for op in program.ops() if op.array and op.kind == "load")
    used = stored | loaded | {one.array.name for one in program.every_read()}
    first = early.first if _one_task(program, schedule) else frozenset[int]()
    beside = interleaved(program, layout, forms)
    parameters = _parameters(program, layout, forms, used, beside)
    found, idle = picks(program, forms, schedule.cluster)
    return SimtFacts(
        layout, forms, tuple(parameters), shared, cluster_at if room else None, rings, early,
        found, idle, weighted, _blocks_of_words(program, layout, forms),
        first, _once(program, forms), beside,
        _stored_only(program), stored, loaded,
    )  # fmt: skip


def _early_registers(schedule: SimtSchedule, arch: str) -> int:
    """Registers of a thread for values that are loaded early: a share of all, or beside staged
    tiles what is left by the work on a line."""
    if not schedule.staged:
        return entry_registers(schedule.threads, arch) // EARLY_SHARE
    held = entry_registers(schedule.threads, arch, max(1, schedule.launch.resident))
    return max(LEAST_EARLY, held - STAGED_WORK)


def _parameters(
    program: Program,
    layout: Layout,
    forms: Mapping[str, str],
    used: Collection[str],
    beside: Mapping[int, Pair],
) -> list[dict[str, Any]]:
    """The kernel's parameters; where it is promised lines, with what they must be multiples of."""
    found = [
        one
        for array in program.arrays
        if array.name in used
        for one in array_parameters(program, array.name)
    ]
    dims: dict[str, int] = {}
    for op in program.ops() if layout.schedule.aligned else ():
        var = op.srcs[0] if op.kind in STORES else op.dst
        if op.array is None or var is None or op.kind == "store_add":
            continue
        line = line_bytes(op, layout, forms[var.name])
        vector, last, dim = line // op.array.dtype.bytes, op.spans[-1], op.array.dims[-1]
        if op.id in beside:
            vector, last, dim = layout.schedule.vector, op.spans[-2], op.array.dims[-2]
            line = 2 * vector * op.array.dtype.bytes
        if vector == 1:
            continue
        if multiple_of(last.start) % vector or last.stop is not None:
            raise InputError(
                f"{op.where}: {op.kind} from {last.start}, where lines begin at multiples of "
                f"{vector}; leave out aligned=True"
            )
        dims[dim] = max(vector, dims.get(dim, 1))
        for one in found:
            if one["array"] == op.array.name:
                one["line"] = max(line, int(one.get("line", 1)))
                if op.id in beside:
                    one["interleaved"] = True
    found += [
        {"kind": "dim", "name": dim} | ({"multiple": dims[dim]} if dim in dims else {})
        for dim in program.dims
    ]
    return [*found, *scalar_parameters(program)]


def _blocks_of_words(program: Program, layout: Layout, forms: Mapping[str, str]) -> frozenset[int]:
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    starts = {
        op.dst.name: op.start
        for op in program.ops()
        if op.kind == "coordinate" and op.dst is not None and writers[op.dst.name] == 1
    }
    return frozenset(
        op.id
        for op in program.ops()
        if op.kind == "philox" and op.dst is not None and forms[op.dst.name] == TILE
        and layout.schedule.vector % WORDS == 0 and forms[op.srcs[1].name] == COL
        and (start := starts.get(op.srcs[1].name)) is not None and multiple_of(start) % WORDS == 0
    )  # fmt: skip


def _one_task(program: Program, schedule: SimtSchedule) -> bool:
    """Whether a block does each load at most once: in a loop the compiler may keep what it gave."""
    loops = any(isinstance(item, Loop) for item in program.body)
    return not schedule.launch.persistent and not loops


def _once(program: Program, forms: Mapping[str, str]) -> frozenset[int]:
    """Loads of tiles whose range depends on every index of the grid, where no tile is stored.

    Rows that are only read pass by L1 (H200, cross-entropy of 1024 columns: 4.21 to 4.51 TB/s).
    Where rows are written too, that is slower (RMSNorm of 1024: 4.15 to 3.94), but for stores that
    pass by it as well, which cost the registers of a block.
    """
    axes = {name for name, _ in program.grid}
    found = set[int]()
    for op in program.ops():
        if op.array is None or op.kind not in ("load", *STORES):
            continue
        tile = forms[(op.srcs[0] if op.dst is None else op.dst).name] == TILE
        if tile and op.dst is None:
            return frozenset()
        if tile and axes <= frozenset[str]().union(*(span.start.symbols() for span in op.spans)):
            found.add(op.id)
    return frozenset(found)


def _stored_only(program: Program) -> frozenset[str]:
    """Variables whose one writer computes them for stores alone."""
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    others = {src.name for op in program.ops() if op.kind not in STORES for src in op.srcs}
    return frozenset(name for name, count in writers.items() if count == 1) - others


def _check(program: Program, layout: Layout, forms: Mapping[str, str], arch: str) -> None:
    schedule = layout.schedule
    if schedule.launch.dependent and not arch.startswith("sm_9"):
        raise InputError(
            f"schedule {schedule.name}: dependent launch has code for sm_90, not {arch}"
        )
    check_threads(program.name, schedule.threads, 1, arch)
    if schedule.cluster > 1 and not arch.startswith("sm_9"):
        raise InputError(f"schedule {schedule.name}: clusters have code for sm_90, not {arch}")
    for op in program.ops():
        if schedule.cluster > 1 and needs_one_block(op, layout, forms):
            raise InputError(
                f"{op.where}: {op.kind} exchanges columns, which a cluster of {schedule.cluster} "
                "blocks shares"
            )
        if any(span.others for span in op.spans):
            raise InputError(
                f"{op.where}: load of stacked parts: only loads that feed a matmul have code for "
                "it; load each part into a tile of its own"
            )
        if axis := joint_axis(op.spans):
            raise InputError(
                f"{op.where}: {op.kind} of {op.array}: axis {axis!r} of several dimensions has "
                "code beside matmuls only"
            )
        if op.kind == "mma":
            raise InputError(f"{op.where}: a matmul; SIMT schedules are for programs without one")
        if OPS[op.kind].group == "blocks":
            raise InputError(f"{op.where}: {op.kind} has code beside matmuls only")
        if op.dst is not None and not schedule.staged:
            check_registers(layout, op, forms[op.dst.name], arch)
        check_types(op, arch)
        if OPS[op.kind].group in ("reduce", "scan") and op.srcs[0].type.dtype is BOOL:
            raise InputError(f"{op.where}: {op.kind} of conditions; cast to int32 first")
