"""From a derivation to machine code: every kernel lowered, scheduled by rule and compiled.

The derivation's decisions stay: the tile sizes, the nest, the split. Rules here choose the rest and
report it: the schedule's name (it follows from the matrix products of the loops; a program without
one is laid over threads) and the launch plan (super-groups of rows when two axes of a product are
grouped, longest rows first under a mask).
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.autosched.schedules import fitting_name, schedule_named
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.derive.cost.timing import WARP_GROUP_ROWS, row_axis
from warploom.derive.derive import Derivation
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lower.boxes import clean
from warploom.derive.lower.lower import programs
from warploom.errors import InputError
from warploom.tile import Program
from warploom.tile.dtypes import HALVES

BAND = 8  # rows of tasks a band, as the library's GEMM
ELEMENTS = HALVES  # element types the emitter has matrix products for in any order


@dataclass(frozen=True)
class DerivedKernel:
    """One program of a derivation: what ran through the floors, and the machine code."""

    kernel: Kernel
    program: Program
    schedule: KernelSchedule | SimtSchedule
    built: Built


def build_derivation(found: Derivation, dtype: str = "bf16") -> tuple[DerivedKernel, ...]:
    """Compile every program of a derivation, in the order they run.

    Raises `InputError` naming the box, op or loop for which there is no tile form or machine code.
    """
    if dtype not in ELEMENTS:
        raise InputError(
            f"--build in {dtype!r}: derived kernels are built in {', '.join(ELEMENTS)}"
        )
    result: list[DerivedKernel] = []
    types = narrow_in_full(found)
    for kernel in found.kernels:
        for program in programs(padded(kernel), dtype, dtype, types):
            schedule = schedule_of(kernel, program)
            result.append(DerivedKernel(kernel, program, schedule, build(program, schedule)))
    return tuple(result)


def narrow_in_full(found: Derivation) -> dict[str, str]:
    """fp32 for what kernels hand on or give that has one axis at most: statistics and losses."""
    made = {name for kernel in found.kernels for name in kernel.body.outputs}
    axes = {n: k.body.axes_of(n) for k in found.kernels for n in k.body.outputs}
    size = found.diagram.size
    return {name: "fp32" for name in made if sum(size[a] > 1 for a in axes[name]) <= 1}


def padded(kernel: Kernel) -> Kernel:
    """Rows of a product that fill no fragment (the heads of a decoding step) in a whole one.

    Programs are generic in their sizes: rows beyond the array are loaded as zero and not stored.
    """
    rows = {
        row_axis(kernel.body, node)
        for node in kernel.body.nodes
        if node.kind == "contract" and len(node.inputs) == 2
    }
    short = {
        axis: WARP_GROUP_ROWS
        for axis in rows - {""} - set(kernel.depth_of_axis)
        if kernel.body.size[axis] < WARP_GROUP_ROWS
    }
    return kernel.resized({**kernel.body.size, **short}) if short else kernel


def schedule_of(kernel: Kernel, program: Program) -> KernelSchedule | SimtSchedule:
    """The schedule a derived program gets: see `fitting_name` and `launch_plan`; normalisations,
    merges of a split and other programs without a matrix product are laid over threads."""
    name = fitting_name(program)
    if name is None:
        return simt(program)
    return schedule_named(program, name, launch_plan(kernel, program))


def launch_plan(kernel: Kernel, program: Program) -> LaunchPlan:
    """Bands of tasks where rows and columns of a product are grouped; masked rows reversed."""
    grid = [name for name, _ in program.grid]
    rows = {clean(str(kernel.body.node[box].attr("row"))) + "_tile" for _, box in kernel.bound_by}
    reverse = tuple(name for name in grid if name in rows)
    sides = _sides(kernel)
    # Parts of a split axis taken whole are columns of a product as tiles are.
    names = [name.removesuffix("_tile").removesuffix("_parts") for name in grid[-2:]]
    banded = len(grid) >= 2 and all(name in sides for name in names)
    return LaunchPlan(supergroup=BAND if banded else 0, reverse=reverse)


def _sides(kernel: Kernel) -> set[str]:
    """Row and column axes of products, batch axes left out."""
    found: set[str] = set()
    for node in kernel.body.nodes:
        if node.kind == "contract" and len(node.inputs) == 2:
            first, second = (set(kernel.body.axes_of(name)) for name in node.inputs)
            found |= {clean(axis) for axis in (first ^ second) & set(node.axes)}
    return found
