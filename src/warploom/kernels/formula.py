"""How a derived kernel is built: its program, launch and schedule; a formula as a user's kernel.

The derivation's decisions stay: the tile sizes, the nest, the split. Rules here choose the rest:
the schedule's name (it follows from the matrix products of the loops; a program without one is
laid over threads) and the launch plan (super-groups of rows when two axes of a product are grouped,
longest rows first under a mask, two states of a recurrence on an SM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from warploom.autosched.schedules import fitting_name
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.cost.timing import WARP_GROUP_ROWS, row_axis, state_rows
from warploom.derive.derive import Derivation, derive_on, derive_unshared
from warploom.derive.formula.evaluate import evaluate
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.chunk import of_channels
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lower.boxes import clean
from warploom.derive.lower.lower import programs
from warploom.errors import InputError
from warploom.tile import Program

BAND = 8  # rows of tasks a band, as the library's GEMM
FORMULA_GPU, FORMULA_TYPE = "h200", "bf16"  # what a formula is derived for as a user's kernel
FRAGMENT = 16  # columns, and numbers of the summed axis
RUN_POSITIONS = 2  # of an axis that tasks share out one by one, for a run


@dataclass(frozen=True)
class FormulaKernel:
    """A formula as one program: what a user's kernel is made of."""

    found: Derivation
    program: Program
    launch: LaunchPlan | None

    @property
    def whole(self) -> dict[str, int]:
        """Of dimensions that tiles take whole: tasks know of no more."""
        (kernel,), size = self.found.kernels, self.found.diagram.size
        return {clean(a): n for a, n in size.items() if a not in kernel.depth_of_axis}

    @property
    def sizes(self) -> dict[str, int]:
        """Of dimensions, for a run: those that tiles take whole, and few tasks."""
        (kernel,), size = self.found.kernels, self.found.diagram.size
        groups = [one for one in kernel.loops if one.kind == "group"]
        ones = [one.axis for one in groups if kernel.tile[one.symbol] == 1]
        return self.whole | {clean(a): min(RUN_POSITIONS, size[a]) for a in ones}

    @property
    def full(self) -> dict[str, int]:
        """Of all dimensions, those of the formula."""
        return {clean(axis): size for axis, size in self.found.diagram.sizes}

    def reference(self, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The formula in float64."""
        diagram = self.found.diagram
        given = {one.name: values[clean(one.name)] for one in diagram.inputs}
        lengths = {
            axis: length
            for one in diagram.inputs
            for axis, length in zip(one.axes, given[one.name].shape, strict=True)
        }
        results = evaluate(diagram.resized(lengths), given)
        return {clean(name): value for name, value in results.items()}


def formula_kernel(diagram: Diagram) -> FormulaKernel:
    """The program of a formula, derived for an H200 in bf16: the fastest one, or where several
    blocks would share an axis and a second program join their parts, the fastest without that.

    Raises `InputError` for a formula that takes more than one program, or none.
    """
    counts: list[int] = []
    for derived in (partial(derive_on, streams=1), derive_unshared):
        found = derived(diagram, FORMULA_GPU, FORMULA_TYPE)
        narrow = narrow_in_full(found)
        made = [
            (kernel, program)
            for kernel in found.kernels
            for program in programs(padded(kernel), FORMULA_TYPE, FORMULA_TYPE, narrow)
        ]
        if len(made) == 1:
            ((kernel, program),) = made
            launch = launch_plan(kernel, program) if fitting_name(program) else None
            return FormulaKernel(found, program, launch)
        counts.append(len(made))
    raise InputError(
        f"{diagram.name}: derived as {min(counts)} programs, expected one; `warploom derive "
        "--build` compiles all of them"
    )


def narrow_in_full(found: Derivation) -> dict[str, str]:
    """fp32 for what kernels hand on or give that has one axis at most: statistics and losses."""
    made = {name for kernel in found.kernels for name in kernel.body.outputs}
    axes = {n: k.body.axes_of(n) for k in found.kernels for n in k.body.outputs}
    size = found.diagram.size
    return {name: "fp32" for name in made if sum(size[a] > 1 for a in axes[name]) <= 1}


def padded(kernel: Kernel) -> Kernel:
    """Axes of products that fill no fragment (the heads of a decoding step, 77 keys) up to one.

    Programs are generic in their sizes: what lies beyond the array is loaded as zero, masked where
    it is reduced, and not stored.
    """
    body, wanted = kernel.body, dict[str, int]()
    views = [terms for node in body.nodes if node.kind == "view" for _, terms in node.attr("map")]
    moving = {axis for terms in views if len(terms) > 1 for axis, _ in terms}
    for node in body.nodes:
        if node.kind == "scan_contract":
            wanted[state_rows(body, node)] = WARP_GROUP_ROWS
        elif node.kind == "contract" and len(node.inputs) == 2:
            rows = row_axis(body, node) or node.axes[0]
            for axis in (*node.axes, *node.over):
                wanted.setdefault(axis, FRAGMENT)
            wanted[rows] = WARP_GROUP_ROWS
    short = {
        axis: -(-body.size[axis] // multiple) * multiple
        for axis, multiple in wanted.items()
        if axis not in {*kernel.depth_of_axis, *moving}
        and body.size[axis] % multiple
        and (body.size[axis] > 1 or multiple == WARP_GROUP_ROWS)
    }
    # Constants that are a power of a length stay those of the formula.
    longer = replace(body, sizes=tuple({**body.size, **short}.items()))
    return replace(kernel, body=longer, padded=tuple(short))


def launch_plan(kernel: Kernel, program: Program) -> LaunchPlan:
    """Bands of tasks where rows and columns of a product are grouped; masked rows reversed; two
    states of a recurrence on an SM, in two blocks or in two groups."""
    chunked = [node for node in kernel.body.nodes if node.kind == "scan_contract"]
    if chunked:
        axis = state_rows(kernel.body, chunked[0])
        groups = -(-kernel.tile.get(f"g_{axis}", kernel.body.size[axis]) // WARP_GROUP_ROWS)
        alone = groups > 1 or len(chunked) > 1 or of_channels(kernel.body, chunked[0])
        split = clean(axis) if groups > 1 else ""
        return LaunchPlan(split=split, resident=1 if alone else 2, store_panels=1)
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
