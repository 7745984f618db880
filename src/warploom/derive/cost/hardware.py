"""Hardware-aware configuration: variables, warps per SM, clocks per pipe, what may overlap.

Everything is computed from a kernel, the element types of its arrays and the
sub-loop slices; the paper's Hopper and Ampere numbers are only in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.derive.cost.gpu import BYTES, Gpu
from warploom.derive.cost.work import pipe_of
from warploom.derive.formula.graph import Node
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError

WARP_GROUP = 128
"""Threads of a Hopper warp group; one thread holds one row."""
SCALE_ADD = 2
"""Operations to rescale one accumulator and add to it."""


@dataclass(frozen=True)
class Recipe:
    """How a kernel is laid on the hardware.

    `rows`: the axis dealt to threads; `row_tile`: rows of one warp group (or warp); `dtypes`: type
    of arrays and of "accumulator"; `slices`: temporaries of the accumulate sub-loop, in values a
    row (the paper's d′ and d″); `buffers`: copies of each streamed slice.
    """

    rows: str
    row_tile: int = WARP_GROUP
    dtypes: tuple[tuple[str, str], ...] = ()
    accumulator: str = "fp16"
    slices: tuple[int, ...] = (32, 8)
    buffers: int = 2
    staging: bool = True

    def bytes_of(self, value: str) -> float:
        """Element size of an array, or of what is computed from it."""
        return BYTES[dict(self.dtypes).get(value, self.accumulator)]


@dataclass(frozen=True)
class Variable:
    """One pre-allocated variable: where it lives, who shares it, its bytes."""

    name: str
    place: str
    owner: str
    bytes: float


@dataclass(frozen=True)
class Configuration:
    """How many row tiles an SM holds, and why not more."""

    variables: tuple[Variable, ...]
    shared_per_block: float
    shared_per_group: float
    registers_per_group: float
    by_shared: float
    by_registers: float

    @property
    def groups(self) -> int:
        """Row tiles resident on one SM."""
        return int(min(self.by_shared, self.by_registers))


def configure(kernel: Kernel, recipe: Recipe, gpu: Gpu) -> Configuration:
    """List the variables of one thread block and how many row tiles fit.

    N_max = (M_max - M_block)/M_group for shared memory, M_max/M_group for registers. Raises
    `InputError` when not one fits.
    """
    if recipe.rows not in kernel.body.size:
        raise InputError(f"no axis {recipe.rows!r} to deal to threads: {sorted(kernel.body.size)}")
    found = variables(kernel, recipe)
    block = sum(v.bytes for v in found if v.owner == "block")
    group = sum(v.bytes for v in found if v.owner == "group" and v.place == "shared")
    registers = sum(v.bytes for v in found if v.place == "registers")
    by_shared = (gpu.block_bytes - block) / group if group else float("inf")
    by_registers = gpu.register_bytes / registers if registers else float("inf")
    if min(by_shared, by_registers) < 1:
        raise InputError(
            f"kernel {kernel.name}: one row tile needs {block + group:.0f} B of shared memory and "
            f"{registers:.0f} B of registers; {gpu.name} has {gpu.block_bytes:.0f} and "
            f"{gpu.register_bytes:.0f}: halve the streamed slice"
        )
    return Configuration(tuple(found), block, group, registers, by_shared, by_registers)


def variables(kernel: Kernel, recipe: Recipe) -> list[Variable]:
    """Streamed slices are the block's, row inputs and staging the group's, the rest registers."""
    found: list[Variable] = []
    widest = 0.0
    for array in kernel.body.inputs:
        size = recipe.bytes_of(array.name) * _span(kernel, array.axes, recipe)
        if kernel.result_depth[array.name] >= kernel.outer:
            found.append(Variable(array.name, "shared", "block", size * recipe.buffers))
        else:
            found.append(Variable(array.name, "shared", "group", size))
    for node in kernel.states:
        wide = [a for a in node.axes if a != recipe.rows and _extent(kernel, a, recipe) > 1]
        if wide:
            size = _span(kernel, node.axes, recipe) * recipe.bytes_of("")
            widest = max(widest, size)
            found.append(Variable(node.name, "registers", "group", size))
    if recipe.staging and widest:
        found.append(Variable("staging", "shared", "group", widest))
    for node in _fragments(kernel):
        size = _span(kernel, node.axes, recipe) * recipe.bytes_of(node.name)
        found.append(Variable(node.name, "registers", "group", size))
    unit = recipe.row_tile * recipe.bytes_of("")
    found += [Variable(f"slice {n}", "registers", "group", n * unit) for n in recipe.slices]
    narrow = [n for n in kernel.states if set(n.axes) <= {recipe.rows}]
    factors = {c.matrix for c in kernel.corrections}
    running = len(narrow) + len(factors)
    found.append(Variable("statistics", "registers", "group", running * unit))
    return found


def _fragments(kernel: Kernel) -> list[Node]:
    """Score-like tiles: what one tensor-core box leaves and what the next one takes in."""
    body = kernel.body
    tensor = [n for n in body.nodes if pipe_of(kernel, n) == "tensor"]
    made = [n for n in tensor if not kernel.closed_loops(n)]
    taken = [body.node[i] for n in tensor for i in n.inputs if i in body.node]
    return [*made, *dict.fromkeys(n for n in taken if n not in made)]


def _extent(kernel: Kernel, axis: str, recipe: Recipe) -> int:
    """The tile of an axis: the recipe's for rows, else the kernel's, else whole."""
    if axis == recipe.rows:
        return recipe.row_tile
    index = kernel.depth_of_axis.get(axis)
    return kernel.body.size[axis] if index is None else kernel.tile[kernel.loops[index].symbol]


def _span(kernel: Kernel, axes: tuple[str, ...], recipe: Recipe) -> float:
    """Values of a tile."""
    count = 1.0
    for axis in axes:
        count *= _extent(kernel, axis, recipe)
    return count


@dataclass(frozen=True)
class PipeUse:
    """One operation of a stream step, for one row: operations, rate, clocks."""

    operation: str
    pipe: str
    count: float
    rate: float

    @property
    def clocks(self) -> float:
        """Clocks one row costs an SM."""
        return self.count / self.rate


def clock_table(kernel: Kernel, recipe: Recipe, gpu: Gpu) -> tuple[PipeUse, ...]:
    """Operations of one row and one stream step by pipe.

    Contractions at the rate of the widest type they read; special functions with one extra for each
    correction; rescale-and-add of every wide accumulator on the ordinary lanes.
    """
    body = kernel.body
    uses: list[PipeUse] = []
    for node in body.nodes:
        span = (
            _span(kernel, tuple(dict.fromkeys((*node.axes, *node.over))), recipe) / recipe.row_tile
        )
        if pipe_of(kernel, node) == "tensor":
            types = [_type_of(name, recipe) for name in node.inputs]
            widest = max(types, key=lambda t: BYTES[t])
            uses.append(PipeUse(node.name, f"tensor {widest}", 2 * span, gpu.tensor[widest]))
        elif node.op in ("exp", "log") and kernel.work_depth(node) == len(kernel.loops) - 1:
            extra = len({c.matrix for c in kernel.corrections})
            uses.append(PipeUse(node.name, "special", span + extra, gpu.special))
    wide = [n for n in kernel.states if n.name in kernel.correction_of and len(n.axes) > 1]
    for node in wide:
        span = _span(kernel, node.axes, recipe) / recipe.row_tile
        uses.append(
            PipeUse(f"rescale {node.name}", "fp", SCALE_ADD * span, gpu.lanes(recipe.accumulator))
        )
    return tuple(uses)


def _type_of(name: str, recipe: Recipe) -> str:
    """The element type of a contraction's operand: an array's own, or the accumulator's."""
    return dict(recipe.dtypes).get(name, recipe.accumulator)


def interval(uses: tuple[PipeUse, ...]) -> dict[str, float]:
    """Clocks a row by unit: all tensor work shares one pipe. The largest is the step's interval."""
    total: dict[str, float] = {}
    for use in uses:
        unit = use.pipe.split()[0]
        total[unit] = total.get(unit, 0.0) + use.clocks
    return total


def ceiling(uses: tuple[PipeUse, ...], gpu: Gpu) -> float:
    """FLOP/s when everything but the binding pipe is hidden: a ceiling, not a measurement."""
    work = sum(use.count for use in uses if use.pipe.startswith("tensor"))
    return work / max(interval(uses).values()) * gpu.sms * gpu.clock
