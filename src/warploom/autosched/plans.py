"""How a kernel is laid over the GPU and its block made up: the options of a point, as words.

A word is `option=value`; a plan has at most one of each option. What an option means for a program,
and where it has none, is read off the program: axes along which neighbours load the same operand,
loops that get longer along the grid, tiles loaded once a task.

    balance    longest_first, dynamic or serpentine: how tasks of different length are shared out
    raster     rows of tasks that run at a time, so that their operands stay in L2
    cluster    AXIS:BLOCKS, which load their common operands once
    slices     parts of the contracted axis, one for each block of a cluster, which add up their
               sums (`rewrites.accumulators.cluster_reduce`)
    parts      parts of the contracted axis, whose sums go through memory to a second kernel, which
               adds them up (`rewrites.split_sums`)
    task       prefetch or overlap: what of the next task begins during the present one
    panels     panels that a group may have in flight to global memory
    rows       rows of such a panel, of results that lie across the registers
    store      direct: results go from registers; over: through the slot of a tile loaded once
    release    early: the slot of a tile loaded once goes before the last matmuls of its task
    resident   blocks that share an SM
    groups     compute groups, where not every 64 rows have one
    depth      slots of the rings, at most; without it as many as fit
    registers  of a thread that loads; the others go to those that compute
    launch     dependent: the kernel begins while the one before it ends
    vectors    shared: those along columns that are loaded outside of loops go through shared memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from warploom.autosched.named import register_pool
from warploom.autosched.schedules import Policy
from warploom.autosched.solve import Search
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.vectors import loaded_vectors
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.rewrites.accumulators import cluster_reduce, share_of, sum_loop
from warploom.rewrites.replay import NotApplicable
from warploom.rewrites.split_sums import leaves_sums, split_sums
from warploom.tile import Op, Program

GRID = (
    "balance",
    "raster",
    "cluster",
    "slices",
    "parts",
)  # options that leave the loops' code as it is
CODE = (
    *("task", "panels", "rows", "store", "release", "resident"),
    *("groups", "depth", "registers", "launch", "vectors"),
)
RASTERS, CLUSTERS, SLICES = (4, 6, 8, 12, 16), (2, 4, 8), (2, 4, 6, 8)
PARTS = (2, 3, 4, 6, 8, 12, 16)
# Adding parts up: small tiles, so that many blocks read at a time; a warp for a row, 16 B of every
# part a thread; begun while the sums are still being made.
ADDED = (4, 128)
ADDING = SimtSchedule("rows of parts", 128, 32, 4, LaunchPlan(persistent=False, dependent=True))
WHOLE = 1 << 20  # rows of tasks: no program has as many
PANELS, PLAIN_PANELS = (1, 3, 4), 2  # a task that begins early sets one
PANEL_ROWS = range(24, 104, 8)
DEPTHS = range(2, 9)
LOADERS = (32, 40)  # registers of a loading thread that computes many addresses
MOST_REGISTERS = 240  # of a computing thread
# Fewer slots than fit are no gain, and what runs before a kernel no model of it knows.
UNVARIED = ("depth", "launch")
# Options that choose what the solver finds itself.
LEFT_TO_SOLVER = ("groups", "depth")


def choices(program: Program) -> Mapping[str, tuple[str, ...]]:
    """Values of each option that has a meaning for a program, besides that of a plain plan."""
    found = {name: values(program, name) for name in (*GRID, *CODE)}
    return {name: values for name, values in found.items() if values}


def values(program: Program, option: str) -> tuple[str, ...]:
    """The values of an option for a program; none where it has no meaning."""
    return tuple(map(str, _VALUES[option](program))) if option in _VALUES else ()


def plans(program: Program) -> tuple[tuple[str, ...], ...]:
    """Every plan over the options of `GRID`, but tasks of equal length need no balance; the plain
    one is first."""
    known = choices(program)
    names = [name for name in GRID if name != "balance" or growing_axis(program)]
    open_ = [("", *(f"{name}={value}" for value in known.get(name, ()))) for name in names]
    found = (tuple(word for word in words if word) for words in product(*open_))
    return tuple(words for words in found if fits(words))


def variations(program: Program, words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Plans that differ from one in one option of `CODE` that a search varies."""
    known = choices(program)
    found: list[tuple[str, ...]] = []
    for name in (name for name in CODE if name not in UNVARIED):
        others = tuple(word for word in words if not word.startswith(f"{name}="))
        if others != words:
            found.append(others)
        found += [ordered((*others, f"{name}={value}")) for value in known.get(name, ())]
    return tuple(one for one in found if one != words and fits(one))


