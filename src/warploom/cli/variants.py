"""`warploom variants`: the table of variants that a kernel of the library is chosen from."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.errors import InputError
from warploom.kernels.library import entry
from warploom.tables import as_text


def variants(name: Annotated[str, typer.Argument(help="gemm or attention")]) -> None:
    """Print the variants of a kernel: a line each, "." where a point says nothing."""
    table = entry(name).table
    if table is None:
        raise InputError(f"{name}: a program of your own has no table of variants")
    rows: list[tuple[str, ...]] = [("name", "sizes", "rules", "order", "plan", "allow")]
    for one, variant in table.variants.items():
        point = variant.point
        sizes = " ".join(f"{field}={value}" for field, value in point.settings)
        told = (" ".join(words) for words in (point.rules, (point.order,), point.plan, point.allow))
        rows.append((one, sizes, *told))
    typer.echo(as_text(rows))
