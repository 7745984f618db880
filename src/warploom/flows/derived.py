"""From a derivation to machine code: every kernel lowered, scheduled by rule and compiled.

What a derivation leaves open is chosen by rules and reported (`kernels.formula`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.derive.derive import Derivation
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.lower.lower import programs
from warploom.errors import DoesNotFit, InputError, Spills
from warploom.kernels.formula import narrow_in_full, padded, schedule_of
from warploom.tile import Program
from warploom.tile.dtypes import HALVES

SHARES = (0.75, 0.5, 0.35, 0.25)  # of a GPU, where tiles fill more than it has
ELEMENTS = HALVES  # element types the emitter has matrix products for in any order


@dataclass(frozen=True)
class DerivedKernel:
    """One program of a derivation: what ran through the floors, and the machine code."""

    kernel: Kernel
    program: Program
    schedule: KernelSchedule | SimtSchedule
    built: Built


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
            schedule = schedule_of(kernel, program)
            result.append(DerivedKernel(kernel, program, schedule, build(program, schedule)))
    return tuple(result)
