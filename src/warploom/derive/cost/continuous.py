"""The continuous optimum of a kernel's tiles: a geometric program and its dual certificate.

    minimise  H(g, s)   subject to   column(g, s) <= M for every column,  1 <= tile <= axis.

In logarithms this is convex, so the solver's point is the global optimum of the structure. We do
not take its word: `certificate` turns *any* multipliers into an exactly feasible dual point and so
into a proven lower bound; the gap between the two is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.derive.cost.cost import FULL, Accounting, memory, traffic
from warploom.derive.cost.posynomial import Posynomial
from warploom.derive.formula.external import cvxpy
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError


@dataclass(frozen=True)
class Optimum:
    """`traffic` values at `tiles` (real numbers); `bound` <= every traffic of this structure."""

    tiles: Mapping[str, float]
    traffic: float
    bound: float
    binding: tuple[str, ...]

    @property
    def gap(self) -> float:
        """Relative gap between the point and its certificate."""
        return (self.traffic - self.bound) / self.traffic


@dataclass(frozen=True)
class Program:
    """The program in logarithms: rows of exponents and logs of coefficients, objective first."""

    variables: tuple[str, ...]
    upper: tuple[float, ...]
    blocks: tuple[tuple[Any, Any], ...]
    names: tuple[str, ...]


def solve(kernel: Kernel, capacity: float, accounting: Accounting = FULL) -> Optimum:
    """The continuous optimum at `capacity` values of on-chip memory.

    Raises `InputError` when not even tiles of one fit, naming the column that overflows.
    """
    columns = memory(kernel, accounting)
    smallest = {loop.symbol: 1.0 for loop in kernel.loops}
    sizes = {axis: float(n) for axis, n in kernel.body.size.items()}
    for column in columns:
        least = column.value({**sizes, **smallest})
        if least > capacity:
            raise InputError(
                f"kernel {kernel.name} holds {least:.0f} values with every tile at 1 ({column}); "
                f"the level has {capacity:.0f}: use at least {least:.0f} or stream another axis"
            )
    objective = traffic(kernel).substitute(sizes)
    limits = [column.substitute(sizes).scaled(1.0 / capacity) for column in columns]
    program = logarithmic(
        objective, limits, {each.symbol: sizes[each.axis] for each in kernel.loops}
    )
    return minimise(program)


def logarithmic(
    objective: Posynomial, limits: Sequence[Posynomial], upper: Mapping[str, float]
) -> Program:
    """A geometric program (limits <= 1, 1 <= variable <= upper) in logarithms."""
    variables = tuple(upper)
    blocks: list[tuple[Any, Any]] = []
    for part in (objective, *limits):
        rows = np.array([[float(t.power(v)) for v in variables] for t in part.terms])
        logs = np.array([math.log(t.coefficient) for t in part.terms])
        blocks.append((rows.reshape(len(part.terms), len(variables)), logs))
    names = ("objective", *(str(limit) for limit in limits))
    return Program(variables, tuple(math.log(upper[v]) for v in variables), tuple(blocks), names)


def minimise(program: Program) -> Optimum:
    """Solve a program and certify the answer; raises `InputError` when it is infeasible."""
    if not program.variables:
        value = float(np.exp(program.blocks[0][1]).sum())
        return Optimum({}, value, value, ())
    cp = cvxpy()
    y = cp.Variable(len(program.variables))
    (rows, logs), *limits = program.blocks
    constraints = [cp.log_sum_exp(a @ y + b) <= 0 for a, b in limits]
    bounds = [y >= 0, y <= np.array(program.upper)]
    problem = cp.Problem(cp.Minimize(cp.log_sum_exp(rows @ y + logs)), constraints + bounds)
    problem.solve(solver="CLARABEL")
    if y.value is None:
        raise InputError(f"no tile sizes satisfy {', '.join(program.names[1:])} <= 1")
    point = np.clip(np.asarray(y.value, float), 0.0, np.array(program.upper))
    point = _pulled_inside(program, point)
    weights = [max(float(c.dual_value), 0.0) for c in constraints]
    value = float(np.exp(logs + rows @ point).sum())
    binding = tuple(
        name
        for name, (a, b) in zip(program.names[1:], limits, strict=True)
        if float(np.exp(b + a @ point).sum()) > 0.999
    )
    tiles = dict(zip(program.variables, np.exp(point).tolist(), strict=True))
    return Optimum(tiles, value, certificate(program, point, weights), binding)


def _pulled_inside(program: Program, point: Any) -> Any:
    """Shrink tiles by the solver's tolerance until every limit holds exactly."""
    for _ in range(60):
        worst = max(
            (float(np.exp(b + a @ point).sum()) for a, b in program.blocks[1:]), default=0.0
        )
        if worst <= 1.0:
            break
        point = np.maximum(point - math.log(worst) - 1e-12, 0.0)
    return point


def certificate(program: Program, point: Any, weights: Sequence[float]) -> float:
    """A proven lower bound from any point and any non-negative multipliers (weak duality).

    The dual of min log Σ exp(A0 y + b0) s.t. log Σ exp(Ai y + bi) <= 0 is, over δ with
    Σ δ0 = 1, Σ δi = λi, Σ Aᵀδ = 0:  Σ δ b - Σ δ0 log δ0 - Σ δi log(δi / λi). Softmax weights at the
    point give δ; whatever is left of Aᵀδ is taken up by the multipliers of 1 <= tile <= axis, so
    the dual point is feasible to the last bit of arithmetic.
    """
    rest = np.zeros(len(program.variables))
    value = 0.0
    for (rows, logs), weight in zip(program.blocks, (1.0, *weights), strict=True):
        if weight <= 0:
            continue
        scores = logs + rows @ point
        share = np.exp(scores - scores.max())
        share = share / share.sum()
        delta = weight * share
        rest = rest + rows.T @ delta
        used = share > 0
        value += float(delta @ logs - (delta[used] * np.log(share[used])).sum())
    upper = np.maximum(-rest, 0.0)
    value -= float(upper @ np.array(program.upper))
    return math.exp(value)