def fits(words: tuple[str, ...]) -> bool:
    """Whether options suit each other, as `LaunchPlan` has it."""
    names = [word.partition("=")[0] for word in words]
    clusters = "cluster" in names or "slices" in names
    together = clusters and (_dynamic(words) or "task=overlap" in words)
    both = "slices" in names and ("cluster" in names or "parts" in names)
    panels = "panels" in names or "rows" in names
    unstaged = panels and "store=direct" in words
    over = "store=over" in words and (panels or "task" in names)
    return not (together or both or unstaged or over)


def planned(
    program: Program, plan: LaunchPlan, words: tuple[str, ...]
) -> tuple[Program, LaunchPlan]:
    """The program, in slices where the words say so, and its launch plan with these options; raises
    `InputError` where one has no meaning."""
    made = program
    for word in ordered(words):
        name, _, value = word.partition("=")
        if value not in (known := values(program, name)):
            told = f"{name}={'|'.join(known)}" if known else f"no option {name!r}"
            raise InputError(f"plan {word!r} of {program.name}: expected {told}")
        if name == "slices":
            made = sliced(program, int(value))
            plan = plan.with_options(cluster=("slices_tile", int(value)))
        elif name == "parts":
            made = in_parts(program, int(value))
        elif name in _OPTIONS:
            plan = _OPTIONS[name](program, plan, value)
        elif name in FIELDS:  # not those of the block
            what, kind = FIELDS[name]
            plan = plan.with_options(**{what: kind(value)})
    return made, plan


def policy(
    order: str, plan: LaunchPlan, words: tuple[str, ...], search: Search | None = None
) -> Policy:
    """What an order, a launch plan and the words of a point say of a schedule, but for
    `registers`."""
    given = dict(word.split("=") for word in words)
    groups, depth = (int(given.get(name, 0)) for name in LEFT_TO_SOLVER)
    return Policy(order, plan, groups, depth, search=search)


def ordered(words: Sequence[str]) -> tuple[str, ...]:
    """The words in the order of their options: a plan is one point, and a later option may set
    again what an earlier one set (`task` says one panel, `panels` how many)."""
    place = {name: number for number, name in enumerate((*GRID, *CODE))}
    return tuple(sorted(words, key=lambda word: place.get(word.partition("=")[0], len(place))))


def registers(
    words: tuple[str, ...], groups: int, resident: int, turns: bool = False
) -> tuple[int, int] | None:
    """(loading, computing) registers a thread, where the usual split is not taken; `turns`: the
    loading group turns operands."""
    given = dict(word.split("=") for word in words)
    wanted = given.get("registers")
    if wanted is None and not ((_dynamic(words) or turns or "parts" in given) and groups == 2):
        return None  # these need more to load, which three groups cannot spare
    loading = int(wanted or LOADERS[-1])
    computing = (register_pool(groups, resident) - loading) // groups // 8 * 8
    return loading, min(computing, MOST_REGISTERS)


def growing_axis(program: Program) -> tuple[str, ...]:
    """The last grid axis, where later tasks along it have more iterations."""
    symbols = [loop.stop.symbols() | loop.start.symbols() for loop in program.loops()]
    last = (axis for axis, _ in program.grid[-1:])
    return tuple(axis for axis in last if any(axis in names for names in symbols))


def shared_axes(program: Program) -> tuple[str, ...]:
    """Those of the last two grid axes along which neighbours take one operand in common."""
    operands = {src.name for op in program.ops() if op.kind == "mma" for src in op.srcs[:2]}
    inside = [op for loop in program.loops() for op in loop.body if isinstance(op, Op)]
    loads = [op for op in inside if op.kind == "load" and op.dst and op.dst.name in operands]
    return tuple(
        axis
        for axis, _ in program.grid[-2:]
        if any(all(axis not in span.start.symbols() for span in op.spans) for op in loads)
    )


def loaded_once(program: Program) -> list[str]:
    """Tiles loaded outside of loops that a matmul reads."""
    operands = {src.name for op in program.ops() if op.kind == "mma" for src in op.srcs[:2]}
    outside = [item for item in program.body if isinstance(item, Op) and item.kind == "load"]
    return [op.dst.name for op in outside if op.dst is not None and op.dst.name in operands]


def sliceable(program: Program) -> bool:
    """Whether its contracted axis can be cut over the blocks of a cluster, or is."""
    try:
        return _is_sliced(program) or bool(cluster_reduce(program, SLICES[0]))
    except NotApplicable:
        return False


def sliced(program: Program, parts: int) -> Program:
    """The program with its contracted axis cut into parts, unless it is already."""
    if _is_sliced(program):
        return program
    (whole,) = {var.type.shape[-1] for var in sum_loop(program).sums}
    return cluster_reduce(program, parts, share_of(whole, parts))


def in_parts(program: Program, parts: int) -> Program:
    """What stores the sums of so many parts of the contracted axis, unless the program does."""
    return program if leaves_sums(program) else split_sums(program, parts, ADDED).first


