"""`warploom optimize`: all floors for one kernel, one report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from warploom.autosched.schedules import NAMES
from warploom.cli.build import Gpu, Name, Settings, settings_of
from warploom.engine.points import Space, described
from warploom.engine.search import EFFORTS
from warploom.errors import InputError, Interrupted
from warploom.flows.optimize import optimize as run_optimize
from warploom.flows.optimized import BEST, Optimized, OptimizeSettings, order_of
from warploom.objects import names_object


def optimize(
    name: Name,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="folder for the results")] = None,
    gpu: Gpu = "h200",
    settings: Settings = None,
    schedule: Annotated[
        str, typer.Option(help="best (of the tuned table, else of several), " + ", ".join(NAMES))
    ] = BEST,
    measure: Annotated[
        str, typer.Option(help="gpu, none, or auto: the GPU when there is one")
    ] = "auto",
    time_limit: Annotated[float, typer.Option(help="seconds of the solver, a loop")] = 10.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="compile every named schedule too, for the table")
    ] = False,
    effort: Annotated[
        str | None,
        typer.Option(help=f"of the search for your own program: {', '.join(EFFORTS)} (normal)"),
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="print what there is to choose of your own program")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Program, schedule, CUDA, cubin, static verdict, and measured where a GPU is."""
    if space:
        if as_json or out is not None:
            raise InputError("--space prints a text and builds nothing: leave out --json and -o")
        if not names_object(name):
            raise InputError(f"--space: {name} has a tuned table; expected FILE.py:OBJECT")
        typer.echo(described(Space(name, settings_of(settings))))
        return
    if out is None:
        raise InputError("optimize needs -o FOLDER for the results")
    request = OptimizeSettings(
        name,
        gpu,
        settings_of(settings),
        schedule,
        measure,
        time_limit,
        compare,
        effort or "",
    )
    try:
        found = run_optimize(request, out, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what lies in {out} is whole") from None
    typer.echo(json.dumps(found.to_json()) if as_json else summary(found))


def summary(found: Optimized) -> str:
    """The result in a few lines, with where it lies."""
    lines = [f"built: {found.selected}", f"  {order_of(found.selected)}"]
    for trial in found.trials:
        mark = "  <- built" if trial.name == found.chosen.name else ""
        lines.append(f"  {trial}{mark}")
    lines.append(f"static verdict: {found.verdict}")
    lines.append(f"interpreted: {found.check}")
    if found.measured is None:
        lines.append("not measured: no GPU was used")
    else:
        rows = found.measured.rows(found.chosen.predicted)
        lines += [f"{what}: {value}" for what, value in rows]
    lines.append(", ".join(f"{name} {value:.1f} s" for name, value in found.seconds.items()))
    lines.append(f"result: {found.folder}/report.html")
    return "\n".join(lines)
