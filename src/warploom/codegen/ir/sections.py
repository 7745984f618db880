"""The top level of a program: loops, and straight runs of ops between them."""

from __future__ import annotations

from warploom.errors import InputError
from warploom.tile import Loop, Op, Program


def sections(program: Program) -> list[Loop | tuple[Op, ...]]:
    """The top level of a program as straight runs of ops and loops; raises for nested loops."""
    result: list[Loop | tuple[Op, ...]] = []
    run: list[Op] = []
    for item in program.body:
        if isinstance(item, Op):
            run.append(item)
            continue
        if any(isinstance(inner, Loop) for inner in item.body):
            raise InputError(
                f"{item.where}: a loop around a loop has no code beside matmuls; make one loop of "
                "both: for n in loop(a * b), with n // b and n % b as their steps"
            )
        if run:
            result.append(tuple(run))
        run = []
        result.append(item)
    if run:
        result.append(tuple(run))
    return result
