"""`warploom emulate`: CUDA C++ on an emulated Hopper, under several orders of events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.build import Settings, settings_of
from warploom.emulate.program import SECONDS, CudaProgram
from warploom.emulate.report import Fault
from warploom.errors import CheckFailed, InputError
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.kernels.select import select


def emulate(
    what: Annotated[
        str, typer.Argument(help="FILE.cu with a main, or a kernel: gemm, FILE.py:OBJECT")
    ],
    seed: Annotated[int | None, typer.Option(help="replay this order of events")] = None,
    seeds: Annotated[int, typer.Option(help="try so many orders of events")] = 5,
    timeout: Annotated[float, typer.Option(help="seconds for a run of a FILE.cu")] = SECONDS,
    settings: Settings = None,
) -> None:
    """Run a kernel on an emulated Hopper: exit 1 with both sides of the first fault."""
    if seeds < 1 or (seed is not None and seed < 0):
        raise InputError(f"--seeds {seeds} --seed {seed}: expected at least 1 and at least 0")
    orders = range(1, seeds + 1) if seed is None else range(seed, seed + 1)
    if what.endswith((".cu", ".cuh", ".cpp")):
        if settings:
            raise InputError("--set is for kernels in tile language; a FILE.cu has its own sizes")
        sources = _file(Path(what), orders, timeout)
    else:
        sources = _kernel(what, settings, orders)
    count = f"{len(orders)} orders of events" if len(orders) > 1 else f"seed {orders[0]}"
    typer.echo(f"{sources}: no fault under {count}")


def _file(path: Path, orders: range, timeout: float) -> str:
    program = CudaProgram.of(path)
    for seed in orders:
        run = program.run(seed, timeout)
        if run.fault is not None:
            _explain(run.fault, {program.name: program.text})
        if seed == orders[0] and run.output:
            typer.echo(run.output.rstrip("\n"))
    return str(path)


def _kernel(name: str, settings: list[str] | None, orders: range) -> str:
    given = settings_of(settings)
    sizes = configure(name, given)[1]
    chosen = select(name, given)
    source = chosen.emitted()
    for seed in orders:
        try:
            checked(name, chosen.config, sizes, source, seed).require()
        except Fault as fault:
            _explain(fault, {source.file: source.text})
    return f"{name} ({chosen})"


def _explain(fault: Fault, sources: dict[str, str]) -> None:
    typer.echo(fault.shown(sources), err=True)
    raise CheckFailed(f"a fault under seed {fault.seed}: {fault.kind}")