def adding_up(program: Program, words: tuple[str, ...]) -> tuple[Program, SimtSchedule] | None:
    """The second kernel of a whole program under a plan that cuts it into parts, which adds up what
    the first leaves."""
    parts = dict(word.split("=") for word in words).get("parts")
    return None if parts is None else (split_sums(program, int(parts), ADDED).second, ADDING)


def _parts(program: Program) -> Sequence[object]:
    """Where a sum's rows are those of the result: a second kernel would store across its rows."""
    if leaves_sums(program):
        return PARTS
    try:
        return PARTS if split_sums(program, PARTS[0], ADDED) and not stored_across(program) else ()
    except NotApplicable:
        return ()


def _is_sliced(program: Program) -> bool:
    return any(op.kind == "reduce_scatter" for op in program.ops())


def stored_across(program: Program) -> bool:
    """Whether results lie across the registers: their last axis is over the rows of matmuls."""
    rows = {op.dst.type.names[0] for op in program.ops() if op.kind == "mma" and op.dst is not None}
    stores = [op for op in program.ops() if op.kind == "store" and len(op.srcs[0].type.axes) == 2]
    return any(op.spans[-1].axis in rows for op in stores)


def vectors_of_results(program: Program) -> frozenset[str]:
    """Vectors along the columns of sums that are loaded outside of loops for elementwise ops."""
    sums = [op.dst.type for op in program.ops() if op.kind == "mma" and op.dst is not None]
    outside = [item for item in program.body if isinstance(item, Op) and item.kind == "load"]
    names = loaded_vectors(program, frozenset(kind.names[-1] for kind in sums))
    return names & {op.dst.name for op in outside if op.dst is not None}


def most_groups(program: Program) -> int:
    """Compute groups of a block where every 64 rows have one."""
    rows = [op.dst.type.shape[0] for op in program.ops() if op.kind == "mma" and op.dst is not None]
    return max(rows, default=0) // ROWS_PER_GROUP


def _dynamic(words: tuple[str, ...]) -> bool:
    return "balance=dynamic" in words


def _balance(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    scheduler = plan.tile_scheduler if value == "longest_first" else value
    return plan.with_options(tile_scheduler=scheduler, reverse=growing_axis(program))


def _raster(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    # Tasks of attention are taken over that many heads at a time, of all batches.
    heads = bool(loaded_once(program)) and len(program.grid) > 1
    rows = WHOLE if value == "all" else int(value)
    return plan.with_options(supergroup=rows, grouped="all" if heads else "row")


def _cluster(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    del program
    axis, _, blocks = value.partition(":")
    return plan.with_options(cluster=(axis, int(blocks)))


def _task(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    rings = dict.fromkeys(loaded_once(program), 2)
    return plan.with_options(task_rings=rings, store_panels=1, overlap_next_task=value == "overlap")


def _store(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    if value == "direct":
        return plan.with_options(store=value)
    return plan.with_options(store_over=loaded_once(program)[0], store_panels=1)


def _balances(program: Program) -> Sequence[str]:
    return (*(["longest_first"] if growing_axis(program) else []), "dynamic", "serpentine")


def _rasters(program: Program) -> Sequence[object]:
    if len(program.grid) < 2:
        return ()
    return (*RASTERS, *(["all"] if loaded_once(program) else []))


def _clusters(program: Program) -> Sequence[str]:
    if growing_axis(program):
        return ()
    return [f"{axis}:{blocks}" for axis in shared_axes(program) for blocks in CLUSTERS]


def _tasks(program: Program) -> Sequence[str]:
    if not loaded_once(program):
        return ()
    return ("prefetch", *(["overlap"] if len(program.loops()) == 1 else []))


_VALUES: Mapping[str, Callable[[Program], Sequence[object]]] = {
    "balance": _balances,
    "raster": _rasters,
    "cluster": _clusters,
    "slices": lambda program: SLICES if sliceable(program) else (),
    "parts": _parts,
    "task": _tasks,
    "panels": lambda program: (*PANELS, *([PLAIN_PANELS] if loaded_once(program) else [])),
    "rows": lambda program: PANEL_ROWS if stored_across(program) else (),
    "store": lambda program: ("direct", *(["over"] if loaded_once(program) else [])),
    "release": lambda program: ("early",) if loaded_once(program) else (),
    "resident": lambda program: ("2",),
    "groups": lambda program: range(1, most_groups(program)),
    "depth": lambda program: DEPTHS,
    "registers": lambda program: LOADERS,
    "launch": lambda program: ("dependent",),
    "vectors": lambda program: ("shared",) if vectors_of_results(program) else (),
}
_OPTIONS = {
    "balance": _balance,
    "raster": _raster,
    "cluster": _cluster,
    "task": _task,
    "store": _store,
}
FIELDS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "panels": ("store_panels", int),
    "rows": ("store_rows", int),
    "release": ("early_release", bool),
    "resident": ("resident", int),
    "launch": ("dependent", bool),
    "vectors": ("share_vectors", bool),
}
