"""`warploom schedule`: a proven schedule for a built-in graph or one from JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warploom.errors import InputError
from warploom.files import write_text_atomically


def schedule(
    name: str = typer.Argument(help="a built-in graph (list: 'list') or a graph's .json file"),
    gpu: str = typer.Option("h100", help="the machine whose costs and limits apply"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a parameter, e.g. --set keys=176")
    ] = None,
    costs: str = typer.Option("", help="override costs: load.latency=520,mma.issue=10:16:30"),
    cost_end: str = typer.Option(
        "nominal", "--at", help="costs at nominal, low or high; a high schedule is robust"
    ),
    groups: int = typer.Option(0, help="4-warp compute groups on offer"),
    registers: int = typer.Option(0, help="most registers a thread may use"),
    stages: int = typer.Option(0, help="most iterations in flight"),
    template: str = typer.Option("", help="a schedule people wrote: lcsf, fa3_pingpong, fa4 ..."),
    tiles: bool = typer.Option(False, "--tiles", help="try a grid of tile shapes instead"),
    top: int = typer.Option(1, help="how many distinct optimal programs"),
    time_limit: float = typer.Option(60.0, help="seconds for the whole solve"),
    seed: int = typer.Option(1, help="seed of the solver"),
    workers: int = typer.Option(1, help="solver threads; more than 1 is not reproducible"),
    json_out: str = typer.Option("", "--json", help="write graph, target, schedule; - is stdout"),
    trace: str = typer.Option("", help="write a Perfetto / Chrome trace"),
    svg: str = typer.Option("", help="write a picture of the steady state"),
) -> None:
    """Solve, prove, check, simulate and draw the schedule of one loop."""
    for path in (json_out, trace, svg):
        if Path(path or "-").is_dir():
            raise InputError(f"cannot write {path}: it is a directory, expected a file name")
    # Not at the top: other commands need not load the solver, and work without it.
    from warploom.schedule import service  # noqa: PLC0415

    request = service.Request(
        name=name,
        gpu=gpu,
        settings=tuple(settings or ()),
        costs=costs,
        cost_end=cost_end,
        groups=groups,
        registers=registers,
        stages=stages,
        template=template,
        top=top,
        time_limit=time_limit,
        seed=seed,
        workers=workers,
    )
    console = Console(stderr=json_out == "-", highlight=False)
    if name == "list":
        service.show_catalogue(console)
        return
    if tiles:
        service.show_tiles(request, console)
        return
    result = service.answer(request)
    service.show(result, console)
    if json_out == "-":
        typer.echo(json.dumps(service.to_json(result)))
    elif json_out:
        write_text_atomically(Path(json_out), json.dumps(service.to_json(result), indent=1) + "\n")
    if trace:
        write_text_atomically(Path(trace), json.dumps(service.trace(result)) + "\n")
    if svg:
        write_text_atomically(Path(svg), service.picture(result))
