"""Operations of a kernel by pipe, as posynomials: tensor, special function, ordinary lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from warploom.derive.cost.cost import ASKED_AGAIN, extent, shortened, trips_of
from warploom.derive.cost.posynomial import ZERO, Posynomial, product, variable
from warploom.derive.formula.external import sympy
from warploom.derive.formula.graph import Node
from warploom.derive.formula.ops import op
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.lemmas.streaming import parse

CHANNEL_WEIGHTS = 6.0
"""Exponentials a channel and row: two sizes of blocks, two within one, before and after a chunk."""


@lru_cache(ASKED_AGAIN)
def operations(kernel: Kernel) -> Mapping[str, Posynomial]:
    """Operations of the dispatch by pipe: "tensor" (FLOP), "special" and "fp" (results)."""
    work: dict[str, Posynomial] = {"tensor": ZERO, "special": ZERO, "fp": ZERO}
    for node in kernel.body.nodes:
        pipe = pipe_of(kernel, node)
        if pipe == "none":
            continue
        work[pipe] = work[pipe] + _box_work(kernel, node)
        if node.kind == "scan_contract" and node.attr("gated"):
            weights = _weights_of_rows(kernel, node)
            work["special"], work["fp"] = work["special"] + weights, work["fp"] + weights.scaled(2)
    for name, correction in kernel.correction_of.items():
        node = kernel.body.node[name]
        index = max(kernel.closed_loops(node))
        loops = kernel.loops[: index + 1]
        steps = product(trips_of(kernel, each) for each in loops if each.axis not in node.axes)
        size = product(variable(axis) for axis in node.axes)
        row = correction.matrix[correction.targets.index(name)]
        active = sum(entry != "0" for entry in row)
        work["fp"] = work["fp"] + (size * steps).scaled(2.0 * active)
        if name == _first_with(kernel, correction.matrix):
            base = kernel.body.node[correction.bases[0]]
            rows = product(variable(axis) for axis in base.axes)
            special = _special_in(correction.matrix, correction.symbols)
            if special:
                work["special"] = work["special"] + (rows * steps_of(kernel, base, loops)).scaled(
                    special
                )
    return work


def steps_of(kernel: Kernel, node: Node, loops: tuple[Loop, ...]) -> Posynomial:
    """Trips of the loops whose axis a box lacks."""
    return product(trips_of(kernel, each) for each in loops if each.axis not in node.axes)


def _first_with(kernel: Kernel, matrix: tuple[tuple[str, ...], ...]) -> str:
    """The first reduction that uses a correction matrix: equal matrices are computed once."""
    return next(name for name, c in kernel.correction_of.items() if c.matrix == matrix)


def _special_in(matrix: tuple[tuple[str, ...], ...], symbols: tuple[tuple[str, str], ...]) -> int:
    """Special-function results in one correction matrix."""
    names = tuple(name for name, _ in symbols)
    count = 0
    for row in matrix:
        for entry in row:
            expression = parse(entry, names)
            functions = expression.atoms(*_functions())
            count += len(functions)
    return count


def _functions() -> tuple[type, ...]:
    """The sympy classes that run on the special-function unit."""
    return (sympy().exp, sympy().log)


def pipe_of(kernel: Kernel, node: Node) -> str:
    """The pipe of a box: a contraction is tensor-core work when both operands have a free axis
    that a matrix product needs; otherwise it is a weighted sum on the FP cores."""
    spec = op(node.op)
    if node.kind != "contract":
        return spec.pipe
    frames = [set(kernel.body.axes_of(name)) - set(node.over) for name in node.inputs]
    if len(frames) == 2 and frames[0] - frames[1] and frames[1] - frames[0]:
        return "tensor"
    return "fp"


@lru_cache(ASKED_AGAIN)
def shared_reads(kernel: Kernel, rows: int) -> Posynomial:
    """Values the tensor cores read from shared memory: one instruction covers `rows` rows.

    A product (m, n, k) reads its second operand once for every `rows` rows, its first once for
    every tile of columns, unless the first was computed and so lies in registers.
    """
    found = ZERO
    for node in kernel.body.nodes:
        if node.kind != "contract" or pipe_of(kernel, node) != "tensor":
            continue
        multiplies = _box_work(kernel, node).scaled(0.5)
        found = found + multiplies.scaled(1.0 / rows)
        if all(name in kernel.body.array for name in node.inputs):
            found = found + multiplies * extent(kernel, node.axes[-1]).raised(-1)
    return found


def recomputes(kernel: Kernel) -> bool:
    """Whether some matrix product is evaluated more than once: a loop that runs several times, on
    an axis the product lacks, stands outside of it."""
    for node in kernel.body.nodes:
        if node.kind != "contract":
            continue
        axes = {*node.axes, *node.over}
        for each in kernel.loops[: kernel.work_depth(node) + 1]:
            again = kernel.tile.get(each.symbol, 1) < kernel.body.size[each.axis]
            if each.axis not in axes and again:
                return True
    return False


def _box_work(kernel: Kernel, node: Node) -> Posynomial:
    """Operations of one box, repeated by every loop that re-runs it."""
    depth = kernel.work_depth(node)
    axes = dict.fromkeys((*node.axes, *node.over))
    base = product(variable(axis) for axis in axes)
    factor = op(node.op).flops
    if node.kind == "contract":
        factor = float(len(node.inputs))
    if node.op == "topk":
        factor = 1.0 + math.log2(max(int(node.attr("k")), 1))
    if node.kind == "scan_contract":
        return _scan_contract_work(kernel, node)
    loops = list(kernel.loops[: depth + 1])
    repeats = product(trips_of(kernel, each) for each in loops if each.axis not in axes)
    return shortened(kernel, (base * repeats).scaled(factor), loops if set(axes) else [])


def _weights_of_rows(kernel: Kernel, node: Node) -> Posynomial:
    """Exponentials of a gated chunk c of time t: c a step, or, with a gate for every channel,
    `CHANNEL_WEIGHTS` a channel; again in every group of columns of the state."""
    time, gate = str(node.attr("time")), kernel.body.axes_of(node.inputs[3])
    columns = [a for a in kernel.body.axes_of(node.factors[2]) if a != time][-1]
    channels = product(variable(a) for a in node.over if a in gate)
    steps = product(variable(a) for a in node.axes if a != columns)
    each = channels.scaled(CHANNEL_WEIGHTS) if set(node.over) & set(gate) else extent(kernel, time)
    groups = product(trips_of(kernel, one) for one in kernel.loops if one.axis == columns)
    return steps * each * groups


def _scan_contract_work(kernel: Kernel, node: Node) -> Posynomial:
    """Chunked causal contraction, chunk c of time t: c(d + e) + 2de products a step."""
    time = str(node.attr("time"))
    q, k, v = (kernel.body.axes_of(name) for name in node.factors)
    chunk = extent(kernel, time)
    batch = product(variable(a) for a in q if a in v)
    inner = product(variable(a) for a in k if a not in v)
    value = product(variable(a) for a in v if a not in k)
    rest = product(variable(a) for a in q if a not in v and a not in k)
    per_step = chunk * (inner + value) * rest + inner * value * rest + inner * value
    return (batch * per_step).scaled(2.0)
