"""The scheduling problem of a loop of a kernel, or of a graph in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from warploom.autosched.schedules import fitting_name
from warploom.autosched.selected import HOPPER
from warploom.autosched.solve import loop_problem
from warploom.codegen.compile.build import BUILD_ARCHITECTURES
from warploom.errors import InputError
from warploom.kernels.select import written
from warploom.schedule import service
from warploom.schedule.solve.solve import Problem


def problem_of(
    name: str, settings: Mapping[str, str], loop: str, request: service.Request
) -> Problem:
    """The problem of a file's graph, or of a kernel's loop: the one that `build` solves."""
    if name.endswith(".json"):
        if settings or loop:
            given = f"--loop {loop}" if loop else f"--set {next(iter(settings))}"
            raise InputError(f"{given}: a JSON graph has neither loops nor parameters")
        return service.file_problem(Path(name), request)
    if request.groups or request.registers:
        raise InputError("--groups and --registers are for a graph of a file: a kernel has its own")
    if BUILD_ARCHITECTURES.get(request.gpu or service.GPU, HOPPER) != HOPPER:
        raise InputError(f"--gpu {request.gpu}: loops of kernels are scheduled for Hopper")
    program, launch = written(name, settings)
    if not loop and fitting_name(program) is None:
        raise InputError(f"{name} has no loop with a matmul: there is nothing to schedule")
    problem = loop_problem(program, launch, request.table(), loop)
    return replace(problem, effort=request.effort, stages=request.stages)
