"""`warploom optimize`: all floors for one kernel, one report."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from warploom.autosched.schedules import NAMES
from warploom.cli.named import Hopper, Name
from warploom.cli.options import Json, Settings, say, settings_of
from warploom.engine.points import Space, described
from warploom.engine.search import EFFORTS
from warploom.errors import InputError, Interrupted
from warploom.files import check_folder
from warploom.flows.optimize import optimize as run_optimize
from warploom.flows.optimized import BEST, Optimized, OptimizeSettings, order_of
from warploom.flows.record import record


def optimize(
    name: Name,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="folder for the results")
    ] = None,
    gpu: Hopper = "h200",
    settings: Settings = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="best (of the tuned table, else of several), " + ", ".join(NAMES)
        ),
    ] = BEST,
    measure: Annotated[
        str, typer.Option(metavar="gpu|none|auto", help="auto: on the GPU when there is one")
    ] = "auto",
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="of the solver, a loop")
    ] = 10.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="compile every named schedule too, for the table")
    ] = False,
    effort: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(EFFORTS),
            help="of the search for your own program; normal unless given",
        ),
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="print what there is to choose, and build nothing")
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="write the kernel's tuned table, with a row for each line of key=value",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="write trace.json for Perfetto: each step of each warp group"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Search for the fastest kernel of a program, build, check and report it; time it on a GPU."""
    request = OptimizeSettings(
        name,
        gpu,
        settings_of(settings),
        schedule,
        measure,
        time_limit,
        compare,
        effort if effort and recorded is None else "",
        trace,
    )
    if space:
        _refuse_others("--space", request, as_json, "")
        if out is not None:
            raise InputError("--space prints a text and builds nothing: leave out -o")
        typer.echo(described(Space(name, request.settings)))
    elif recorded is not None:
        _refuse_others("--record", request, as_json, measure)
        _record(request, recorded, out, effort or "")
    elif out is None:
        raise InputError("optimize needs -o FOLDER for the results")
    else:
        _search(request, out, as_json)


def _refuse_others(option: str, request: OptimizeSettings, as_json: bool, measure: str) -> None:
    """Refuse what else was asked for than a kernel, its settings and how to measure."""
    usual = OptimizeSettings(request.name, settings=request.settings, measure=measure or "auto")
    words = {"seconds": "time-limit"}
    given = [
        f"--{words.get(one.name, one.name)}"
        for one in fields(request)
        if getattr(request, one.name) != getattr(usual, one.name)
    ]
    given += ["--json"] if as_json else []
    if given:
        raise InputError(f"{option} does not go with {', '.join(given)}")


def _search(request: OptimizeSettings, out: Path, as_json: bool) -> None:
    try:
        found = run_optimize(request, out, say)
    except KeyboardInterrupt:
        left = f"what lies in {out} is whole" if out.exists() else f"nothing is in {out} yet"
        raise Interrupted(
            f"interrupted; {left}, and the same command takes up what was compiled"
        ) from None
    typer.echo(json.dumps(found.to_json()) if as_json else summary(found))


def _record(request: OptimizeSettings, shapes: Path, out: Path | None, effort: str) -> None:
    try:
        lines = [line.split() for line in shapes.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"--record {shapes}: expected a file of shapes ({error})") from None
    if out is not None:
        check_folder(out)
    where = None if out is None else out / "tuned.toml"
    typer.echo(record(request, [settings_of(line) for line in lines], say, where, effort))


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
    lines.append(found.headline)
    if found.traced is not None:
        lines.append(f"trace: {found.traced}")
    lines.append(", ".join(f"{name} {value:.1f} s" for name, value in found.seconds.items()))
    lines.append(f"result: {found.folder}/report.html")
    return "\n".join(lines)
