"""`warploom emulate`: CUDA C++ on an emulated Hopper, under several orders of events."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.cli.options import Settings, settings_of
from warploom.emulate.program import SECONDS
from warploom.errors import CheckFailed
from warploom.flows.emulated import SEEDS, emulated, orders


def emulate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL", help="FILE.cu with a main, or a kernel: gemm, FILE.py:OBJECT"
        ),
    ],
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="replay this order of events")
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="try so many orders of events")] = SEEDS,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help=f"for a run of a FILE.cu; {SECONDS:g} unless given"),
    ] = None,
    settings: Settings = None,
) -> None:
    """Run a kernel on an emulated Hopper; exit 1 with the first fault and both of its lines."""
    found = emulated(what, settings_of(settings), orders(seed, seeds), timeout)
    if found.output and found.fault is None:
        typer.echo(found.output.rstrip("\n"))
    typer.echo(str(found), err=not found.passed)
    if found.fault is not None:
        raise CheckFailed(f"a fault under seed {found.fault.seed}: {found.fault.kind}")
