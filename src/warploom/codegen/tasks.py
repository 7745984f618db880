"""The grid level: from a task's number to its position, in an order kind to the L2 cache."""

from __future__ import annotations

from warploom.codegen.names import c_name
from warploom.codegen.plan import LaunchPlan
from warploom.codegen.values import c_index
from warploom.errors import InputError
from warploom.tile import Program


def cluster_axis(program: Program, plan: LaunchPlan) -> int:
    """The position of the clustered grid axis, or -1; raises when there is no such axis."""
    axis, blocks = plan.cluster
    if blocks == 1:
        return -1
    names = [name for name, _ in program.grid]
    if axis not in names:
        raise InputError(f"launch plan: cluster along {axis!r}, the grid has {names}")
    return names.index(axis)


def task_lines(program: Program, plan: LaunchPlan) -> tuple[list[str], str]:
    """The head and the last line of the loop over tasks; the head defines every grid index.

    With clusters a task is a cluster's: its blocks take neighbouring positions of the axis.
    """
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
    first, stride = "blockIdx.x", "gridDim.x"
    if blocks > 1:
        first, stride = f"blockIdx.x / {blocks}", f"gridDim.x / {blocks}"
    head += [
        f"const int tasks = {product};",
        "#pragma unroll 1",
        f"for (int task = {first}; task < tasks; task += {stride}) {{",
    ]
    body = _position(names, plan)
    for number, name in enumerate(names):
        value = f"{name}_place"
        if name in plan.reverse:
            value = f"({name}_count - 1 - {value})"
        if number == clustered:
            value = f"{value} * {blocks} + static_cast<int>(rank)"
        body.append(f"const int {c_name(name)} = {value};")
    return head + [f"  {line}" for line in body], "}"


def _position(names: list[str], plan: LaunchPlan) -> list[str]:
    if not plan.supergroup:
        lines = ["int rest = task;"]
        for name in reversed(names):
            lines += [f"const int {name}_place = rest % {name}_count;", f"rest /= {name}_count;"]
        return lines
    if len(names) < 2:
        raise InputError(f"launch plan: supergroup {plan.supergroup} needs two grid axes")
    row, col = names[-2:]
    lines = [
        f"int rest = task / ({row}_count * {col}_count);",
        f"const int in_plane = task % ({row}_count * {col}_count);",
        f"const int band = in_plane / ({plan.supergroup} * {col}_count);",
        f"const int in_band = in_plane % ({plan.supergroup} * {col}_count);",
        f"const int band_rows = ::min({plan.supergroup}, {row}_count - band * {plan.supergroup});",
        f"const int {row}_place = band * {plan.supergroup} + in_band % band_rows;",
        f"const int {col}_place = in_band / band_rows;",
    ]
    for name in reversed(names[:-2]):
        lines += [f"const int {name}_place = rest % {name}_count;", f"rest /= {name}_count;"]
    return lines
