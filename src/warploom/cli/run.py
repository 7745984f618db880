"""`warploom run`: a kernel on random data, on the interpreter or a GPU, against float64."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warploom.cli.build import Json, Name, Settings, settings_of
from warploom.errors import CheckFailed, InputError
from warploom.kernels.library import check_on_cpu, check_on_gpu, configure, entry

PLACES = {"cpu": check_on_cpu, "gpu": check_on_gpu}


def run(
    name: Name,
    on: Annotated[str, typer.Option(help="cpu: the interpreter; gpu: compiled and launched")] = (
        "cpu"
    ),
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="seed of the random inputs")] = 0,
    as_json: Json = False,
) -> None:
    """Run a kernel on random data and compare every output with float64."""
    if on not in PLACES:
        raise InputError(f"--on {on!r}: expected {' or '.join(PLACES)}")
    if seed < 0:
        raise InputError(f"--seed {seed}, expected at least 0")
    config, sizes = configure(name, settings_of(settings))
    errors = PLACES[on](name, config, sizes, seed)
    bound, judge = entry(name).bound, entry(name).judge
    worst = max(errors, key=lambda output: errors[output])
    right = errors[worst] <= bound
    if as_json:
        typer.echo(json.dumps({"kernel": name, "on": on, "errors": errors, "bound": bound}))
    else:
        for output, error in errors.items():
            typer.echo(
                f"{name} {output} on {on}: relative error {error:.2e} (bound {bound:.0e}) against "
                f"{judge}"
            )
    if not right:
        raise CheckFailed(f"{name}: {worst} has relative error {errors[worst]:.2e} > {bound:.0e}")
