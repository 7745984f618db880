"""`warploom variants`: the table of variants that a kernel of the library is chosen from."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.errors import InputError
from warploom.kernels.library import entry
from warploom.tables import as_text


def variants(name: Annotated[str, typer.Argument(help="gemm or attention")]) -> None:
    """Print the variants of a kernel: a line each; "." is a column's default."""
    table = entry(name).table
    if table is None:
        raise InputError(f"{name}: a program of your own has no table of variants")
    typer.echo(as_text(table.variants))
