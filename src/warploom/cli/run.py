"""`warploom run`: a kernel on random data, on the interpreter, the emulated or a real GPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warploom.cli.named import Name
from warploom.cli.options import Json, Seed, Settings, settings_of
from warploom.flows.notebook import PLACES
from warploom.flows.notebook import run as run_kernel


def run(
    name: Name,
    on: Annotated[
        str,
        typer.Option(
            metavar="|".join(PLACES),
            help="cpu: the interpreter; emulated: its CUDA C++ on a CPU; gpu: launched",
        ),
    ] = "cpu",
    settings: Settings = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a kernel on random data; exit 1 where an output is not float64's.

    An element that no task writes, or several, is an error as well.
    """
    result = run_kernel(name, settings_of(settings), on, seed)
    typer.echo(json.dumps(result.to_json()) if as_json else result.numbers)
    result.require()
    if not as_json:
        sizes = ", ".join(f"{name} {size}" for name, size in result.sizes.items())
        typer.echo(f"pass: each element is written once and within its bound, at {sizes}")
