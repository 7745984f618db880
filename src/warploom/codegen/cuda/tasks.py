"""The grid level: which tasks a block does, and from a task's number to its position.

The order is kind to the L2 cache (super-groups) and to the last wave (longest first, serpentine,
dynamic). With the dynamic tile scheduler the producer takes the next task from a counter in global
memory when it has started the copies of the present one, and hands it to the compute groups through
a small ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.grid import TASK_SLOTS, cluster_axis
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import c_index
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Array, Index, Program, Read


def in_grid(program: Program, plan: LaunchPlan) -> str:
    """The C++ condition under which a clustered block's position is one of the grid."""
    name, extent = program.grid[cluster_axis(program, plan)]
    return f"{c_name(name)} < {c_index(extent)}"


def task_lines(
    program: Program,
    plan: LaunchPlan,
    loads: bool = True,
    sharing: int = 1,
    early: Sequence[str] = (),
) -> tuple[list[str], str]:
    """The head and the last lines of the loop over tasks; the head defines every grid index.
    `early` is what a block does for its first task before the previous grid has ended.

    With clusters a task is a cluster's: its blocks take neighbouring positions of the axis, or all
    `sharing` of them do the same one.
    """
    opening, closing = _walk(plan, plan.cluster[1] * sharing, loads)
    if plan.persistent and waits_in_roles(plan):
        opening = [*_for_first_task(program, plan, early), "wait_previous_grid();", *opening]
        early = ()
    body = indent(position_lines(program, plan, loads, early=early))
    return [*count_lines(program, plan), *opening, *body], closing


def count_lines(program: Program, plan: LaunchPlan) -> list[str]:
    """The extents of the grid and the number of tasks."""
    clustered = cluster_axis(program, plan)
    blocks = plan.cluster[1]
    names = [name for name, _ in program.grid]
    for name in plan.reverse:
        if name not in names:
            raise InputError(f"launch plan: reverse {name!r}, the grid has {names}")
    head: list[str] = []
    for number, (name, extent) in enumerate(program.grid):
        text = c_index(extent)
        if number == clustered:
            text = f"({text} + {blocks - 1}) / {blocks}"
        head.append(f"const int {name}_count = {text};")
    product = " * ".join(f"{name}_count" for name in names) or "1"
    return [*head, f"const int tasks = {product};"]


def position_lines(
    program: Program, plan: LaunchPlan, loads: bool, within: bool = False, early: Sequence[str] = ()
) -> list[str]:
    """From `task` to every grid index, and what the program reads to know its task; `within`: the
    task is one of the grid, so that nothing is divided for the first index. A block with one task
    knows its place before the previous grid has ended."""
    names = [c_name(name) for name, _ in program.grid]
    body = _places(program, plan, within)
    if not plan.persistent and waits_in_roles(plan):
        body += [*early, *_wait_with(names)]
    return [*body, *[read_line(read, loads, plan.cluster[1] > 1) for read in program.reads]]


def _places(program: Program, plan: LaunchPlan, within: bool = False) -> list[str]:
    clustered, blocks = cluster_axis(program, plan), plan.cluster[1]
    names = [name for name, _ in program.grid]
    body = _position(names, plan, within)
    for number, name in enumerate(names):
        value = f"{name}_place"
        if name in plan.reverse:
            value = f"({name}_count - 1 - {value})"
        if number == clustered:
            value = f"{value} * {blocks} + static_cast<int>(rank)"
        body.append(f"const int {c_name(name)} = {value};")
    return body


def waits_in_roles(plan: LaunchPlan) -> bool:
    """Whether each role waits for the previous grid itself, behind what it does before: a block
    with one task knows its place by then, and the loading warp may have asked L2 for operands."""
    return plan.dependent and (not plan.persistent or plan.fetch_early > 0)


def _for_first_task(program: Program, plan: LaunchPlan, early: Sequence[str]) -> list[str]:
    if not early:
        return []
    first, _ = first_and_stride(plan.cluster[1])
    inner = [*_places(program, plan), *early]
    return [
        "{",
        f"  const int task = {first};",
        "  if (task < tasks) {",
        *indent(indent(inner)),
        "  }",
        "}",
    ]


def _wait_with(names: Sequence[str]) -> list[str]:
    """Wait for the previous grid with the grid indices known: of arithmetic alone ptxas does most
    behind the wait (0.1 to 0.3 us of divisions), but not what a branch before it takes."""
    known = " | ".join(names) or "0"
    return [f"if (({known}) < 0) __trap();", "wait_previous_grid();"]


def next_lines(plan: LaunchPlan) -> tuple[list[str], list[str]]:
    """For a compute group that takes the next task when it wants to: declarations, and the lines
    that put its number into `next_task`, at least `tasks` when there is none."""
    if plan.tile_scheduler == "static":
        return (["int next_task = int(blockIdx.x) - int(gridDim.x);"], ["next_task += gridDim.x;"])
    if plan.tile_scheduler == "serpentine":
        return [
            "const int first = blockIdx.x, stride = gridDim.x;",
            "int next_task = 0, round = -1;",
        ], ["++round;", "next_task = round * stride + (round % 2 ? stride - 1 - first : first);"]
    return ["Cursor task_cursor;", "int next_task = 0;"], _taken("next_task = ")


