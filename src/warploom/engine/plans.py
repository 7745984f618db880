"""How a grid may be laid over the GPU: the launch plans of a program, as words of a point.

A word is `option=value`; a plan has at most one of each option. What an option means for a program,
and where it has none, is read off the program: axes along which neighbours load the same operand,
loops that get longer along the grid, tiles loaded once a task.

    balance    longest_first, dynamic or serpentine: how tasks of different length are shared out
    raster     rows of tasks that run at a time, so that their operands stay in L2
    cluster    AXIS:BLOCKS, which load their common operands once
    task       prefetch or overlap: what of the next task begins during the present one
    panels     panels that a group may have in flight to global memory
    store      direct: results go from registers
    resident   blocks that share an SM
    registers  of a thread that loads; the others go to those that compute
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from warploom.autosched.named import register_pool
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op, Program

GRID = ("balance", "raster", "cluster")  # options that leave the loops' code as it is
CODE = ("task", "panels", "store", "resident", "registers")
RASTERS, CLUSTERS = (4, 8, 12, 16), (2, 4)
PANELS = (1, 4)
LOADERS = (32, 40)  # registers of a loading thread that computes many addresses
MOST_REGISTERS = 240  # of a computing thread


def choices(program: Program) -> Mapping[str, tuple[str, ...]]:
    """Values of each option that has a meaning for a program, besides that of a plain plan."""
    found: dict[str, tuple[str, ...]] = {}
    growing = growing_axis(program)
    if growing:
        found["balance"] = ("longest_first", "dynamic", "serpentine")
    if len(program.grid) > 1:
        found["raster"] = tuple(map(str, RASTERS))
    axes = shared_axes(program)
    if axes and not growing:
        found["cluster"] = tuple(f"{axis}:{blocks}" for axis in axes for blocks in CLUSTERS)
    if loaded_once(program):
        found["task"] = ("prefetch", *(["overlap"] if len(program.loops()) == 1 else []))
    found["panels"] = tuple(map(str, PANELS))
    found["store"] = ("direct",)
    found["resident"] = ("2",)
    found["registers"] = tuple(map(str, LOADERS))
    return found


def plans(program: Program) -> tuple[tuple[str, ...], ...]:
    """Every plan over the options of `GRID`; the plain one is first."""
    known = choices(program)
    open_ = [("", *(f"{name}={value}" for value in known.get(name, ()))) for name in GRID]
    found = (tuple(word for word in words if word) for words in product(*open_))
    return tuple(words for words in found if _fits(words))


def variations(program: Program, words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Plans that differ from one in one option of `CODE`."""
    known = choices(program)
    found: list[tuple[str, ...]] = []
    for name in CODE:
        others = tuple(word for word in words if not word.startswith(f"{name}="))
        if others != words:
            found.append(others)
        found += [ordered((*others, f"{name}={value}")) for value in known.get(name, ())]
    return tuple(one for one in found if one != words and _fits(one))


def planned(program: Program, plan: LaunchPlan, words: tuple[str, ...]) -> LaunchPlan:
    """The launch plan with these options; raises `InputError` where one has no meaning."""
    known = choices(program)
    for word in ordered(words):
        name, _, value = word.partition("=")
        if value not in known.get(name, ()):
            raise InputError(f"plan {word!r} of {program.name}: expected one of {dict(known)}")
        if name in _OPTIONS:
            plan = _OPTIONS[name](program, plan, value)
        elif name in FIELDS:  # not `registers`, which are the schedule's
            what, kind = FIELDS[name]
            plan = plan.with_options(**{what: kind(value)})
    return plan


def ordered(words: Sequence[str]) -> tuple[str, ...]:
    """The words in the order of their options: a plan is one point, and a later option may set
    again what an earlier one set (`task` says one panel, `panels` how many)."""
    return tuple(sorted(words, key=lambda word: (*GRID, *CODE).index(word.partition("=")[0])))


def registers(words: tuple[str, ...], groups: int, resident: int) -> tuple[int, int] | None:
    """(loading, computing) registers a thread, where the usual split is not taken."""
    given = dict(word.split("=") for word in words)
    wanted = given.get("registers")
    if wanted is None and not (_dynamic(words) and groups == 2):
        return None  # a dynamic order needs more to load, which three groups cannot spare
    loading = int(wanted or LOADERS[-1])
    computing = (register_pool(groups, resident) - loading) // groups // 8 * 8
    return loading, min(computing, MOST_REGISTERS)


def growing_axis(program: Program) -> tuple[str, ...]:
    """The last grid axis, where later tasks along it have more iterations."""
    axis = program.grid[-1][0]
    symbols = [loop.stop.symbols() | loop.start.symbols() for loop in program.loops()]
    return (axis,) if any(axis in names for names in symbols) else ()


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


def _dynamic(words: tuple[str, ...]) -> bool:
    return "balance=dynamic" in words


def _fits(words: tuple[str, ...]) -> bool:
    """Whether options suit each other, as `LaunchPlan` has it."""
    clusters = any(word.startswith("cluster=") for word in words)
    panels = any(word.startswith("panels=") for word in words)
    together = clusters and (_dynamic(words) or "task=overlap" in words)
    return not (together or (panels and "store=direct" in words))


def _balance(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    scheduler = plan.tile_scheduler if value == "longest_first" else value
    return plan.with_options(tile_scheduler=scheduler, reverse=growing_axis(program))


def _raster(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    # Tasks of attention are taken over that many heads at a time, of all batches.
    heads = bool(loaded_once(program)) and len(program.grid) > 2
    return plan.with_options(supergroup=int(value), grouped="all" if heads else "row")


def _cluster(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    del program
    axis, _, blocks = value.partition(":")
    return plan.with_options(cluster=(axis, int(blocks)))


def _task(program: Program, plan: LaunchPlan, value: str) -> LaunchPlan:
    rings = dict.fromkeys(loaded_once(program), 2)
    return plan.with_options(task_rings=rings, store_panels=1, overlap_next_task=value == "overlap")


_OPTIONS = {"balance": _balance, "raster": _raster, "cluster": _cluster, "task": _task}
FIELDS = {"panels": ("store_panels", int), "store": ("store", str), "resident": ("resident", int)}
