"""`warploom export`: kernels as folders that run without warploom."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warploom.cli.options import Json, Out, Settings, say, settings_of
from warploom.codegen.compile.build import BUILD_ARCHITECTURES
from warploom.flows import export as flow
from warploom.integrations.exports.forms import FORMS


def export(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL...",
            help="a kernel's name, FILE.py:OBJECT or build folder; NAME=... names it",
        ),
    ],
    to: Annotated[str, typer.Option(metavar="FORM", help=", ".join(FORMS))],
    out: Out,
    settings: Settings = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help=f"{', '.join(BUILD_ARCHITECTURES)}; {flow.GPU} unless given",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write kernels with their launcher and manifest.json to a folder that runs on its own."""
    files = flow.export(kernels, to, out, settings_of(settings), gpu, say)
    size = sum(path.stat().st_size for path in files)
    if as_json:
        typer.echo(json.dumps({"files": [str(path) for path in files], "bytes": size}))
        return
    typer.echo(f"{len(files)} files, {size:,} B -> {out}")
