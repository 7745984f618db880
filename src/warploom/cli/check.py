"""`warploom check`: what another build of an export's kernels lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.options import Json, say
from warploom.errors import CheckFailed
from warploom.flows import export as flow


def check(
    manifest: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="manifest.json of an export, or its folder")
    ],
    as_json: Json = False,
) -> None:
    """Build the kernels of an export again; exit 1 where one is worse than its manifest says."""
    rows = flow.check(manifest, say)
    if as_json:
        typer.echo(json.dumps(rows))
    for row in [] if as_json else rows:
        same = row["same"]["cubin"]
        code = "the same bytes" if same else "another cubin, which lost nothing"
        typer.echo(
            f"{row['kernel']}: {'LOST' if row['lost'] else code} ({row['compiler']['here']})"
        )
    if lost := [line for row in rows for line in row["lost"]]:
        raise CheckFailed("; ".join(lost))
