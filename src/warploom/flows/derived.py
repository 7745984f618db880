"""From a derivation to machine code: every kernel lowered, scheduled by rule and compiled.

What a derivation leaves open is chosen by rules and reported (`kernels.formula`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.derive.bounds.bounds import check as check_bound
from warploom.derive.derive import Derivation
from warploom.derive.formula.frontend import Expr, as_diagram
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lower.lower import programs
from warploom.errors import CheckFailed, DoesNotFit, InputError, Spills
from warploom.kernels.formula import launch_plan, narrow_in_full, padded
from warploom.objects import called, defined, load_object, names_object
from warploom.tile import Program
from warploom.tile.dtypes import HALVES

SHARES = (0.75, 0.5, 0.35, 0.25)  # of a GPU, where tiles fill more than it has
TOLERANCE = 1e-9
"""Largest relative float64 error of a derivation run on random input."""
ELEMENTS = HALVES  # element types the emitter has matrix products for in any order


@dataclass(frozen=True)
class DerivedKernel:
    """One program of a derivation: what ran through the floors, and the machine code."""

    kernel: Kernel
    program: Program
    schedule: KernelSchedule | SimtSchedule
    built: Built


def diagram_of(name: str) -> Diagram:
    """A named formula, or a Diagram, an Expr or a function giving one from a Python file."""
    if not names_object(name):
        if name.endswith(".py"):
            raise InputError(
                f"{name}: expected FILE.py:OBJECT, a Diagram, an Expr or a function that gives one"
                f"{defined(Path(name))}"
            )
        return formula(name)
    found = load_object(name)
    if callable(found) and not isinstance(found, (Diagram, Expr)):
        found = called(name, found)
    if not isinstance(found, (Diagram, Expr)):
        raise InputError(f"{name} is {type(found).__name__}, expected a Diagram or Expr")
    return as_diagram(found, name)


def verified(found: Derivation) -> float:
    """The relative error in float64 of a derivation that is run on random input; raises
    `CheckFailed` where it is above rounding, `BoundBroken` where less is moved than is proven
    necessary."""
    check_bound(found.diagram, found.traffic, found.capacity, found.recomputes)
    error, _ = found.verify()
    if not error <= TOLERANCE:
        raise CheckFailed(f"{found.diagram.name}: the derivation's result is off by {error:.2e}")
    return error


def build_fitting(
    found: Derivation, again: Callable[[float], Derivation], dtype: str
) -> tuple[Derivation, tuple[DerivedKernel, ...], str]:
    """(a derivation, its compiled programs, why it is not `found`, or ""): where tiles fill more
    than there is, `again` derives for a smaller share of shared memory and registers.

    Raises what the last share does, and `InputError` as `build_derivation`.
    """
    why, first = "", None
    for share in SHARES:
        try:
            return found, build_derivation(found, dtype), why
        except (DoesNotFit, Spills) as error:
            why = f"{error}; derived again for {share:.0%} of the memory on chip"
            first = first or error
        try:
            found = again(share)
        except InputError:  # nothing is as small
            raise first from None
    return found, build_derivation(found, dtype), why


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
            schedule = schedule_for(program, Policy(launch=launch_plan(kernel, program)))
            result.append(DerivedKernel(kernel, program, schedule, build(program, schedule)))
    return tuple(result)