def _taken(into: str) -> list[str]:
    """A compute group takes the number that the producer hands over."""
    return [
        "barrier_wait(task_full + task_cursor.slot * 8, task_cursor.parity);",
        # One lane reads and gives back; the shuffle tells the compiler that all have one value.
        "const int handed = lane == 0 ? shared_read(task_ring + task_cursor.slot * 4) : 0;",
        f"{into}__shfl_sync(0xffffffffu, handed, 0);",
        "if (lane == 0) barrier_arrive(task_empty + task_cursor.slot * 8);",
        f"advance<{TASK_SLOTS}>(task_cursor);",
    ]


def read_line(
    read: Read,
    loads: bool,
    guarded: bool,
    names: dict[str, str] | None = None,
    function: str = "GIVEN",
) -> str:
    """The declaration of a number that is read: by the producer, which is one thread, where it
    `loads`; `guarded` where its place may lie outside of the array."""
    value = f"{function}({element_of(read.array, read.at, names)})"
    if guarded:
        # A block of the last cluster may lie beyond the grid.
        checks = [
            f"static_cast<unsigned>({c_index(place, names)}) < static_cast<unsigned>({c_name(dim)})"
            for place, dim in zip(read.at, read.array.dims, strict=True)
        ]
        value = f"({' && '.join(checks)} ? {value} : 0)"
    # As with tasks: the shuffle keeps what depends on it uniform. The producer is one thread.
    name = (names or {}).get(read.name) or c_name(read.name)
    return f"const int {name} = " + (
        f"{value};" if loads else f"__shfl_sync(0xffffffffu, {value}, 0);"
    )


def element_of(array: Array, at: Sequence[Index], names: dict[str, str] | None = None) -> str:
    """The address of one element of an array."""
    last = len(at) - 1
    terms = [
        c_index(place, names) + ("" if number == last else f" * {array.name}_stride{number}")
        for number, place in enumerate(at)
    ]
    return f"{array.name}_data + {' + '.join(terms)}"


def first_and_stride(blocks: int) -> tuple[str, str]:
    """The first task of a block in clusters of so many, and from one to the next."""
    if blocks > 1:
        return f"blockIdx.x / {blocks}", f"gridDim.x / {blocks}"
    return "blockIdx.x", "gridDim.x"


def _walk(plan: LaunchPlan, blocks: int, loads: bool) -> tuple[list[str], str]:
    first, stride = first_and_stride(blocks)
    if plan.abreast > 1:
        first, stride = f"{first} + part * {stride}", f"{plan.abreast} * {stride}"
    if not plan.persistent:
        return [f"const int task = {first};", "if (task < tasks) {"], "}"
    if plan.tile_scheduler == "static":
        loop = f"for (int task = {first}; task < tasks; task += {stride}) {{"
        return ["#pragma unroll 1", loop], "}"
    if plan.tile_scheduler == "serpentine":
        return [
            f"const int first = {first}, stride = {stride};",
            "#pragma unroll 1",
            "for (int round = 0; round * stride < tasks; ++round) {",
            "  const int task = round * stride + (round % 2 ? stride - 1 - first : first);",
            "  if (task >= tasks) continue;",
        ], "}"
    slot = "task_ring + task_cursor.slot * 4"
    full, empty = (f"task_{kind} + task_cursor.slot * 8" for kind in ("full", "empty"))
    advance = f"advance<{TASK_SLOTS}>(task_cursor);"
    if not loads:
        return [
            "Cursor task_cursor;",
            "#pragma unroll 1",
            "for (;;) {",
            *indent(_taken("const int task = ")),
            "  if (task >= tasks) break;",
        ], "}"
    return [
        "Cursor task_cursor;",
        "int task = blockIdx.x;",
        "#pragma unroll 1",
        "for (;;) {",
        f"  barrier_wait({empty}, task_cursor.parity ^ 1);",
        f"  shared_write({slot}, task);",
        f"  barrier_arrive({full});",
        f"  {advance}",
        "  if (task >= tasks) break;",
    ], (
        "  // Every block takes once in vain; the last such take leaves the counter at 0.\n"
        "  task = gridDim.x + "
        "take_task(task_counter, ::max(tasks - int(gridDim.x), 0) + gridDim.x - 1);\n"
        "}"
    )


def _position(names: list[str], plan: LaunchPlan, within: bool) -> list[str]:
    if not plan.supergroup:
        lines = ["int rest = task;"]
        for name in reversed(names[within:]):
            lines += [f"const int {name}_place = rest % {name}_count;", f"rest /= {name}_count;"]
        return lines + [f"const int {name}_place = rest;" for name in names[:within]]
    if len(names) < 2:
        raise InputError(f"launch plan: supergroup {plan.supergroup} needs two grid axes")
    col, width = names[-1], f"{names[-1]}_count"
    height, row = f"{names[-2]}_count", f"{names[-2]}_place"
    lines: list[str] = []
    outer = names[:-2]
    if plan.grouped == "all":
        outer, row = names[:-1], "rest"
        height = "(" + " * ".join(f"{name}_count" for name in outer) + ")"
        lines = ["const int in_plane = task;"]
    else:
        lines = [
            f"int rest = task / ({height} * {width});",
            f"const int in_plane = task % ({height} * {width});",
        ]
    lines += [
        f"const int band = in_plane / ({plan.supergroup} * {width});",
        f"const int in_band = in_plane % ({plan.supergroup} * {width});",
        f"const int band_rows = ::min({plan.supergroup}, {height} - band * {plan.supergroup});",
        f"{'int' if row == 'rest' else 'const int'} {row} = band * {plan.supergroup} + "
        "in_band % band_rows;",
        f"const int {col}_place = in_band / band_rows;",
    ]
    for name in reversed(outer):
        lines += [f"const int {name}_place = rest % {name}_count;", f"rest /= {name}_count;"]
    return lines
