"""`warploom run`: a kernel on random data, on the interpreter, the emulated or a real GPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warploom.cli.build import Json, Name, Settings, settings_of
from warploom.errors import InputError
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.kernels.select import select

PLACES = ("cpu", "emulated", "gpu")


def run(
    name: Name,
    on: Annotated[
        str,
        typer.Option(help="cpu: the interpreter; emulated: its CUDA C++ on a CPU; gpu: launched"),
    ] = "cpu",
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="seed of the random inputs")] = 0,
    as_json: Json = False,
) -> None:
    """Run a kernel on random data: right to float64, written whole, each element by one task?"""
    if on not in PLACES:
        raise InputError(f"--on {on!r}: expected {', '.join(PLACES[:-1])} or {PLACES[-1]}")
    if seed < 0:
        raise InputError(f"--seed {seed}, expected at least 0")
    sizes = configure(name, settings_of(settings))[1]
    chosen = select(name, settings_of(settings))
    code = None if on == "cpu" else chosen.build() if on == "gpu" else chosen.emitted()
    result = checked(name, chosen.config, sizes, code, seed)
    typer.echo(json.dumps(result.to_json()) if as_json else result.numbers)
    result.require()
